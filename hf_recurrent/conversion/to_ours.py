"""From a checkpoint of another code to a folder that `from_pretrained` loads."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..files import replacing_folder, saving
from ..hub.code import write_code
from ..messages import counted
from .checkpoint import Checkpoint, Refused
from .common import (
    DTYPES,
    Report,
    check_names,
    check_ours,
    described,
    dtype_of,
    empty_model,
    finished,
    saved_weights,
)
from .formats import detect
from .reading import read
from .rules import Answers, Rule, Target


def to_ours(
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
    original = detect(checkpoint, from_format)
    target = described(original, checkpoint, answers)
    answers.settle(checkpoint.path, original.title)
    model = empty_model(target)
    _check_tables(checkpoint, target, model, original.title)
    dtype = DTYPES[dtype] if dtype is not None else dtype_of(checkpoint)
    config = target.config
    config.architectures, config.dtype = [target.model_class.__name__], dtype
    tokens = None if tokenizer is None else _tokenizer(tokenizer, config)

    made = {name: (rule, at) for rule in target.rules for at, name in enumerate(rule.ours)}
    fresh = _initialised(model, target.fresh, seed)
    shapes = {name: x.to(dtype) for name, x in saved_weights(model).items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)
    done, total = 0, sum(x.numel() * x.element_size() for x in shapes.values())
    with replacing_folder(dest) as folder:
        for file, names in split.filename_to_tensors.items():
            shard, places = {}, set()
            for name in names:
                x = fresh[name] if name in fresh else _convert(checkpoint, *made[name])
                x = finished(x, dtype, f"{checkpoint.path}: {name}")
                # safetensors takes no tensor under two names, as some file may hold weights that are not tied.
                shard[name] = x.clone() if x.data_ptr() in places else x
                places.add(x.data_ptr())
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
            write_code(folder, type(config))
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


def _check_tables(checkpoint: Checkpoint, target: Target, model: PreTrainedModel, title: str) -> None:
    """The table must have each tensor of the checkpoint once, each of the model once, and their shapes."""
    expected = [name for rule in target.rules for name in rule.theirs] + target.dropped
    check_names(checkpoint, expected, title)
    weights = saved_weights(model)
    check_ours(weights, target, title)
    for rule in target.rules:
        theirs = rule.backward(*(weights[name] for name in rule.ours))
        for name, x in zip(rule.theirs, theirs, strict=True):
            if checkpoint.shapes[name] != tuple(x.shape):
                raise Refused(
                    f"{checkpoint.path}: {name} must have the shape {tuple(x.shape)}, got {checkpoint.shapes[name]}"
                )
            if checkpoint.dtypes[name].is_complex != x.is_complex():
                kind = "complex" if x.is_complex() else "real"
                raise Refused(f"{checkpoint.path}: {name} must be {kind}, got {checkpoint.dtypes[name]}")


def _tokenizer(name: str, config: PreTrainedConfig):
    from ..training.tokenizer import byte_tokenizer, load_tokenizer

    if getattr(config, "input_size", None) is not None:
        raise Refused(f"--tokenizer {name}: this model reads features, not tokens")
    # A vocabulary of the bytes alone, as of texts that are one document, has no place for a token that ends one.
    tokenizer = byte_tokenizer(ends=config.vocab_size != 256) if name == "bytes" else load_tokenizer(name)
    size = max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may have gaps
    if size > config.vocab_size:
        raise Refused(
            f"--tokenizer {name}: has {counted(size, 'token')}, the checkpoint's vocabulary {config.vocab_size:,}"
        )
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(tokenizer, token))
    return tokenizer


def _convert(checkpoint: Checkpoint, rule: Rule, at: int) -> Tensor:
    theirs = [checkpoint.tensors[name]() for name in rule.theirs]
    if rule.check is not None:
        try:
            rule.check(*theirs)
        except Refused as error:
            raise Refused(f"{checkpoint.path}: {error}") from None
    return rule.forward(*theirs)[at]


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
