"""The command line: `hf-recurrent COMMAND`, each command in a module of its name with a function `run(argv)`.

Only the standard library is imported at the top. What a command needs is imported by the command.
"""

import contextlib
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator

from .. import __version__
from ..messages import nearest
from .parser import CommandLineError

COMMANDS = {
    "train": "pretrain a model on text, or continue with one",
    "generate": "continue a prompt",
    "plot": "curves of several runs",
    "report": "runs in one page, beside the papers' figures",
    "evaluate": "lm-eval's tasks, or perplexity of a text by position",
    "convert": "checkpoints of the papers' own codes to ours and back",
    "bench": "time the scans against this machine's memory",
    "push": "a model to the Hugging Face Hub, with its card",
    "pull": "a model from the Hugging Face Hub",
    "export": "a model with all the code that it needs, for Transformers alone",
    "info": "versions, devices, scan backends, a model's size",
}

HELP = """\
usage: hf-recurrent COMMAND [--flags]

Linear-recurrent sequence models for Hugging Face Transformers.

commands:
{commands}

`hf-recurrent COMMAND --help` explains a command. Everywhere:
  --debug    show the traceback of an error (so does HF_RECURRENT_DEBUG=1)
  --version  print the version

examples:
  hf-recurrent train
  hf-recurrent train --task selective_copying
  hf-recurrent generate --model runs/mingru --prompt "def "
  hf-recurrent evaluate lm --model runs/mingru --tasks piqa
  hf-recurrent convert minlm.pt models/mingru
  hf-recurrent bench
  hf-recurrent push runs/mingru me/mingru
  hf-recurrent plot runs/mingru runs/longhorn
  hf-recurrent report runs
  hf-recurrent info
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: what follows the program's name; by default the process's own arguments.

    Returns:
        The exit status: 0; 2 for what the user can put right, said in one line; 130 after Ctrl-C (0 where
        SIGTERM has made a run save and stop). Other exceptions are faults of this program and pass through.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("HF_RECURRENT_DEBUG", "0") not in ("", "0")
    if "--debug" in argv:
        argv.remove("--debug")
        debug = True
    if hasattr(sys.stdout, "reconfigure"):  # not where a program has put something else in its place
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack the characters of a model's text
    with warnings.catch_warnings(), _orderly_termination():
        warnings.showwarning = _show_warning
        try:
            return _run(argv)
        except KeyboardInterrupt:
            print("hf-recurrent: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader has gone, as in `hf-recurrent info | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, OSError, ImportError, FloatingPointError, MemoryError, RuntimeError) as error:
            if debug:
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            print(f"hf-recurrent: error: {message}", file=sys.stderr)
            return 2


@contextlib.contextmanager
def _orderly_termination() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what is half-written is cleared away as it is after Ctrl-C. Ctrl-C while torch
    is imported ends the process: what it imports in turn may catch the exception, and go on with half a module."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as under nohup
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(number: int, frame) -> None:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            print("hf-recurrent: interrupted", file=sys.stderr, flush=True)
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
        print(HELP.format(commands=commands), end="")
        return 0
    if argv[0] == "--version":
        print(f"hf-recurrent {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        kind = "flag" if argv[0].startswith("-") else "command"
        raise CommandLineError(f"unknown {kind} {argv[0]}{nearest(argv[0], COMMANDS)}")
    return importlib.import_module(f".{argv[0]}", __package__).run(argv[1:])


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    text = " ".join(str(message).split())
    print(f"hf-recurrent: warning: {text}", file=sys.stderr)
