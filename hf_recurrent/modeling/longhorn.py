"""Longhorn (arXiv 2407.14207): a state that solves, at every token, a small online regression of x_t on k_t.

    paper      code                                                        shape
    d          config.recurrent_size = expansion * hidden_size
    m          config.state_size
    x_t        x: the first half of in_proj's rows, convolved, silu        (B, L, d)
    z_t        z: the second half                                          (B, L, d)
    k_t, q_t   k, q: from x by x_proj, shared by all channels              (B, L, m)
    dt_t       dt: from x by x_proj, of rank dt_rank, and dt_head          (B, L, d)
    beta_t     sigmoid(dt), inside longhorn_scan                           (B, L, d)
    eps_t      beta_t / (1 + beta_t k_t.k_t): the step of the closed-form solution (theorem 3.1)
    S_t        (1 - eps_t k_t^2) * S_{t-1} + (eps_t x_t) k_t^T             (B, d, m)
    S_0        state["recurrent"], zero at the start
    o_t        S_t q_t + D * x_t, gated by silu(z_t)                       (B, L, d)

The block is Mamba's (in_proj, convolution, selective recurrence, gate, out_proj, and no MLP) without its A and its
step-size floor: forgetting follows from the regression. As in the paper, the update takes the diagonal of k_t k_t^T.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict, validated_field
from torch import Tensor, nn
from transformers import initialization as init

from ..scan import longhorn_scan
from .configuration import RecurrentConfig, at_least, kernel_size, not_negative, positive
from .layers import ShortConvolution, State
from .model import RecurrentForCausalLM, RecurrentForSequenceClassification, RecurrentModel


def _rank(value: int | str) -> None:
    if value != "auto":
        at_least(1)(value)


@strict
class LonghornConfig(RecurrentConfig):
    """
    Configuration of Longhorn: every field of `RecurrentConfig`, with the paper's defaults (no MLP, expansion 2, tied
    embeddings, norm_eps 1e-5), and

    Args:
        state_size: m, the numbers that each channel remembers.
        dt_rank: inner width of the projection to the step sizes; "auto" for hidden_size / 16, rounded up.

    The paper's models (`presets`, named as it names them) have GPT-NeoX's vocabulary, padded to a multiple of 8 rows.
    """

    model_type = "longhorn"
    presets = {
        "longhorn-125m": {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 12},
        "longhorn-350m": {"vocab_size": 50280, "hidden_size": 1024, "num_hidden_layers": 24},
        "longhorn-1.3b": {"vocab_size": 50280, "hidden_size": 2048, "num_hidden_layers": 48},
    }

    conv_kernel: int = validated_field(kernel_size, default=4)
    mlp_ratio: int | float = validated_field(not_negative, default=0)
    norm_eps: int | float = validated_field(positive, default=1e-5)
    tie_word_embeddings: bool = True
    state_size: int = validated_field(at_least(1), default=16)
    dt_rank: int | Literal["auto"] = validated_field(_rank, default="auto")

    @property
    def step_rank(self) -> int:
        """`dt_rank` as a number."""
        return math.ceil(self.hidden_size / 16) if self.dt_rank == "auto" else self.dt_rank


class LonghornMixer(nn.Module):
    """(B, L, hidden_size) -> (B, L, hidden_size); the contract is in layers.py."""

    def __init__(self, config: LonghornConfig):
        super().__init__()
        size, rank, m = config.recurrent_size, config.step_rank, config.state_size
        self.widths = (rank, m, m)
        self.state_shapes = {"recurrent": (size, m)}
        self.in_proj = nn.Linear(config.hidden_size, 2 * size, bias=config.use_bias)
        self.conv1d = None
        if config.conv_kernel:
            self.conv1d = ShortConvolution(size, config.conv_kernel, bias=config.use_conv_bias)
            self.state_shapes["conv"] = self.conv1d.state_shape
        self.x_proj = nn.Linear(size, sum(self.widths), bias=False)
        self.dt_head = nn.Linear(rank, size)
        self.D = nn.Parameter(torch.ones(size))
        self.out_proj = nn.Linear(size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor, state: State, mask: Tensor | None, reset: Tensor | None) -> tuple[Tensor, State]:
        new_state = {}
        x, z = self.in_proj(x).chunk(2, dim=-1)
        if self.conv1d is not None:
            x, new_state["conv"] = self.conv1d(x, state.get("conv"), mask, reset)
        x = F.silu(x)
        dt, k, q = self.x_proj(x).split(self.widths, dim=-1)
        o, new_state["recurrent"] = longhorn_scan(
            x, self.dt_head(dt), k, q, state.get("recurrent"), mask=mask, reset=reset
        )
        o = torch.addcmul(o, x.to(o.dtype), self.D.to(o.dtype))
        return self.out_proj(o.to(z.dtype) * F.silu(z)), new_state


class LonghornModel(RecurrentModel):
    """Longhorn without a head; see `RecurrentModel`."""

    config_class = LonghornConfig
    mixer_class = LonghornMixer

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LonghornMixer):
            init.ones_(module.D)


class LonghornForCausalLM(RecurrentForCausalLM):
    """Longhorn with a language-model head; see `RecurrentForCausalLM`."""

    config_class = LonghornConfig
    model_class = LonghornModel


class LonghornForSequenceClassification(RecurrentForSequenceClassification):
    """Longhorn with a classifier on each row's last real token; see `RecurrentForSequenceClassification`."""

    config_class = LonghornConfig
    model_class = LonghornModel
