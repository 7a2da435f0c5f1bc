"""What a converter is made of: a table of rules, read in both directions, and what a checkpoint leaves open."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoint import Checkpoint, Refused


def _same(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


@dataclass(frozen=True)
class Rule:
    """
    Tensors of the original and the tensors of ours that they become.

    Attributes:
        theirs, ours: names.
        forward: theirs -> ours, as tuples; they also run on the meta device.
        backward: ours -> theirs, its inverse to the bit.
        check: of theirs, before `forward`: raises Refused.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    forward: Callable[..., tuple[Tensor, ...]] = _same
    backward: Callable[..., tuple[Tensor, ...]] = _same
    check: Callable[..., None] | None = None


def rename(theirs: str, ours: str) -> Rule:
    return Rule((theirs,), (ours,))


def renames(table: Mapping[str, str], their_prefix: str = "", our_prefix: str = "") -> list[Rule]:
    return [rename(their_prefix + theirs, our_prefix + ours) for theirs, ours in table.items()]


def transposed(theirs: str, ours: str) -> Rule:
    """A kernel (in, out) and the weight (out, in) of a Linear."""
    return Rule((theirs,), (ours,), lambda x: (x.T,), lambda x: (x.T,))


def pointwise(theirs: str, ours: str) -> Rule:
    """The weight (out, in, 1) of a convolution over single positions and the weight (out, in) of a Linear."""
    return Rule((theirs,), (ours,), lambda x: (x.squeeze(-1),), lambda x: (x.unsqueeze(-1),))


def column(theirs: str, ours: str) -> Rule:
    """A vector (n,) of theirs and a column (n, 1) of ours."""
    return Rule((theirs,), (ours,), lambda x: (x.unsqueeze(-1),), lambda x: (x.squeeze(-1),))


def tied(theirs: tuple[str, str], ours: str) -> Rule:
    """Two names of one matrix."""

    def check(first: Tensor, second: Tensor) -> None:
        if first.data_ptr() != second.data_ptr() and not torch.equal(first, second):
            raise Refused(f"{theirs[0]} and {theirs[1]} are tied, but hold different weights")

    return Rule(theirs, (ours,), lambda first, second: (first,), lambda x: (x, x), check)


def complex_vector(theirs: str, real: str, imaginary: str) -> Rule:
    """A complex vector and its two parts."""
    return Rule((theirs,), (real, imaginary), lambda x: (x.real, x.imag), lambda re, im: (torch.complex(re, im),))


def complex_matrix(theirs: str, *ours: str) -> Rule:
    """A complex matrix (rows, columns) and its parts (rows, columns, 2), side by side in as many matrices as `ours`."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        return torch.view_as_real(x).chunk(len(ours), dim=1)

    def backward(*parts: Tensor) -> tuple[Tensor]:
        return (torch.view_as_complex(torch.cat(parts, dim=1)),)

    return Rule((theirs,), ours, forward, backward)


def side_by_side(theirs: str, *ours: str) -> Rule:
    """A matrix (rows, columns, ...) of theirs and those of ours that its columns are shared out to."""
    return Rule((theirs,), ours, lambda x: x.chunk(len(ours), dim=1), lambda *parts: (torch.cat(parts, dim=1),))


@dataclass(frozen=True)
class Option:
    """
    What a checkpoint does not say and the model depends on.

    Attributes:
        name: on the command line, --NAME.
        values: that it takes; those that ours can represent are the keys.
        default: what the original's code takes, for --assume-defaults.
        meaning: for the help.
    """

    name: str
    values: tuple[str, ...]
    default: str
    meaning: str

    def __str__(self) -> str:
        return f"--{self.name} {'|'.join(self.values)} (the original's default is {self.default})"


ON_OFF = ("true", "false")


@dataclass
class Answers:
    """The options that were given, and which of them somebody asked for."""

    given: dict[str, str]
    assume_defaults: bool = False
    missing: list[Option] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    assumed: dict[str, str] = field(default_factory=dict)

    def ask(self, option: Option) -> str:
        """The value that was given; the default, which `settle` refuses unless defaults may be assumed."""
        self.used.add(option.name)
        if option.name in self.given:
            value = self.given[option.name]
            if value not in option.values:
                raise Refused(f"--{option.name} must be one of {', '.join(option.values)}, got {value!r}")
            return value
        if self.assume_defaults:
            self.assumed[option.name] = option.default
        else:
            self.missing.append(option)
        return option.default

    def settle(self, where: object, title: str) -> None:
        """
        Raises:
            Refused: an answer is missing, or one was given that nobody asked for.
        """
        if self.missing:
            asked = "; ".join(map(str, self.missing))
            raise Refused(f"{where}: does not say what the model needs: {asked}; or --assume-defaults for all of them")
        if unused := sorted(self.given.keys() - self.used):
            raise Refused(f"--{unused[0]} has no meaning for this checkpoint ({title})")


@dataclass
class Target:
    """The model of ours that a checkpoint becomes: its configuration, its class, and the table of its tensors.

    `fresh` names tensors of ours that the checkpoint has no counterpart for and that are initialised; `dropped`, those
    of the checkpoint that the model has no place for."""

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    rules: list[Rule]
    fresh: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


class Format:
    """
    A source of checkpoints. Subclasses set the attributes and write the methods.

    Attributes:
        name: for --from and --to.
        title: what it is.
        suffixes: of the files that `write` makes; () for a folder.
        options: every option that `describe` may ask for.
        complex_tensors: whether it has any.
    """

    name: str
    title: str
    suffixes: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    complex_tensors = False

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the names of the tensors are this format's."""
        raise NotImplementedError

    def describe(self, checkpoint: Checkpoint, answers: Answers) -> Target:
        """The model that the checkpoint is of.

        Raises:
            Refused: it is half a checkpoint, or of a model that ours cannot be.
        """
        raise NotImplementedError

    def target(self, config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> Target:
        """The table for a model of ours, to be written in this format.

        Raises:
            Refused: a model that this format has no place for.
        """
        raise NotImplementedError

    def answers(self, config: PreTrainedConfig) -> dict[str, str]:
        """The options that describe a configuration of ours, for `describe` of what is written."""
        return {}

    def config_file(self, config: PreTrainedConfig) -> dict:
        """What the original's config.json says; {} where there is none."""
        return {}

    def write(self, path: Path, tensors: dict[str, Tensor], config: PreTrainedConfig) -> None:
        """Write the original's file, or its files into a folder."""
        torch.save(tensors, path)


def needed(condition: bool, message: str) -> None:
    if not condition:
        raise Refused(message)


def ratio(name: str, width: int, hidden_size: int) -> float | int:
    """width / hidden_size as a configuration has it: an int where it is whole."""
    return width // hidden_size if width % hidden_size == 0 else width / hidden_size


def origin(config: PreTrainedConfig, name: str) -> dict:
    """What a converted model's configuration keeps of a checkpoint of the format `name`; {} of another or of none."""
    kept = getattr(config, "converted_from", None)
    return kept if isinstance(kept, dict) and kept.get("format") == name else {}
