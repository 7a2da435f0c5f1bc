"""The authors' Longhorn (github.com/Cranial-XIX/longhorn): `pytorch_model.bin` beside `config.json`, or the training
script's file, whose weights lie under "model" with the prefix "transformer." and, compiled, "_orig_mod.".

The block is ours, name by name. Embeddings are padded to a multiple of 8 rows, config.json keeps the number before. The
head is tied and saved twice. `in_proj.bias`, with `ssm_cfg.bias`, is not read by the original's forward pass: it
stays at zero, and a checkpoint where it does not is refused. Norms have no parameter for their epsilon, 1e-5.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from ..modeling import LonghornConfig, LonghornForCausalLM
from .checkpoint import Checkpoint, Refused
from .rules import Answers, Format, Rule, Target, needed, origin, ratio, rename, renames, tied

EMBEDDING, HEAD = "backbone.embedding.weight", "lm_head.weight"
EPS = 1e-5
MIXER = {
    "mixer.D": "mixer.D",
    "mixer.in_proj.weight": "mixer.in_proj.weight",
    "mixer.conv1d.weight": "mixer.conv1d.weight",
    "mixer.x_proj.weight": "mixer.x_proj.weight",
    "mixer.dt_head.weight": "mixer.dt_head.weight",
    "mixer.dt_head.bias": "mixer.dt_head.bias",
    "mixer.out_proj.weight": "mixer.out_proj.weight",
    "norm.weight": "mixer_norm.weight",
}
# What config.json may say, and what the tensors say of it.
SIZES = ("d_model", "n_layer")
SSM_SIZES = ("d_state", "d_conv", "expand", "dt_rank", "bias", "conv_bias")


def _zero(name: str):
    def check(bias: Tensor) -> None:
        if bias.any():
            raise Refused(f"{name} is not zero, but the original's forward pass leaves it out: set it to zero first")

    return check


class Longhorn(Format):
    name = "longhorn"
    title = "the authors' Longhorn"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return any(name.endswith("mixer.dt_head.weight") for name in checkpoint.shapes)

    def describe(self, checkpoint: Checkpoint, answers: Answers) -> Target:
        shape = checkpoint.shape
        vocab, width = shape(EMBEDDING, 2)
        layers = checkpoint.layers("backbone.layers.")
        mixer = "backbone.layers.0.mixer"
        inner, rank = shape(f"{mixer}.dt_head.weight", 2)
        state_rows = shape(f"{mixer}.x_proj.weight", 2)[0] - rank
        needed(
            state_rows > 0 and state_rows % 2 == 0,
            f"{checkpoint.path}: {mixer}.x_proj.weight must have dt_rank + 2 d_state = {rank} + 2 d_state rows, "
            f"got {rank + state_rows}",
        )
        sizes = {
            "d_model": width, "n_layer": layers, "d_state": state_rows // 2, "dt_rank": rank,
            "d_conv": shape(f"{mixer}.conv1d.weight", 3)[2], "expand": ratio("expand", inner, width),
            "bias": f"{mixer}.out_proj.bias" in checkpoint, "conv_bias": f"{mixer}.conv1d.bias" in checkpoint,
        }  # fmt: skip
        theirs = self._check_config(checkpoint, sizes, vocab)
        head, embedding = HEAD, EMBEDDING
        is_tied = theirs.get("tie_embeddings", True)
        if not theirs:  # no configuration: the weights say it
            is_tied = head not in checkpoint or torch.equal(checkpoint.tensors[head](), checkpoint.tensors[embedding]())
        if head not in checkpoint and is_tied:
            checkpoint.alias(head, embedding)
        config = LonghornConfig(
            vocab_size=vocab,
            hidden_size=width,
            num_hidden_layers=layers,
            expansion=sizes["expand"],
            conv_kernel=sizes["d_conv"],
            state_size=sizes["d_state"],
            dt_rank=rank,
            use_bias=sizes["bias"],
            use_conv_bias=sizes["conv_bias"],
            residual_in_fp32=theirs.get("residual_in_fp32", True),
            norm_eps=EPS,
            tie_word_embeddings=is_tied,
            converted_from={"format": self.name, "config": theirs},
        )
        return self.target(config, LonghornForCausalLM)

    def _check_config(self, checkpoint: Checkpoint, sizes: dict, vocab: int) -> dict:
        """config.json, whose sizes must be those of the tensors; {} without one."""
        theirs, path = checkpoint.config, checkpoint.path
        ssm = theirs.get("ssm_cfg") or {}
        needed(isinstance(ssm, dict), f"{path}: ssm_cfg must be an object, got {ssm!r}")
        said = {name: theirs[name] for name in SIZES if name in theirs}
        said |= {name: ssm[name] for name in SSM_SIZES if name in ssm}
        if said.get("dt_rank") == "auto":
            del said["dt_rank"]
        if "d_state" in theirs:  # what the wrapper of the training script adds
            said.setdefault("d_state", theirs["d_state"])
        for name, value in said.items():
            needed(value == sizes[name], f"{path}: its config says {name} = {value!r}, its tensors {sizes[name]}")
        multiple, size = theirs.get("pad_vocab_size_multiple", 8), theirs.get("vocab_size", vocab)
        for name, value in (("pad_vocab_size_multiple", multiple), ("vocab_size", size)):
            needed(isinstance(value, int) and value > 0, f"{path}: its config says {name} = {value!r}")
        padded = -(-size // multiple) * multiple
        needed(
            padded == vocab or "vocab_size" not in theirs,
            f"{path}: its config says vocab_size = {size}, padded {padded}, its embedding has {vocab} rows",
        )
        for name in ("tie_embeddings", "residual_in_fp32"):
            needed(isinstance(theirs.get(name, True), bool), f"{path}: its config says {name} = {theirs.get(name)!r}")
        needed(theirs.get("rms_norm", True) is True, f"{path}: its norms are LayerNorms (rms_norm), ours are RMSNorms")
        for name in ("d_intermediate", "attn_layer_idx"):
            needed(not theirs.get(name), f"{path}: its config says {name} = {theirs.get(name)!r}, which ours has not")
        return theirs

    def target(self, config: LonghornConfig, model_class: type) -> Target:
        needed(
            model_class is LonghornForCausalLM,
            f"--to {self.name} takes a LonghornForCausalLM, got a {model_class.__name__}",
        )
        embedding, head = EMBEDDING, HEAD
        if config.tie_word_embeddings:
            rules = [tied((embedding, head), "model.embed_tokens.weight")]
        else:
            rules = renames({embedding: "model.embed_tokens.weight", head: "lm_head.weight"})
        rules.append(rename("backbone.norm_f.weight", "model.norm.weight"))
        table = dict(MIXER)
        if config.use_conv_bias:
            table["mixer.conv1d.bias"] = "mixer.conv1d.bias"
        if config.use_bias:
            table["mixer.out_proj.bias"] = "mixer.out_proj.bias"
        for i in range(config.num_hidden_layers):
            theirs, ours = f"backbone.layers.{i}.", f"model.layers.{i}."
            rules += renames(table, theirs, ours)
            if config.use_bias:
                name = f"{theirs}mixer.in_proj.bias"
                rules.append(Rule((name,), (f"{ours}mixer.in_proj.bias",), check=_zero(name)))
        return Target(config, model_class, rules)

    def config_file(self, config: LonghornConfig) -> dict:
        """The original's own, if this model came from one: it has the vocabulary's size before padding."""
        kept = origin(config, self.name).get("config")
        if isinstance(kept, dict) and kept:
            return kept
        return {
            "d_model": config.hidden_size, "d_intermediate": 0, "n_layer": config.num_hidden_layers,
            "vocab_size": config.vocab_size,
            "ssm_cfg": {
                "d_state": config.state_size, "d_conv": config.conv_kernel, "expand": config.expansion,
                "dt_rank": config.step_rank, "bias": config.use_bias, "conv_bias": config.use_conv_bias,
            },
            "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": config.residual_in_fp32,
            "fused_add_norm": True, "pad_vocab_size_multiple": 8 if config.vocab_size % 8 == 0 else 1,
            "tie_embeddings": config.tie_word_embeddings,
        }  # fmt: skip

    def write(self, path: Path, tensors: dict[str, Tensor], config: LonghornConfig) -> None:
        torch.save(tensors, path / "pytorch_model.bin")
        (path / "config.json").write_text(json.dumps(self.config_file(config)), encoding="utf-8")
