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
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_tracing

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


class RMSNorm(nn.RMSNorm):
    """RMSNorm of a residual stream that may be wider than the weights: computed in the stream's dtype, returned in the
    weights'."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)


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
        self, x: Tensor, state: Tensor | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: (B, L, D).
            state: (B, k - 1, D), zeros when None.
            mask: (B, L) bool, False at padding: no tap lands on it, and it changes no state.
            reset: (B, L) bool, True at the first token of a document: no tap reaches over it.

        Returns:
            y, (B, L, D), and the new state, (B, k - 1, D).
        """
        length, (taps_back, channels) = x.shape[1], self.state_shape
        state = carried_inputs(state, lambda: self._last_inputs(x, mask, reset), mask, reset)
        if state is None:
            state = x.new_zeros(len(x), taps_back, channels)
        inputs = torch.cat([state.to(x.dtype), x], dim=1)  # (B, k - 1 + L, D)
        if mask is None and reset is None:
            y = self._weigh(inputs)[:, None] if length == 1 else self._convolve(inputs)
            # A copy: the state would otherwise keep the whole of `inputs` alive.
            return y, inputs[:, length:].clone()

        taps, keep = self._taps(x, mask, reset)
        rows = torch.arange(len(x), device=x.device)
        last = self._gather(inputs, rows[:, None], taps[:, -1], keep[:, -1])  # (B, k, D)
        taps, keep = taps[:, :-1], keep[:, :-1]
        if is_tracing(x):
            y = self._weigh(self._gather(inputs, rows[:, None, None], taps, keep))
        else:
            # Nearly all tokens have their taps right before them and in their document; the others are done over.
            contiguous = torch.arange(length, device=x.device)[:, None] + torch.arange(taps_back + 1, device=x.device)
            apart = ((taps != contiguous) | ~keep).any(-1)
            at = (apart if mask is None else apart & mask).nonzero(as_tuple=True)
            y = self._convolve(inputs)
            done_over = self._weigh(self._gather(inputs, at[0][:, None], taps[at], keep[at]))
            y = y.index_put(at, done_over.to(y.dtype))
        return y, last[:, 1:]

    def _last_inputs(self, x: Tensor, mask: Tensor | None, reset: Tensor | None) -> Tensor:
        """The state after x alone, (B, k - 1, D)."""
        taps_back, channels = self.state_shape
        inputs = torch.cat([x.new_zeros(len(x), taps_back, channels), x], dim=1)
        if mask is None and reset is None:
            return inputs[:, x.shape[1] :]
        taps, keep = self._taps(x, mask, reset)
        rows = torch.arange(len(x), device=x.device)
        return self._gather(inputs, rows[:, None], taps[:, -1], keep[:, -1])[:, 1:]

    def _taps(self, x: Tensor, mask: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where the taps of each token lie in [state, x], (B, L + 1, k) in the order of the weights, and which of them
        lie in the token's own document; the last entry is the token that would come next, less its own tap."""
        batch, length, taps_back = len(x), x.shape[1], self.state_shape[0]
        size = taps_back + length
        position = torch.arange(size, device=x.device).expand(batch, -1)
        real = position.new_ones(batch, size, dtype=torch.bool)
        if mask is not None:
            real = torch.cat([real[:, :taps_back], mask], dim=1)
        # order[n] is the position of the n-th real input, rank[p] the n of position p (or of the last real one before)
        rank = real.cumsum(1) - 1
        order = torch.zeros(batch, size + 1, dtype=torch.long, device=x.device)
        order = order.scatter(1, torch.where(real, rank, size), position)
        rank = torch.cat([rank[:, taps_back:], rank[:, -1:]], dim=1)  # (B, L + 1)
        # Below 0 only at padding before the first real token, where any tap will do.
        nth = (rank[:, :, None] - torch.arange(taps_back, -1, -1, device=x.device)).clamp(min=0)
        taps = order.gather(1, nth.flatten(1)).view_as(nth)
        if reset is None:
            return taps, torch.ones_like(taps, dtype=torch.bool)
        if mask is not None:
            reset = reset & mask
        document = torch.cat([reset.new_zeros(batch, taps_back), reset], dim=1).cumsum(1)
        own = torch.cat([document[:, taps_back:], document[:, -1:]], dim=1)
        return taps, document.gather(1, taps.flatten(1)).view_as(taps) == own[:, :, None]

    @staticmethod
    def _gather(inputs: Tensor, rows: Tensor, taps: Tensor, keep: Tensor) -> Tensor:
        """The inputs (..., k, D) under the taps (..., k), zero where they are not kept."""
        return torch.where(keep[..., None], inputs[rows, taps], 0)

    def _weigh(self, windows: Tensor) -> Tensor:
        """(..., k, D) -> (..., D): the convolution at chosen positions."""
        y = (windows * self.weight.squeeze(1).T).sum(-2)
        return y if self.bias is None else y + self.bias

    def _convolve(self, inputs: Tensor) -> Tensor:
        """(B, k - 1 + L, D) -> (B, L, D). As a convolution of images one pixel high whose channels come last in
        memory, which is what `inputs` is already: conv1d would transpose it."""
        image, weight = inputs.transpose(1, 2).unsqueeze(2), self.weight.unsqueeze(2)
        weight = weight.contiguous(memory_format=torch.channels_last)
        return F.conv2d(image, weight, self.bias, groups=self.groups).squeeze(2).transpose(1, 2)


class MLP(nn.Module):
    """Two projections with an activation between them, (B, L, hidden_size) -> (B, L, hidden_size)."""

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


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
        hidden_states = hidden_states + self.dropout(mixed)
        if self.has_mlp:
            hidden_states = hidden_states + self.dropout(self.mlp(self.mlp_norm(hidden_states)))
        return hidden_states, new_state
