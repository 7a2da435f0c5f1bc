"""What a checkpoint says of the programs that wrote it, and weights in it that any number of processes can load, whole
or in shards."""

import contextlib
import dataclasses
import enum
import math
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar, get_args, get_origin

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils import load as load_data
from accelerate.utils.constants import FSDP_MODEL_NAME, MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME
from accelerate.utils.fsdp_utils import load_fsdp_model, load_fsdp_optimizer
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from ..messages import first_line
from ..versions import versions_of

T = TypeVar("T")


def versions() -> dict[str, str]:
    """The programs whose version can change a run's arithmetic."""
    return versions_of("torch", "transformers", "accelerate", "tokenizers", "numpy")


def compare_versions(then: dict[str, str], checkpoint: Path) -> None:
    """Say where a checkpoint was written by other versions: the run goes on, but perhaps not to the last bit."""
    now = versions()
    differing = [f"{name} {then.get(name)} (now {now.get(name)})" for name in now if then.get(name) != now[name]]
    if differing:
        warnings.warn(
            f"{checkpoint} was written with {', '.join(differing)}: the run may differ in the last digits", stacklevel=2
        )


@contextlib.contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Turns whatever a damaged checkpoint raises into one ValueError that names it."""
    try:
        yield
    except Exception as error:  # torch, pickle, json and the system raise their own kinds
        raise ValueError(f"--resume: {checkpoint} cannot be read: {first_line(error)}") from error


def restored(kind: type[T], saved: dict) -> T:
    """A dataclass of numbers and lists, from what `state.json` holds of it.

    Raises:
        TypeError: a field that it does not have.
        ValueError: a value of another type, or a number that is not finite.
    """
    for field in dataclasses.fields(kind):
        if field.name in saved and not _fits(saved[field.name], field.type):
            raise ValueError(f"its state.json has {field.name} {saved[field.name]!r:.60}")
    return kind(**saved)


def _fits(value: object, kind: type) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(each, get_args(kind)[0]) for each in value)
    if kind in (int, float):
        return type(value) in {int, kind} and math.isfinite(value)  # True is an int, too
    return isinstance(value, kind)


@contextlib.contextmanager
def of_any_process() -> Iterator[None]:
    """Turns the one exception by which torch.distributed.checkpoint tells all processes what some have met, which is no
    Exception, into the first of these."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def save(accelerator: Accelerator, folder: Path) -> None:
    """Save weights, optimiser and random states."""
    with of_any_process():
        # torch's format keeps tied weights tied; safetensors would drop one and warn of it every time.
        accelerator.save_state(str(folder), safe_serialization=False)


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


# ---- loading, by whichever engine


def load(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path, processes: int
) -> None:
    """Load a checkpoint's weights, optimiser and random states into what `accelerator.prepare` has returned.

    Args:
        processes: how many have written it. Checkpoints of DDP, of FSDP2 and of one process go on in any number of
            processes by any of the three; DeepSpeed's by DeepSpeed in as many processes.

    Raises:
        ValueError: a checkpoint of DeepSpeed's, and not the same again.
    """
    sharded, deepspeed = (checkpoint / f"{FSDP_MODEL_NAME}_0").is_dir(), (checkpoint / MODEL_NAME).is_dir()
    if deepspeed != (accelerator.distributed_type == "DEEPSPEED"):
        raise ValueError(f"it was written {'with' if deepspeed else 'without'} DeepSpeed, which cannot change")
    if deepspeed and processes != accelerator.num_processes:
        raise ValueError(f"DeepSpeed wrote it in {processes} processes, now they are {accelerator.num_processes}")
    if sharded:
        for folder in (f"{FSDP_MODEL_NAME}_0", f"{OPTIMIZER_NAME}_0"):
            check_metadata(checkpoint / folder / ".metadata")
    if processes == accelerator.num_processes:  # else each begins with others; and Accelerate passes over a fault in it
        load_data(checkpoint / f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl")
    with of_any_process():
        if sharded == accelerator.is_fsdp2:
            accelerator.load_state(str(checkpoint))
            return
        (_load_shards if sharded else _load_into_shards)(accelerator, model, optimizer, checkpoint)
    load_accelerator_state(str(checkpoint), [], [], [], [], accelerator.process_index, accelerator.scaler)


def _load_shards(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path):
    """The shards of an FSDP2 checkpoint, put together."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process has no group, and needs none
        load_fsdp_model(plugin, accelerator, model, checkpoint)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, checkpoint)


def _load_into_shards(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path):
    """Whole weights and optimiser states, of which each process keeps its shard."""
    options = StateDictOptions(full_state_dict=True)
    weights = torch.load(checkpoint / f"{MODEL_NAME}.bin", weights_only=True, mmap=True)
    set_model_state_dict(model, weights, options=options)
    saved = torch.load(checkpoint / f"{OPTIMIZER_NAME}.bin", weights_only=True, mmap=True)
    # An optimiser alone counts its parameters, in the order of its groups; shards go by their names.
    names = {parameter: name for name, parameter in model.named_parameters()}
    names = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [group | {"params": [names[n] for n in group["params"]]} for group in saved["param_groups"]]
    state = {names[n]: values for n, values in saved["state"].items()}
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups}, options=options)


class _Metadata(pickle._Unpickler):
    """Knows what torch.distributed.checkpoint's list of tensors is made of, and nothing else. What is harmless here has
    to be harmless to torch, which reads the same bytes after it: so nothing may be changed but instances of what it
    knows, neither classes nor functions. (Only Python's own unpickler lets us see to that.)"""

    dispatch = dict(pickle._Unpickler.dispatch)

    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    NAMES = [("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")]
    # The folder; pathlib has moved its classes in Python 3.13.
    NAMES += [(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")]

    def find_class(self, module: str, name: str):
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11 writes a member of an enumeration
            return self._member
        if (module, name) in self.NAMES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if module in self.MODULES and "." not in name:  # a dotted name would reach what the modules import
            found = super().find_class(module, name)
            is_plain = dataclasses.is_dataclass(found) or isinstance(found, enum.EnumMeta)
            if is_plain and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no list of tensors does")

    def load_build(self) -> None:
        instance, state = self.stack[-2:]
        takes = type(state) is dict or hasattr(type(instance), "__setstate__")
        if not dataclasses.is_dataclass(type(instance)) or not takes:
            raise pickle.UnpicklingError(f"it changes {instance!r}, which no list of tensors does")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    @staticmethod
    def _member(kind: type, name: str) -> enum.Enum:
        if not isinstance(kind, enum.EnumMeta) or type(name) is not str or name not in kind.__members__:
            raise pickle.UnpicklingError(f"it holds getattr({kind!r}, {name!r}), which no list of tensors does")
        return kind[name]


def check_metadata(path: Path) -> None:
    """Make sure that the pickle by which torch lists a checkpoint's tensors holds nothing else.

    Raises:
        pickle.UnpicklingError: it does, or is damaged.
    """
    with open(path, "rb") as file:
        try:
            _Metadata(file).load()
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # whatever a damaged pickle leads to
            raise pickle.UnpicklingError(f"it is damaged: {first_line(error)}") from error
