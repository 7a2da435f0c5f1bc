"""The parts that every family shares: norm, short convolution, MLP, and the residual block around a mixer.

A mixer is the one part that a family writes itself:

    mixer(x, state, mask, reset) -> (y, new_state)

    x, y    (B, L, hidden_size)
    state   dict of tensors (B, ...) left by the call before, empty at the start; `mixer.state_shapes` gives their names
            and shapes without the batch. The one called "recurrent" is in float32 (float64 for such weights), or its
            complex counterpart with `mixer.complex_state`
    mask    (B, L) bool or None: False is padding, which changes no state; y is arbitrary (but finite) there
    reset   (B, L) bool or None: True is the first token of a document, which sees nothing before it

One token, a chunk and a whole sequence are the same call, so there is no second form to keep equal to the first.

A mixer may take more by keyword, the names in `RecurrentModel.mixer_kwargs`, and return more, to be recorded by hooks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from ..scan.convolution import short_convolution, state_after
from ..scan.linear import linear
from ..scan.norm import rms_norm
from ..scan.split import carried_inputs
from .configuration import RecurrentConfig

State = dict[str, Tensor]


def new_initial_state(config: RecurrentConfig, shape: tuple[int, ...], is_complex: bool = False) -> nn.Parameter | None:
    """The `initial_state` of a mixer: with `config.learned_initial_state` a parameter of the recurrent state's `shape`,
    for a complex one with real and imaginary part in a last dimension; None for a state that starts as zero."""
    if not config.learned_initial_state:
        return None
    return nn.Parameter(torch.zeros((*shape, 2) if is_complex else shape))


def starting_states(mixer: nn.Module, state: State, batch: int) -> tuple[Tensor | None, Tensor | None]:
    """
    Returns:
        The recurrent state that a call of `mixer` goes on from, (B, ...), and the one that a document starts from,
        (...); None for zero.
    """
    start = mixer.initial_state
    if start is None:
        return state.get("recurrent"), None
    start = start.to(torch.promote_types(start.dtype, torch.float32))
    if mixer.complex_state:
        start = torch.view_as_complex(start.contiguous())
    if "recurrent" in state:
        return state["recurrent"], start
    return start.expand(batch, *start.shape).contiguous(), start


def project(projection: nn.Module, x: Tensor) -> Tensor:
    """projection(x), as fast for one token as memory is where it is an nn.Linear that nobody looks at.

    Not a class of its own: what replaces projections, by quantised ones say, looks for nn.Linear to the letter.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(projection) is not nn.Linear:
        return projection(x)
    # Accelerate puts a `forward` of its own in the place of the class's.
    watched = projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection)
    if watched or _global_forward_hooks or _global_forward_pre_hooks:
        return projection(x)
    return linear(x, projection.weight, projection.bias)


class RMSNorm(nn.RMSNorm):
    """RMSNorm of a residual stream that may be wider than the weights: computed in the stream's dtype, returned in the
    weights'."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm of what may be wider than the weights: computed and returned in its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class ShortConvolution(nn.Conv1d):
    """
    A causal depthwise convolution over the last `kernel_size` real tokens of each row's document:

        y_t = bias + sum_j weight[:, 0, j] * x_{t - kernel_size + 1 + j}

    Its parameters are nn.Conv1d's, (D, 1, k) and (D,), as checkpoints have them; its layout is the projections',
    (B, L, D), and its state the last k - 1 real inputs, zero before the first token of a document.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.kernel_size[0] - 1, self.in_channels

    def forward(
        self, x: Tensor, state: Tensor | None, mask: Tensor | None, reset: Tensor | None, silu: bool = False
    ) -> tuple[Tensor, Tensor]:
        """y and the new state, as `scan.convolution.short_convolution` has them."""
        taps_back = self.kernel_size[0] - 1
        state = carried_inputs(state, lambda: state_after(x, taps_back, mask, reset), mask, reset)
        return short_convolution(x, self.weight, self.bias, state, mask=mask, reset=reset, silu=silu)


class MLP(nn.Module):
    """Two projections with an activation between them, (B, L, hidden_size) -> (B, L, hidden_size)."""

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.down_proj, self.act_fn(project(self.up_proj, x)))


class RecurrentBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)) where the configuration has MLPs."""

    def __init__(self, config: RecurrentConfig, mixer: nn.Module):
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mixer = mixer
        self.has_mlp = config.intermediate_size > 0
        if self.has_mlp:
            self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: Tensor,
        state: State,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        **mixer_kwargs,
    ) -> tuple[Tensor, State]:
        """(B, L, hidden_size) -> the same, and the mixer's new state; see the contract at the top of this file."""
        mixed, new_state, *_ = self.mixer(self.mixer_norm(hidden_states), state, mask, reset, **mixer_kwargs)
        hidden_states = hidden_states + (self.dropout(mixed) if self.training else mixed)
        if self.has_mlp:
            added = self.mlp(self.mlp_norm(hidden_states))
            hidden_states = hidden_states + (self.dropout(added) if self.training else added)
        return hidden_states, new_state
