"""`hf-recurrent train`: pretrain a model on text, or continue with one."""

import logging
import signal

from ..messages import within_memory
from .parser import no_bars_for_files


def run(argv: list[str]) -> int:
    if any(word.split("=")[0] == "--task" for word in argv):
        from .train_task import run as run_task

        return run_task(argv)

    from ..training import arguments

    no_bars_for_files()
    # What its readers log about a broken file stands in the error that they raise.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    parsed = arguments.parse(argv)

    from ..training import train
    from ..training.dryrun import dry_run

    if parsed[2].dry_run:
        dry_run(*parsed)
        return 0
    with within_memory("try a smaller --batch-size, --sequence-length or model"):
        # A preempted run (SIGTERM) has saved all it needs: for the scheduler that is a success. Ctrl-C is not.
        return 130 if train(*parsed)["interrupted"] == signal.SIGINT else 0
