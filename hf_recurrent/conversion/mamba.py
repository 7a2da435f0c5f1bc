"""Transformers' Mamba as a warm start for Longhorn, which has its block.

Copied are the embeddings, norms, in_proj, the convolution, D, out_proj and x_proj, whose rows [dt | B | C] become
[dt | k | q]: B, too, says where a token is written, and C what is read. Mamba's A and its steps (softplus of dt_proj)
have no counterpart; Longhorn's dt_head (a sigmoid) is initialised. So the result computes something else, until it is
trained.
"""

from ..modeling import LonghornConfig, LonghornForCausalLM
from .checkpoint import Checkpoint, Refused
from .longhorn import MIXER
from .rules import Answers, Format, Target, needed, ratio, renames, tied

LEFT = ("mixer.A_log", "mixer.dt_proj.weight", "mixer.dt_proj.bias")
FRESH = ("mixer.dt_head.weight", "mixer.dt_head.bias")


class Mamba(Format):
    name = "transformers-mamba"
    title = "Transformers' Mamba"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return "backbone.embeddings.weight" in checkpoint and "backbone.layers.0.mixer.A_log" in checkpoint

    def describe(self, checkpoint: Checkpoint, answers: Answers) -> Target:
        theirs, path = checkpoint.config, checkpoint.path
        needed(
            theirs.get("model_type") == "mamba",
            f"{path}: needs the config.json of a Mamba (model_type 'mamba'), got {theirs.get('model_type')!r}",
        )
        needed(
            theirs.get("hidden_act", "silu") in ("silu", "swish"),
            f"{path}: its activation is {theirs.get('hidden_act')!r}, Longhorn's is 'silu'",
        )
        shape, mixer = checkpoint.shape, "backbone.layers.0.mixer"
        vocab, width = shape("backbone.embeddings.weight", 2)
        inner, state_size = shape(f"{mixer}.A_log", 2)
        is_tied = "lm_head.weight" not in checkpoint or theirs.get("tie_word_embeddings", True)
        if "lm_head.weight" not in checkpoint:
            checkpoint.alias("lm_head.weight", "backbone.embeddings.weight")
        config = LonghornConfig(
            vocab_size=vocab,
            hidden_size=width,
            num_hidden_layers=checkpoint.layers("backbone.layers."),
            expansion=ratio("expand", inner, width),
            conv_kernel=shape(f"{mixer}.conv1d.weight", 3)[2],
            state_size=state_size,
            dt_rank=shape(f"{mixer}.dt_proj.weight", 2)[1],
            use_bias=f"{mixer}.in_proj.bias" in checkpoint,
            use_conv_bias=f"{mixer}.conv1d.bias" in checkpoint,
            residual_in_fp32=theirs.get("residual_in_fp32", True),
            norm_eps=theirs.get("layer_norm_epsilon", 1e-5),
            tie_word_embeddings=is_tied,
            **{name: theirs[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in theirs},
        )
        if config.tie_word_embeddings:
            rules = [tied(("backbone.embeddings.weight", "lm_head.weight"), "model.embed_tokens.weight")]
        else:
            table = {"backbone.embeddings.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
            rules = renames(table)
        rules += renames({"backbone.norm_f.weight": "model.norm.weight"})
        table = {name: ours for name, ours in MIXER.items() if name not in FRESH}
        table |= {"mixer.conv1d.bias": "mixer.conv1d.bias"} if config.use_conv_bias else {}
        if config.use_bias:
            table |= {f"mixer.{name}.bias": f"mixer.{name}.bias" for name in ("in_proj", "out_proj")}
        fresh, dropped = [], []
        for i in range(config.num_hidden_layers):
            rules += renames(table, f"backbone.layers.{i}.", f"model.layers.{i}.")
            fresh += [f"model.layers.{i}.{name}" for name in FRESH]
            dropped += [f"backbone.layers.{i}.{name}" for name in LEFT]
        return Target(config, LonghornForCausalLM, rules, fresh, dropped)

    def target(self, config: LonghornConfig, model_class: type) -> Target:
        raise Refused(f"--to {self.name}: a Longhorn cannot become a Mamba, which computes something else")
