"""gateloop-transformer's `Transformer`, with gate-looped attention: its state dict.

Its transitions are our "cartesian" ones, its rows [q | k | v] ours. Biases are in the MLPs and the transitions only.
With pre-norm, `normalize(x) sqrt(d) gamma` is an RMSNorm whose epsilon is next to nothing; with post-norm there is no
final norm and the head has another name. `ablate_complex` and `ablate_state_transition` are arguments of a call and not
converted.
"""

from ..modeling import GateLoopConfig, GateLoopForCausalLM
from .checkpoint import Checkpoint
from .rules import Answers, Format, Target, needed, ratio, rename, renames

EPS = 1e-30  # of pre-norm: far below the mean square of anything, and not 0
LAYER_NORM_EPS = 1e-5
MIXER = {
    "0.fn.to_qkv.weight": "mixer.in_proj.weight",
    "0.fn.to_a.0.weight": "mixer.transition_proj.weight",
    "0.fn.to_a.0.bias": "mixer.transition_proj.bias",
    "1.fn.0.weight": "mlp.up_proj.weight",
    "1.fn.0.bias": "mlp.up_proj.bias",
    "1.fn.2.weight": "mlp.down_proj.weight",
    "1.fn.2.bias": "mlp.down_proj.bias",
}
PRE_NORM = {"0.norm.gamma": "mixer_norm.weight", "1.norm.gamma": "mlp_norm.weight"}
POST_NORM = {
    f"{i}.norm.{kind}": f"{part}_norm.{kind}" for i, part in enumerate(("mixer", "mlp")) for kind in ("weight", "bias")
}
SUB_LN = {f"0.fn.maybe_sub_ln.{kind}": f"mixer.sub_ln.{kind}" for kind in ("weight", "bias")}


class GateLoop(Format):
    name = "gateloop-transformer"
    title = "Transformer of gateloop-transformer"
    suffixes = (".pt", ".pth", ".bin")

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return "layers.0.0.fn.to_a.0.weight" in checkpoint and "layers.0.0.fn.to_qkv.weight" in checkpoint

    def describe(self, checkpoint: Checkpoint, answers: Answers) -> Target:
        vocab, width = checkpoint.shape("token_emb.weight", 2)
        inner, rest = divmod(checkpoint.shape("layers.0.0.fn.to_qkv.weight", 2)[0], 3)
        heads, odd = divmod(checkpoint.shape("layers.0.0.fn.to_a.0.weight", 2)[0], 2)
        needed(
            rest == 0 and odd == 0 and heads > 0 and inner % heads == 0,
            f"{checkpoint.path}: to_qkv must have 3 dim_inner rows and to_a 2 heads, where heads divide dim_inner; got "
            f"{3 * inner + rest} and {2 * heads + odd}",
        )
        post_norm = "layers.0.0.norm.bias" in checkpoint
        config = GateLoopConfig(
            vocab_size=vocab,
            hidden_size=width,
            num_hidden_layers=checkpoint.layers("layers."),
            expansion=ratio("dim_gate_looped_attn", inner, width),
            mlp_ratio=ratio("ff_mult", checkpoint.shape("layers.0.1.fn.0.weight", 2)[0], width),
            num_heads=heads,
            transition="cartesian",
            hidden_act="gelu",
            use_gate="layers.0.0.fn.to_gates.0.weight" in checkpoint,
            use_sub_ln="layers.0.0.fn.maybe_sub_ln.weight" in checkpoint,
            sub_ln_eps=LAYER_NORM_EPS,
            post_norm=post_norm,
            norm_eps=LAYER_NORM_EPS if post_norm else EPS,
            use_bias=False,
            use_mlp_bias=True,
            tie_word_embeddings=False,
            converted_from={"format": self.name},
        )
        return self.target(config, GateLoopForCausalLM)

    def target(self, config: GateLoopConfig, model_class: type) -> Target:
        needed(
            model_class is GateLoopForCausalLM,
            f"--to {self.name} takes a GateLoopForCausalLM, got a {model_class.__name__}",
        )
        rules = [rename("token_emb.weight", "model.embed_tokens.weight")]
        if config.post_norm:
            rules.append(rename("to_logits.weight", "lm_head.weight"))
        else:
            rules += renames({"to_logits.0.gamma": "model.norm.weight", "to_logits.1.weight": "lm_head.weight"})
        table = MIXER | (POST_NORM if config.post_norm else PRE_NORM) | (SUB_LN if config.use_sub_ln else {})
        if config.use_gate:
            table = table | {"0.fn.to_gates.0.weight": "mixer.gate_proj.weight"}
        if config.use_gate or config.recurrent_size != config.hidden_size:
            table = table | {"0.fn.to_out.weight": "mixer.out_proj.weight"}
        for i in range(config.num_hidden_layers):
            rules += renames(table, f"layers.{i}.", f"model.layers.{i}.")
        return Target(config, model_class, rules)
