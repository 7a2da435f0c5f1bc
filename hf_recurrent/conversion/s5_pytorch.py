"""s5-pytorch's `S5Block`, alone or in a stack (`nn.Sequential`, `nn.ModuleList`): its state dict.

Lambda and C are complex and not halved by symmetry, log_step is a vector; C of both directions lies side by side. The
block adds what it computes to its *normed* input (`normed_residual`), and its MLP is a GEGLU or has no activation. The
model reads features as wide as the block (`input_projection=False`). A bare `S5`, without norm and residual, is
refused: it is no model.
"""

import re

from ..modeling import S5Config, S5Model
from .checkpoint import Checkpoint, Refused
from .rules import (
    Answers,
    Format,
    Option,
    Target,
    column,
    complex_matrix,
    complex_vector,
    needed,
    origin,
    ratio,
    renames,
)

PART = "s5.seq.Lambda"
LIQUID = Option("liquid", ("false",), "false", "whether the SSM is liquid (true has no counterpart here)")
DEGREE = Option("degree", ("1",), "1", "of the input operator (others have no counterpart here)")
BLOCK = {
    "s5.seq.B": "mixer.ssm.B",
    "s5.seq.D": "mixer.ssm.D",
    "attn_norm.weight": "mixer_norm.weight",
    "attn_norm.bias": "mixer_norm.bias",
    "ff_norm.weight": "mlp_norm.weight",
    "ff_norm.bias": "mlp_norm.bias",
    "ff_enc.weight": "mlp.up_proj.weight",
    "ff_dec.weight": "mlp.down_proj.weight",
}


class S5PyTorch(Format):
    name = "s5-pytorch"
    title = "S5Block of s5-pytorch"
    suffixes = (".pt", ".pth", ".bin")
    options = (LIQUID, DEGREE)
    complex_tensors = True

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return any(name.endswith("seq.Lambda") for name in checkpoint.shapes)

    def describe(self, checkpoint: Checkpoint, answers: Answers) -> Target:
        stack = self._stack(checkpoint)
        layers = 1 if stack is None else checkpoint.layers(stack)
        first = "" if stack is None else f"{stack}0."
        states, width, _ = checkpoint.shape(f"{first}s5.seq.B", 3)
        inner, rows = checkpoint.shape(f"{first}ff_dec.weight", 2)[1], checkpoint.shape(f"{first}ff_enc.weight", 2)[0]
        needed(
            rows in (inner, 2 * inner),
            f"{checkpoint.path}: {first}ff_enc.weight must have {inner} or, gated, {2 * inner} rows, got {rows}",
        )
        for option in self.options:
            answers.ask(option)
        config = S5Config(
            input_size=width,
            input_projection=False,
            hidden_size=width,
            num_hidden_layers=layers,
            state_size=states,
            num_blocks=1,
            conj_sym=False,
            bidirectional=checkpoint.shape(f"{first}s5.seq.C", 2)[1] == 2 * states,
            activation="gelu",
            hidden_act="gelu",
            mlp_ratio=ratio("ff_mult", inner, width),
            mlp_type="glu" if rows == 2 * inner else "linear",
            normed_residual=True,
            norm="layer",
            norm_eps=1e-5,
            use_bias=False,
            final_norm=False,
            residual_in_fp32=False,
            converted_from={"format": self.name, "stack": stack},
        )
        return self.target(config, S5Model)

    def _stack(self, checkpoint: Checkpoint) -> str | None:
        """What comes before the number of a block: "" for nn.Sequential, None for a block alone."""
        found = set()
        for name in checkpoint.shapes:
            if not name.endswith("seq.Lambda"):
                continue
            if not name.endswith(PART):
                raise Refused(f"{checkpoint.path}: an S5 layer without a block ({name}): there is no model around it")
            prefix = name.removesuffix(PART)
            numbered = re.fullmatch(r"(.*?)\d+\.", prefix)
            needed(
                prefix == "" or numbered is not None,
                f"{checkpoint.path}: {name}: expected a block alone, or blocks numbered from 0",
            )
            found.add(numbered[1] if numbered else None)
        needed(len(found) == 1, f"{checkpoint.path}: blocks of more than one stack")
        return found.pop()

    def answers(self, config: S5Config) -> dict[str, str]:
        return {option.name: option.default for option in self.options}

    def target(self, config: S5Config, model_class: type) -> Target:
        needed(model_class is S5Model, f"--to {self.name} takes an S5Model, got a {model_class.__name__}")
        stack = origin(config, self.name).get("stack")
        if config.num_hidden_layers > 1:
            stack = stack or ""
        rules = []
        for i in range(config.num_hidden_layers):
            theirs, ours = "" if stack is None else f"{stack}{i}.", f"layers.{i}."
            ssm = f"{ours}mixer.ssm."
            rules += renames(BLOCK, theirs, ours)
            rules.append(column(f"{theirs}s5.seq.log_step", f"{ssm}log_step"))
            rules.append(complex_vector(f"{theirs}s5.seq.Lambda", f"{ssm}Lambda_re", f"{ssm}Lambda_im"))
            parts = (f"{ssm}C1", f"{ssm}C2") if config.bidirectional else (f"{ssm}C",)
            rules.append(complex_matrix(f"{theirs}s5.seq.C", *parts))
        return Target(config, model_class, rules)
