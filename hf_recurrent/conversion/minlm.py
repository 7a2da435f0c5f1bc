"""minGRU-pytorch's `minLM`: the state dict of its minGRU or minLSTM language model, with or without convolution.

Its rows are ours: [hidden | gate], [hidden | f | i]. The convolution, with `enable_conv`, is a residual branch of its
own (`conv_residual`). Biases are in the MLPs and convolutions only. Its RMSNorm's epsilon is the dtype's.
"""

import torch

from ..modeling import MinGRUConfig, MinGRUForCausalLM, MinLSTMConfig, MinLSTMForCausalLM
from .checkpoint import Checkpoint
from .rules import Answers, Format, Target, needed, pointwise, ratio, rename, renames

# The released name of in_proj, how many projections it holds, and our classes.
CELLS = {
    "to_hidden_and_gate": (2, MinGRUConfig, MinGRUForCausalLM),
    "to_hidden_and_f_i_gate": (3, MinLSTMConfig, MinLSTMForCausalLM),
}
TOP = {
    "token_emb.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "to_logits.weight": "lm_head.weight",
}
LAYER = {
    "3.weight": "mlp_norm.weight",
    "4.0.weight": "mlp.up_proj.weight",
    "4.0.bias": "mlp.up_proj.bias",
    "4.2.weight": "mlp.down_proj.weight",
    "4.2.bias": "mlp.down_proj.bias",
}


class MinLM(Format):
    name = "mingru-pytorch"
    title = "minLM of minGRU-pytorch"
    suffixes = (".pt", ".pth", ".bin")

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return any(f"layers.0.2.{cell}.weight" in checkpoint for cell in CELLS)

    def describe(self, checkpoint: Checkpoint, answers: Answers) -> Target:
        cell = next((cell for cell in CELLS if f"layers.0.2.{cell}.weight" in checkpoint), next(iter(CELLS)))
        projections, config_class, model_class = CELLS[cell]
        vocab, width = checkpoint.shape("token_emb.weight", 2)
        rows = checkpoint.shape(f"layers.0.2.{cell}.weight", 2)[0]
        needed(
            rows % projections == 0,
            f"{checkpoint.path}: layers.0.2.{cell}.weight must have a multiple of {projections} rows, got {rows}",
        )
        convolution = "layers.0.0.net.0.weight"
        dtype = checkpoint.dtypes.get("norm.weight", torch.float32)
        config = config_class(
            vocab_size=vocab,
            hidden_size=width,
            num_hidden_layers=checkpoint.layers("layers."),
            expansion=ratio("expansion", rows // projections, width),
            mlp_ratio=ratio("ff_mult", checkpoint.shape("layers.0.4.0.weight", 2)[0], width),
            conv_kernel=checkpoint.shape(convolution, 3)[2] if convolution in checkpoint else 0,
            conv_residual=convolution in checkpoint,
            candidate="positive",
            hidden_act="gelu",
            use_bias=False,
            use_mlp_bias=True,
            use_conv_bias=True,
            tie_word_embeddings=False,
            norm_eps=torch.finfo(torch.promote_types(dtype, torch.float32)).eps,
            converted_from={"format": self.name},
        )
        return self.target(config, model_class)

    def target(self, config, model_class: type) -> Target:
        cell = next((cell for cell, (_, _, classes) in CELLS.items() if classes is model_class), None)
        needed(
            cell is not None,
            f"--to {self.name} takes a MinGRUForCausalLM or MinLSTMForCausalLM, got a {model_class.__name__}",
        )
        rules = renames(TOP)
        for i in range(config.num_hidden_layers):
            theirs, ours = f"layers.{i}.", f"model.layers.{i}."
            rules += renames(LAYER | {f"2.{cell}.weight": "mixer.in_proj.weight"}, theirs, ours)
            if config.recurrent_size != config.hidden_size:
                rules.append(rename(f"{theirs}2.to_out.weight", f"{ours}mixer.out_proj.weight"))
            if not config.conv_residual:
                rules.append(rename(f"{theirs}1.weight", f"{ours}mixer_norm.weight"))
                continue
            rules.append(rename(f"{theirs}1.weight", f"{ours}mixer.norm.weight"))
            rules.append(pointwise(f"{theirs}0.net.1.weight", f"{ours}mixer.conv_proj.weight"))
            table = {"0.net.0.weight": "conv1d.weight", "0.net.0.bias": "conv1d.bias", "0.net.1.bias": "conv_proj.bias"}
            rules += renames(table, theirs, f"{ours}mixer.")
        return Target(config, model_class, rules)
