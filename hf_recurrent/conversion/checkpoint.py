"""A checkpoint as the converters see it: names, shapes, dtypes, and functions that read the tensors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..messages import counted


class Refused(ValueError):
    """A checkpoint that cannot be converted; the message is one line."""


@dataclass
class Checkpoint:
    """
    What a file or folder holds.

    Attributes:
        path: its name.
        tensors: name -> a function that reads the tensor.
        shapes, dtypes: of the tensors.
        config: the configuration that lies beside the weights or among them, {} without one.
        prefix: what was taken off all names, as "_orig_mod.".
        left_out: what else the file holds, as an optimiser's state.
    """

    path: Path
    tensors: dict[str, Callable[[], Tensor]]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    config: dict = field(default_factory=dict)
    prefix: str = ""
    left_out: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str, ndim: int) -> tuple[int, ...]:
        """The shape of a tensor that must be there.

        Raises:
            Refused: it is not, or has another number of dimensions.
        """
        if name not in self.shapes:
            raise Refused(f"{self.path}: half a checkpoint: it lacks {name}")
        if len(self.shapes[name]) != ndim:
            raise Refused(f"{self.path}: {name} must have {counted(ndim, 'dimension')}, got {self.shapes[name]}")
        return self.shapes[name]

    def alias(self, name: str, of: str) -> None:
        """Let `name` be a second name of the tensor `of`, as safetensors keeps tied weights once."""
        for table in self.tables():
            table[name] = table[of]

    def tables(self) -> tuple[dict, dict, dict]:
        """All that is kept by name."""
        return self.tensors, self.shapes, self.dtypes

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in a tensor that has been read, or mapped.

        Raises:
            Refused: the name is taken, or the tensor is none that a checkpoint needs.
        """
        if name in self.shapes:
            raise Refused(f"{self.path}: holds {name} twice")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise Refused(f"{self.path}: {name} must be a dense tensor, got {tensor.layout} on {tensor.device}")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise Refused(f"{self.path}: {name} claims the shape {tuple(tensor.shape)}, far more than its data")
        self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype
        self.tensors[name] = lambda: tensor

    def layers(self, prefix: str) -> int:
        """How many layers there are under `prefix`0, `prefix`1 and so on.

        Raises:
            Refused: there is none, or a number is missing.
        """
        rest = (name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix))
        numbers = {int(number) for name in rest if (number := name.split(".")[0].split("/")[0]).isdecimal()}
        if not numbers or numbers != set(range(len(numbers))):
            missing = next(i for i in range(len(numbers) + 1) if i not in numbers)
            raise Refused(f"{self.path}: half a checkpoint: it lacks {prefix}{missing}")
        return len(numbers)


def listed(names, most: int = 5) -> str:
    """Some names, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def repeated(names: Iterable[str]) -> str | None:
    """The first name that came before, None where all differ."""
    seen = set()
    return next((name for name in names if name in seen or seen.add(name)), None)
