"""From a checkpoint of another code to a folder of ours, and back."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from .. import modeling
from ..files import existing, replacing, replacing_folder, saving
from ..messages import counted, first_line, nearest
from . import gateloop, longhorn, mamba, minlm, s5, s5_pytorch
from .reading import Checkpoint, Refused, listed, read, read_json
from .rules import Answers, Format, Rule, Target

FORMATS: dict[str, Format] = {
    source.name: source
    for source in (
        longhorn.Longhorn(),
        minlm.MinLM(),
        gateloop.GateLoop(),
        s5.S5(),
        s5_pytorch.S5PyTorch(),
        mamba.Mamba(),
    )
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_SHARD_SIZE = "5GB"  # Transformers' own has varied; one file up to here
# What changes no output of a trained model, or is set by the caller.
INCIDENTAL = {
    "use_cache", "hidden_dropout", "initializer_range", "batch_norm_momentum", "dt_min", "dt_max", "num_blocks",
    "residual_in_fp32", "c_init", "image_size", "patch_size", "num_channels", "vocab_size", "dt_rank", "step_rescale",
}  # fmt: skip


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


def convert(
    source: str | Path,
    dest: str | Path,
    from_format: str | None = None,
    to_format: str | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    options: dict[str, str] | None = None,
    assume_defaults: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """
    Convert a checkpoint of another code to a folder that `from_pretrained` loads, or with `to_format` one of our
    folders to the original's format. Nothing in a checkpoint is run.

    Args:
        source: file or folder.
        dest: folder; with `to_format` the file, or for "longhorn" the folder, to write.
        from_format, to_format: names in FORMATS; the first is found by the names of the tensors when None.
        tokenizer: "bytes", or a folder or name on the Hub, to be saved beside the model.
        dtype: of the result, a name in DTYPES; the checkpoint's when None.
        overwrite: replace what `dest` holds, once the new one is whole.
        options: what the checkpoint does not say, by the options' names (`Format.options`).
        assume_defaults: take the original's defaults for options that are not given.
        max_shard_size: of one safetensors file, as `save_pretrained` takes it.
        seed: of what is initialised.
        progress: called with the bytes written and their total.

    Returns:
        What was done.

    Raises:
        ValueError: the checkpoint cannot be converted; nothing is written.
        OSError: something cannot be read or written; what `dest` held is untouched.
    """
    source, dest = Path(source), Path(dest)
    for flag, name in (("--from", from_format), ("--to", to_format)):
        if name is not None and name not in FORMATS:
            raise Refused(f"{flag} {name}: no such format{nearest(name, FORMATS)}; known: {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise Refused(f"--dtype {dtype}: no such dtype{nearest(dtype, DTYPES)}")
    ours = _is_ours(source)
    if to_format is None and ours:
        raise Refused(f"{source}: is a model of this package already: --to names the format to write")
    if to_format is not None and not ours:
        raise Refused(f"{source}: --to needs a folder with a model of this package")
    if to_format is not None:
        for flag, value in (("--from", from_format), ("--tokenizer", tokenizer)):
            if value is not None:
                raise Refused(f"{flag} cannot be combined with --to")
        if options or assume_defaults:
            raise Refused(f"--{next(iter(options or ()), 'assume-defaults')} cannot be combined with --to")
    suffixes = FORMATS[to_format].suffixes if to_format is not None else ()
    _check_dest(source, dest, suffixes, overwrite)
    if to_format is not None:
        return _to_original(source, dest, FORMATS[to_format], dtype, progress)
    answers = Answers(dict(options or {}), assume_defaults)
    return _to_ours(source, dest, from_format, answers, tokenizer, dtype, max_shard_size, seed, progress)


def _is_ours(source: Path) -> bool:
    file = source / "config.json"
    return file.is_file() and read_json(file).get("model_type") in {c.model_type for c in modeling.FAMILIES}


def _check_dest(source: Path, dest: Path, suffixes: tuple[str, ...], overwrite: bool) -> None:
    """Refuse a destination that cannot be used, before any work is done."""
    if suffixes and dest.suffix not in suffixes:
        raise Refused(f"DEST {dest}: must be a file named *{' or *'.join(suffixes)}")
    here, there = source.resolve(), dest.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise Refused(f"DEST {dest}: must lie apart from SOURCE {source}")
    if dest.exists():
        if dest.is_dir() and suffixes:
            raise Refused(f"DEST {dest}: a folder of that name is in the way")
        if not dest.is_dir() and not suffixes:
            raise Refused(f"DEST {dest}: a file of that name is in the way")
        if dest.is_dir() and any(dest.iterdir()):
            if not (dest / "config.json").is_file() or any(entry.is_dir() for entry in dest.iterdir()):
                raise Refused(f"DEST {dest}: not empty, and no model's folder: choose another")
        if not overwrite and (suffixes or any(dest.iterdir())):
            raise Refused(f"DEST {dest}: exists: replace it by --overwrite, or choose another name")
    if not dest.parent.is_dir():
        raise Refused(f"DEST {dest}: there is no folder {existing(dest)}/{dest.parent.relative_to(existing(dest))}")


# ---- to ours ---------------------------------------------------------------------------------------------------------


def _detect(checkpoint: Checkpoint, name: str | None) -> Format:
    found = [source for source in FORMATS.values() if source.recognises(checkpoint)]
    if name is not None:
        if FORMATS[name] not in found:
            like = f"; they are those of {found[0].title} (--from {found[0].name})" if found else ""
            raise Refused(f"{checkpoint.path}: its tensors are not those of {FORMATS[name].title}{like}")
        return FORMATS[name]
    if not found:
        raise Refused(
            f"{checkpoint.path}: of no format that is known ({', '.join(FORMATS)}): "
            f"it holds {listed(checkpoint.shapes)}"
        )
    if len(found) > 1:
        raise Refused(f"{checkpoint.path}: could be {' or '.join(f.name for f in found)}: --from says which")
    if isinstance(found[0], mamba.Mamba):
        raise Refused(f"{checkpoint.path}: is a Mamba: --from {found[0].name} makes it the warm start of a Longhorn")
    return found[0]


def _describe(source: Format, checkpoint: Checkpoint, answers: Answers) -> Target:
    try:
        return source.describe(checkpoint, answers)
    except Refused:
        raise
    except (StrictDataclassError, TypeError, ValueError) as error:  # of the configuration
        reason = error.__cause__ or error
        raise Refused(f"{checkpoint.path}: its sizes make no model: {' '.join(str(reason).split())}") from None


def _to_ours(
    source: Path,
    dest: Path,
    from_format: str | None,
    answers: Answers,
    tokenizer: str | None,
    dtype: str | None,
    max_shard_size: int | str,
    seed: int,
    progress: Callable[[int, int], None] | None,
) -> Report:
    checkpoint = read(source)
    original = _detect(checkpoint, from_format)
    target = _describe(original, checkpoint, answers)
    answers.settle(checkpoint.path, original.title)
    model = _empty(target)
    _check_tables(checkpoint, target, model, original.title)
    dtype = DTYPES[dtype] if dtype is not None else _dtype(checkpoint)
    config = target.config
    config.architectures, config.dtype = [target.model_class.__name__], dtype
    tokens = None if tokenizer is None else _tokenizer(tokenizer, config)

    made = {name: (rule, at) for rule in target.rules for at, name in enumerate(rule.ours)}
    fresh = _initialised(model, target.fresh, seed)
    shapes = {name: x.to(dtype) for name, x in _weights(model).items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)
    done, total = 0, sum(x.numel() * x.element_size() for x in shapes.values())
    with replacing_folder(dest) as folder:
        for file, names in split.filename_to_tensors.items():
            shard = {}
            for name in names:
                x = fresh[name] if name in fresh else _convert(checkpoint, *made[name])
                shard[name] = _finished(x, dtype, f"{checkpoint.path}: {name}")
                done += shard[name].numel() * shard[name].element_size()
                if progress is not None:
                    progress(done, total)
            with saving(dest):
                save_file(shard, folder / file, metadata={"format": "pt"})
            del shard, x
        with saving(dest):
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                text = json.dumps(index, indent=2, sort_keys=True)
                (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
            config.save_pretrained(folder)
            if model.can_generate():
                GenerationConfig.from_model_config(config).save_pretrained(folder)
            if tokens is not None:
                tokens.save_pretrained(folder)
            files = sorted(file.name for file in folder.iterdir())
    return Report(
        original.name,
        target.model_class.__name__,
        sum(shapes[name].numel() for name in made),
        str(dtype).removeprefix("torch."),
        files,
        assumed=answers.assumed,
        fresh=target.fresh,
        dropped=target.dropped,
        left_out=checkpoint.left_out,
    )


def _empty(target: Target) -> PreTrainedModel:
    """The model without memory."""
    with torch.device("meta"):
        return target.model_class(target.config)


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """What is saved of a model: all but the second name of tied weights."""
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def _check_tables(checkpoint: Checkpoint, target: Target, model: PreTrainedModel, title: str) -> None:
    """The table must have each tensor of the checkpoint once, each of the model once, and their shapes."""
    expected = [name for rule in target.rules for name in rule.theirs] + target.dropped
    _check_names(checkpoint, expected, title)
    weights = _weights(model)
    _check_ours(weights, target, title)
    for rule in target.rules:
        theirs = rule.backward(*(weights[name] for name in rule.ours))
        for name, x in zip(rule.theirs, theirs, strict=True):
            if checkpoint.shapes[name] != tuple(x.shape):
                raise Refused(
                    f"{checkpoint.path}: {name} must have the shape {tuple(x.shape)}, got {checkpoint.shapes[name]}"
                )


def _check_names(checkpoint: Checkpoint, expected: list[str], title: str) -> None:
    if missing := set(expected) - checkpoint.shapes.keys():
        raise Refused(f"{checkpoint.path}: half a checkpoint: it lacks {listed(missing)}")
    if extra := checkpoint.shapes.keys() - set(expected):
        raise Refused(f"{checkpoint.path}: holds what {title} has no place for: {listed(extra)}")


def _check_ours(weights: dict[str, Tensor], target: Target, title: str) -> None:
    named = {name for rule in target.rules for name in rule.ours} | set(target.fresh)
    if wrong := weights.keys() ^ named:
        raise Refused(f"{target.model_class.__name__} does not fit {title}: they differ in {listed(wrong)}")


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The one dtype of all tensors; of complex ones, that of their parts."""
    real = {name: dtype.to_real() for name, dtype in checkpoint.dtypes.items()}
    found = sorted({str(dtype).removeprefix("torch.") for dtype in real.values()})
    if len(found) > 1:
        raise Refused(f"{checkpoint.path}: mixed dtypes, {' and '.join(found)}: --dtype says which to convert to")
    if found[0] not in DTYPES:
        raise Refused(f"{checkpoint.path}: of dtype {found[0]}: --dtype says which to convert to")
    return DTYPES[found[0]]


def _tokenizer(name: str, config: PreTrainedConfig):
    from ..training.tokenizer import byte_tokenizer, load_tokenizer

    if getattr(config, "input_size", None) is not None:
        raise Refused(f"--tokenizer {name}: this model reads features, not tokens")
    tokenizer = byte_tokenizer() if name == "bytes" else load_tokenizer(name)
    if len(tokenizer) > config.vocab_size:
        raise Refused(
            f"--tokenizer {name}: has {counted(len(tokenizer), 'token')}, "
            f"the checkpoint's vocabulary {config.vocab_size:,}"
        )
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(tokenizer, token))
    return tokenizer


def _convert(checkpoint: Checkpoint, rule: Rule, at: int) -> Tensor:
    theirs = [checkpoint.tensors[name]() for name in rule.theirs]
    if rule.check is not None:
        rule.check(*theirs)
    return rule.forward(*theirs)[at]


def _finished(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`x` as it is saved: finite, contiguous, in memory of its own (or of the file's)."""
    _check_finite(x, name)
    if x.dtype != dtype:
        x = x.to(dtype)
        _check_finite(x, f"{name}, as {str(dtype).removeprefix('torch.')}")
    x = x.contiguous()
    return x.clone() if x.untyped_storage().nbytes() != x.numel() * x.element_size() else x


def _check_finite(x: Tensor, name: str) -> None:
    for part in (x.real, x.imag) if x.is_complex() else (x,):
        # Without a mask as large as the tensor: a NaN passes through both.
        least, most = part.aminmax() if part.numel() else (torch.zeros(()),) * 2
        if not (least.isfinite() and most.isfinite()):
            raise Refused(f"{name}: is not finite: it holds {least.item() if not least.isfinite() else most.item()}")


def _initialised(model: PreTrainedModel, names: list[str], seed: int) -> dict[str, Tensor]:
    """The weights of the Linear layers called `names`, drawn as a fresh model's."""
    weights = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
            layer = model.get_submodule(parent)
            drawn = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            model.base_model._init_weights(drawn)
            weights |= {f"{parent}.{name}": x.detach() for name, x in drawn.named_parameters()}
    return weights


# ---- to the original -------------------------------------------------------------------------------------------------


def _to_original(
    source: Path, dest: Path, original: Format, dtype: str | None, progress: Callable[[int, int], None] | None
) -> Report:
    config, model_class = _our_class(source)
    checkpoint = read(source)
    target = original.target(config, model_class)
    model = _empty(target)
    weights = _weights(model)
    title = original.title
    _check_names(checkpoint, list(weights), model_class.__name__)
    for name, x in weights.items():
        if checkpoint.shapes[name] != tuple(x.shape):
            raise Refused(f"{source}: {name} must have the shape {tuple(x.shape)}, got {checkpoint.shapes[name]}")
    _check_ours(weights, target, title)
    _check_expressible(original, target, weights, _dtype(checkpoint))
    real = DTYPES[dtype] if dtype is not None else _dtype(checkpoint)
    if real is torch.bfloat16 and dest.suffix == ".npz":
        raise Refused(f"DEST {dest}: NumPy has no bfloat16: --dtype float32, or .msgpack")

    tensors: dict[str, Tensor] = {}
    done, total = 0, sum(x.numel() for x in weights.values()) * torch.zeros((), dtype=real).element_size()
    for rule in target.rules:
        ours = [_finished(checkpoint.tensors[name](), real, f"{source}: {name}") for name in rule.ours]
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
        config = AutoConfig.from_pretrained(source, local_files_only=True)
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
    config = _describe(original, written, Answers(original.answers(target.config))).config
    inherited = {f.name for f in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    for f in dataclasses.fields(target.config):
        mine, theirs = getattr(target.config, f.name), getattr(config, f.name)
        if f.name not in inherited | INCIDENTAL and mine != theirs and not _fills(target.config, f.name):
            raise Refused(f"--to {original.name} cannot say {f.name} = {mine!r}; its models have {theirs!r}")


def _fills(config: PreTrainedConfig, name: str) -> bool:
    """Whether a field has no effect, for what it is about is absent."""
    if name in ("use_conv_bias", "conv_residual"):
        return config.conv_kernel == 0
    if name == "use_mlp_bias":
        return True  # tensors say it
    return name == "sub_ln_eps" and not config.use_sub_ln
