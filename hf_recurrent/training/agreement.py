"""What the processes of a run must agree on before its first step."""

import time
import uuid
from pathlib import Path

import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from ..files import UNFINISHED
from .arguments import flag, to_yaml

# What may differ between the machines of a run: where something lies. The tokens may not.
LOCAL = {"output_dir", "data_files", "validation_files", "dataset", "model", "tokenizer"}
SHARED_WITHIN = 90  # seconds; file systems in a network remember for up to a minute what was not there


def check_alike(arguments: tuple, checkpoint: Path | None, refusal: OSError | None) -> None:
    """Make sure that all processes are to train the same run. Each of them must call it.

    Args:
        arguments: those of model, data and training.
        checkpoint: what this process would go on from.
        refusal: why this process cannot use the output folder.

    Raises:
        OSError: that.
        ValueError: another process cannot, or they have not been given the same run; the message says what differs.
    """
    settings = yaml.safe_load(to_yaml(*arguments))
    mine = {flag(name): value for name, value in settings.items() if name not in LOCAL}
    mine |= {f"{flag(name)} given": bool(settings.get(name)) for name in LOCAL}
    mine["--sources"] = [
        {name: value for name, value in source.items() if name not in LOCAL} for source in settings.get("sources") or []
    ]
    mine["newest checkpoint"] = checkpoint and checkpoint.name
    everyone, refusals = zip(*gather_object([(mine, refusal and str(refusal))]), strict=True)
    if refusal is not None:
        raise refusal
    for rank, reason in enumerate(refusals):
        if reason is not None:
            raise ValueError(f"process {rank} has refused: {reason}")
    for rank, other in enumerate(everyone):
        for name in {**everyone[0], **other}:
            if other.get(name) != everyone[0].get(name):
                raise ValueError(
                    f"the processes differ: {name} is {everyone[0].get(name)} in process 0, {other.get(name)} in "
                    f"process {rank}: all need the same settings, and an --output-dir that they share"
                )


def check_shared(accelerator: Accelerator, path: Path, timeout_minutes: float | None) -> None:
    """Make sure that every process sees what the main one writes into the output folder, before any of it changes.

    Args:
        path: the output folder; made where it is not there.
        timeout_minutes: how long a process may keep the others waiting; None for PyTorch's default.

    Raises:
        ValueError: one does not.
    """
    if accelerator.num_processes == 1:
        return
    existed = path.is_dir()
    mark = path / f"{UNFINISHED}{broadcast_object_list([uuid.uuid4().hex])[0]}"
    if accelerator.is_main_process:
        path.mkdir(parents=True, exist_ok=True)
        mark.touch()
    accelerator.wait_for_everyone()
    # NFS may go on for a while saying that there is none, to a machine that has looked before.
    begun, patience = time.monotonic(), SHARED_WITHIN
    if timeout_minutes is not None:
        patience = min(patience, 30 * timeout_minutes)  # half of it: the others wait in the next call
    while not mark.is_file() and time.monotonic() - begun < patience:
        time.sleep(0.1)
    blind = [rank for rank, seen in enumerate(gather_object([mark.is_file()])) if not seen]
    if accelerator.is_main_process:
        mark.unlink()
        if blind and not existed:
            path.rmdir()
    if blind:
        raise ValueError(
            f"--output-dir {path}: process {blind[0]} does not see what process 0 has written there: "
            "it must be on a file system that all machines share"
        )
