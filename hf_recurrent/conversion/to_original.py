"""From a folder of ours to the file or folder of another code."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .. import modeling
from ..files import replacing, replacing_folder, saving
from ..messages import first_line
from .checkpoint import Checkpoint, Refused
from .common import DTYPES, Report, check_names, check_ours, described, dtype_of, empty_model, finished, saved_weights
from .reading import read
from .rules import Answers, Format, Target

# What changes no output of a trained model, or is set by the caller.
INCIDENTAL = {
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "hidden_dropout", "initializer_range",
    "batch_norm_momentum", "dt_min", "dt_max", "num_blocks", "residual_in_fp32", "c_init", "image_size", "patch_size",
    "num_channels", "vocab_size", "dt_rank",
}  # fmt: skip


def to_original(
    source: Path, dest: Path, original: Format, dtype: str | None, progress: Callable[[int, int], None] | None
) -> Report:
    config, model_class = _our_class(source)
    checkpoint = read(source)
    target = original.target(config, model_class)
    model = empty_model(target)
    weights = saved_weights(model)
    title = original.title
    check_names(checkpoint, list(weights), model_class.__name__)
    for name, x in weights.items():
        if checkpoint.shapes[name] != tuple(x.shape):
            raise Refused(f"{source}: {name} must have the shape {tuple(x.shape)}, got {checkpoint.shapes[name]}")
    check_ours(weights, target, title)
    real = DTYPES[dtype] if dtype is not None else dtype_of(checkpoint)
    _check_expressible(original, target, weights, real)
    if real is torch.bfloat16 and dest.suffix == ".npz":
        raise Refused(f"DEST {dest}: NumPy has no bfloat16: --dtype float32, or .msgpack")

    if real is torch.bfloat16 and original.complex_tensors:
        raise Refused(f"--to {original.name}: complex tensors cannot be of bfloat16: --dtype float32")

    tensors: dict[str, Tensor] = {}
    done, total = 0, sum(x.numel() for x in weights.values()) * torch.zeros((), dtype=real).element_size()
    for rule in target.rules:
        ours = [finished(checkpoint.tensors[name](), real, f"{source}: {name}") for name in rule.ours]
        done += sum(x.numel() * x.element_size() for x in ours)
        theirs = [x.contiguous() for x in rule.backward(*ours)]
        if rule.check is not None:
            rule.check(*theirs)
        tensors.update(zip(rule.theirs, theirs, strict=True))
        if progress is not None:
            progress(done, total)
    if original.suffixes:
        with replacing(dest) as file:
            original.write(file, tensors, config)
        files = [dest.name]
    else:
        with replacing_folder(dest) as folder:
            with saving(dest):
                original.write(folder, tensors, config)
            files = sorted(file.name for file in folder.iterdir())
    return Report(
        original.name,
        model_class.__name__,
        sum(x.numel() for x in weights.values()),
        str(real).removeprefix("torch."),
        files,
    )


def _our_class(source: Path) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a broken config.json makes of each library
        raise Refused(f"{source}: its config.json cannot be used: {first_line(error)}") from None
    named = (config.architectures or [None])[0]
    model_class = getattr(modeling, named, None) if isinstance(named, str) and named in modeling.__all__ else None
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise Refused(f"{source}: its config.json names no model of this package (architectures: {named!r})")
    return config, model_class


def _check_expressible(original: Format, target: Target, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """What would be written must read as the same model: a field that the format cannot say would be lost."""
    shapes, dtypes = {}, {}
    for rule in target.rules:
        theirs = rule.backward(*(weights[name] for name in rule.ours))
        shapes |= {name: tuple(x.shape) for name, x in zip(rule.theirs, theirs, strict=True)}
        dtypes |= dict.fromkeys(rule.theirs, dtype)
    written = Checkpoint(Path("DEST"), {}, shapes, dtypes, config=original.config_file(target.config))
    config = described(original, written, Answers(original.answers(target.config))).config
    inherited = {f.name for f in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    for f in dataclasses.fields(target.config):
        mine, theirs = getattr(target.config, f.name), getattr(config, f.name)
        if f.name not in inherited | INCIDENTAL and mine != theirs and not _fills(target.config, f.name):
            raise Refused(f"--to {original.name} cannot say {f.name} = {mine!r}; its models have {theirs!r}")


def _fills(config: PreTrainedConfig, name: str) -> bool:
    """Whether a field has no effect, for what it is about is absent."""
    if name in ("use_conv_bias", "conv_residual"):
        return config.conv_kernel == 0
    if name in ("use_mlp_bias", "num_heads"):
        return True  # the tensors say it
    return name == "sub_ln_eps" and not config.use_sub_ln
