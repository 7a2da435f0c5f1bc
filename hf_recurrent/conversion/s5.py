"""The authors' S5 (github.com/lindermanlab/S5, JAX and flax): the variables of its classification or retrieval model,
as `flax.serialization.to_bytes` writes them or as a flat .npz of their paths.

Kernels are (in, out). C is one of C, C1 and C2, or for "complex_normal" in both directions C with twice the columns.
Features go in, for tokens one-hot ones: its encoder has a bias, which an embedding has not. The same tensors serve many
models, so most of what S5's layers do is asked for.
"""

import math
from pathlib import Path

import numpy as np
from torch import Tensor

from ..modeling import S5Config, S5ForDocumentMatching, S5ForSequenceClassification
from .checkpoint import Checkpoint, Refused
from .flax_msgpack import write_msgpack
from .rules import ON_OFF, Answers, Format, Option, Rule, Target, needed, rename, renames, side_by_side, transposed

ENCODER, LAYER = "params/encoder/encoder", "params/encoder/layers_"
STATS = "batch_stats/encoder/layers_"
LAYER_NORM_EPS, BATCH_NORM_EPS = 1e-6, 1e-5  # of flax
SSM = ("Lambda_re", "Lambda_im", "B", "D", "log_step")

ACTIVATION = Option("activation", ("half_glu1", "half_glu2"), "half_glu1", "what follows the SSM")
CONJ_SYM = Option("conj-sym", ON_OFF, "true", "whether the states are halves of conjugate pairs")
DISCRETIZATION = Option("discretization", ("zoh", "bilinear"), "zoh", "of the continuous system")
CLIP_EIGS = Option("clip-eigs", ON_OFF, "false", "whether eigenvalues are kept in the left half plane")
PRENORM = Option("prenorm", ON_OFF, "true", "whether norms come before the SSM or after the residual sum")
NORM = Option("norm", ("layer",), "layer", "which norm it is, where the file has no batch statistics")
POOLING = Option("pooling", ("mean", "last"), "mean", "what the classifier reads")


def _positive(name: str):
    def check(variance: Tensor) -> None:
        least = variance.min().item()
        if -math.inf < least < 0:
            raise Refused(f"{name} holds a variance below 0: {least:g}")

    return check


class S5(Format):
    name = "s5"
    title = "the authors' S5"
    suffixes = (".msgpack", ".npz")
    options = (ACTIVATION, CONJ_SYM, DISCRETIZATION, CLIP_EIGS, PRENORM, NORM, POOLING)

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return f"{LAYER}0/seq/Lambda_re" in checkpoint

    def describe(self, checkpoint: Checkpoint, answers: Answers) -> Target:
        shape, seq = checkpoint.shape, f"{LAYER}0/seq"
        input_size, width = shape(f"{ENCODER}/kernel", 2)
        states = shape(f"{seq}/Lambda_re", 1)[0]
        one_c = f"{seq}/C" in checkpoint
        bidirectional = not one_c or shape(f"{seq}/C", 3)[1] == 2 * states
        retrieval = "params/decoder/layer1/kernel" in checkpoint
        decoder = "params/decoder/layer2/kernel" if retrieval else "params/decoder/kernel"
        conj_sym = answers.ask(CONJ_SYM) == "true"
        activation = "gelu"
        if f"{LAYER}0/out1/kernel" in checkpoint:
            activation = "full_glu"
        elif f"{LAYER}0/out2/kernel" in checkpoint:
            activation = answers.ask(ACTIVATION)
        batch = any(name.startswith(STATS) for name in checkpoint.shapes)
        norm = "batch" if batch else answers.ask(NORM)
        config = S5Config(
            input_size=input_size,
            hidden_size=width,
            num_hidden_layers=checkpoint.layers(LAYER),
            state_size=states * (2 if conj_sym else 1),
            num_blocks=1,
            conj_sym=conj_sym,
            discretization=answers.ask(DISCRETIZATION),
            clip_eigs=answers.ask(CLIP_EIGS) == "true",
            prenorm=answers.ask(PRENORM) == "true",
            pooling="mean" if retrieval else answers.ask(POOLING),
            c_init="complex_normal" if one_c and bidirectional else "trunc_standard_normal",
            bidirectional=bidirectional,
            activation=activation,
            norm=norm,
            norm_eps=BATCH_NORM_EPS if batch else LAYER_NORM_EPS,
            final_norm=False,
            residual_in_fp32=False,
            num_labels=shape(decoder, 2)[1],
            converted_from={"format": self.name},
        )
        return self.target(config, S5ForDocumentMatching if retrieval else S5ForSequenceClassification)

    def answers(self, config: S5Config) -> dict[str, str]:
        given = {
            CONJ_SYM.name: str(config.conj_sym).lower(),
            DISCRETIZATION.name: config.discretization,
            CLIP_EIGS.name: str(config.clip_eigs).lower(),
            PRENORM.name: str(config.prenorm).lower(),
            POOLING.name: config.pooling,
        }
        if config.norm == "layer":
            given[NORM.name] = config.norm
        if config.activation in ACTIVATION.values:
            given[ACTIVATION.name] = config.activation
        return given

    def target(self, config: S5Config, model_class: type) -> Target:
        heads = {
            S5ForSequenceClassification: {"": "score"},
            S5ForDocumentMatching: {"/layer1": "dense", "/layer2": "score"},
        }
        needed(
            model_class in heads,
            f"--to {self.name} takes an S5ForSequenceClassification or S5ForDocumentMatching, "
            f"got a {getattr(model_class, '__name__', model_class)}",
        )
        needed(
            config.input_size is not None, f"--to {self.name} takes a model of features (input_size), got one of tokens"
        )
        dense = {ENCODER: "model.embed_features"}
        dense |= {f"params/decoder{theirs}": ours for theirs, ours in heads[model_class].items()}
        rules = []
        glu = {"full_glu": ("out1", "out2"), "gelu": ()}.get(config.activation, ("out2",))
        for i in range(config.num_hidden_layers):
            theirs, ours = f"{LAYER}{i}/", f"model.layers.{i}."
            dense |= {f"{theirs}{out}": f"{ours}mixer.{out}" for out in glu}
            rules += renames({f"seq/{name}": f"mixer.ssm.{name}" for name in SSM}, theirs, ours)
            rules += renames({"norm/scale": "mixer_norm.weight", "norm/bias": "mixer_norm.bias"}, theirs, ours)
            if config.norm == "batch":
                mean, var = f"{STATS}{i}/norm/mean", f"{STATS}{i}/norm/var"
                rules.append(rename(mean, f"{ours}mixer_norm.running_mean"))
                rules.append(Rule((var,), (f"{ours}mixer_norm.running_var",), check=_positive(var)))
            if not config.bidirectional:
                rules.append(rename(f"{theirs}seq/C", f"{ours}mixer.ssm.C"))
            elif config.c_init == "complex_normal":
                rules.append(side_by_side(f"{theirs}seq/C", f"{ours}mixer.ssm.C1", f"{ours}mixer.ssm.C2"))
            else:
                rules += renames({"seq/C1": "mixer.ssm.C1", "seq/C2": "mixer.ssm.C2"}, theirs, ours)
        for theirs, ours in dense.items():
            rules += [transposed(f"{theirs}/kernel", f"{ours}.weight"), rename(f"{theirs}/bias", f"{ours}.bias")]
        return Target(config, model_class, rules)

    def write(self, path: Path, tensors: dict[str, Tensor], config: S5Config) -> None:
        if path.suffix == ".msgpack":
            write_msgpack(path, tensors)
        else:
            np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
