"""Fields of the dataclasses that flags and YAML files fill in: their help, their flags, the bounds of their numbers."""

import dataclasses
import operator
from dataclasses import field
from typing import get_args, get_origin

from ..cli.parser import LARGEST


def option(default, help: str, **more):
    """A dataclass field with its help text; a list becomes the default's factory."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help, **more})
    return field(default=default, metadata={"help": help, **more})


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def require(arguments, *names: str, above=None, at_least=None, below=None, at_most=LARGEST) -> None:
    """Check numbers; None passes.

    Raises:
        ValueError: one is outside its bounds or not a number; the message names its flag.
    """
    bounds = [
        ("above", operator.gt, above),
        ("at least", operator.ge, at_least),
        ("below", operator.lt, below),
        ("at most", operator.le, at_most),
    ]
    for name in names:
        value = getattr(arguments, name)
        for words, holds, bound in bounds:
            if value is not None and bound is not None and not holds(value, bound):
                raise ValueError(f"{flag(name)} must be {words} {bound}, got {value}")


def type_name(field: dataclasses.Field) -> str:
    """What a field takes, in words."""
    if get_origin(field.type) is list:
        return "a list"
    kinds = [kind.__name__ for kind in get_args(field.type) or (field.type,) if kind is not type(None)]
    return {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false"}[kinds[0]]
