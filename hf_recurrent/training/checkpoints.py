"""What a checkpoint says of the programs that wrote it, and weights in it that any number of processes can load."""

import platform
import warnings
from importlib.metadata import version
from pathlib import Path

from accelerate import Accelerator

from .. import __version__


def versions() -> dict[str, str]:
    """The programs whose version can change a run's arithmetic."""
    packages = {name: version(name) for name in ("torch", "transformers", "accelerate", "tokenizers", "numpy")}
    return {"hf_recurrent": __version__, "python": platform.python_version(), **packages}


def compare_versions(then: dict[str, str], checkpoint: Path) -> None:
    """Say where a checkpoint was written by other versions: the run goes on, but perhaps not to the last bit."""
    now = versions()
    differing = [f"{name} {then.get(name)} (now {now.get(name)})" for name in now if then.get(name) != now[name]]
    if differing:
        warnings.warn(
            f"{checkpoint} was written with {', '.join(differing)}: the run may differ in the last digits", stacklevel=2
        )


def without_wrapper(accelerator: Accelerator) -> None:
    """Make `save_state` and `load_state` use the model's own names of weights, without what data parallelism wraps
    around it, so that another number of processes, or a single one, can load them.

    (Where weights are sharded, Accelerate writes and reads them by their own names already, and leaves the list empty.)
    """

    def save(models, weights, folder):
        for place, model in enumerate(models[: len(weights)]):
            weights[place] = accelerator.get_state_dict(accelerator.unwrap_model(model), unwrap=False)

    def load(models, folder):
        models[:] = [accelerator.unwrap_model(model) for model in models]

    accelerator.register_save_state_pre_hook(save)
    if accelerator.distributed_type not in ("FSDP", "DEEPSPEED"):
        accelerator.register_load_state_pre_hook(load)
