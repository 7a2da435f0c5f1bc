"""What both directions do: models without memory, the checks of names, dtypes and values, and the report."""

from dataclasses import dataclass, field

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel

from .checkpoint import Checkpoint, Refused, listed
from .rules import Answers, Format, Target

DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Report:
    """
    What a conversion did.

    Attributes:
        format: the original's, by its name in FORMATS.
        model_class: of ours.
        parameters: numbers in the tensors that were copied.
        dtype: of the result.
        files: that were written, by their names.
        assumed: options that the original's defaults answered.
        fresh: tensors of ours that were initialised.
        dropped: tensors of the original without a counterpart.
        left_out: what else the checkpoint held.
    """

    format: str
    model_class: str
    parameters: int
    dtype: str
    files: list[str]
    assumed: dict[str, str] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def described(source: Format, checkpoint: Checkpoint, answers: Answers) -> Target:
    try:
        return source.describe(checkpoint, answers)
    except Refused:
        raise
    except (StrictDataclassError, TypeError, ValueError) as error:  # of the configuration
        reason = error.__cause__ or error
        raise Refused(f"{checkpoint.path}: its sizes make no model: {' '.join(str(reason).split())}") from None


def empty_model(target: Target) -> PreTrainedModel:
    """The model without memory."""
    with torch.device("meta"):
        return target.model_class(target.config)


def saved_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """What is saved of a model: all but the second name of tied weights."""
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def check_names(checkpoint: Checkpoint, expected: list[str], title: str) -> None:
    if missing := set(expected) - checkpoint.shapes.keys():
        raise Refused(f"{checkpoint.path}: half a checkpoint: it lacks {listed(missing)}")
    if extra := checkpoint.shapes.keys() - set(expected):
        raise Refused(f"{checkpoint.path}: holds what {title} has no place for: {listed(extra)}")


def check_ours(weights: dict[str, Tensor], target: Target, title: str) -> None:
    named = {name for rule in target.rules for name in rule.ours} | set(target.fresh)
    if wrong := weights.keys() ^ named:
        raise Refused(f"{target.model_class.__name__} does not fit {title}: they differ in {listed(wrong)}")


def dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    """The one dtype of all tensors; of complex ones, that of their parts."""
    real = {name: dtype.to_real() for name, dtype in checkpoint.dtypes.items()}
    found = sorted({str(dtype).removeprefix("torch.") for dtype in real.values()})
    if len(found) > 1:
        raise Refused(f"{checkpoint.path}: mixed dtypes, {' and '.join(found)}: --dtype says which to convert to")
    if found[0] not in DTYPES:
        raise Refused(f"{checkpoint.path}: of dtype {found[0]}: --dtype says which to convert to")
    return DTYPES[found[0]]


def finished(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`x` as it is saved: finite, contiguous, in memory of its own (or of the file's)."""
    check_finite(x, name)
    if x.dtype != dtype:
        x = x.to(dtype)
        check_finite(x, f"{name}, as {str(dtype).removeprefix('torch.')}")
    x = x.contiguous()
    return x.clone() if x.untyped_storage().nbytes() != x.numel() * x.element_size() else x


def check_finite(x: Tensor, name: str) -> None:
    for part in (x.real, x.imag) if x.is_complex() else (x,):
        # Without a mask as large as the tensor: a NaN passes through both.
        least, most = part.aminmax() if part.numel() else (torch.zeros(()),) * 2
        if not (least.isfinite() and most.isfinite()):
            raise Refused(f"{name}: is not finite: it holds {least.item() if not least.isfinite() else most.item()}")
