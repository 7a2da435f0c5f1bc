"""GateLoop (arXiv 2311.01927): linear recurrence with data-controlled, complex transitions.

    paper      code                                                         shape
    x_t        x, after the norm                                            (B, L, hidden_size)
    d_h        head_size = recurrent_size / num_heads; the paper's is 1     ("max-headed")
    q k v      the thirds of in_proj's rows, split into heads, all real     (B, L, heads, d_h)
    alpha_t    magnitude before f, the first half of transition_proj's rows (B, L, heads, d_h)
    beta_t     phase before g, the second half                              (B, L, heads, d_h)
    f, g       magnitude_activation, which keeps |a_t| to at most 1; phase_activation
    a_t        a = f(alpha_t) exp(i g(beta_t)), one for each row of h       (B, L, heads, d_h or 1)
    h_t        h = a_t h_{t-1} + k_t^T v_t, complex                         (B, L, heads, d_h, d_h)
    h_0        state["recurrent"]; at the start initial_state               (B, heads, d_h, d_h)
    y_t        Re(q_t h_t)                                                  (B, L, heads, d_h)
    A_tj       Re(q_t (a_{j+1} ... a_t) k_j), `output_attentions=True`      (B, heads, L, L)

The surrogate attention A is the same recurrence with one-hot values, v_j = e_j: what it then reads at t is the row A_t.
So nothing is divided by a product of transitions, and padding and documents mean in A what they mean in y.
"""

from typing import Literal

import torch
from huggingface_hub.dataclasses import strict, validated_field
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.output_capturing import OutputRecorder

from ..scan import gateloop_heads_scan, gateloop_scan
from ..scan.elementwise import silu_gate
from ..scan.gateloop import channel_loop
from ..transitions import MAGNITUDE_ACTIVATIONS, PHASE_ACTIVATIONS, polar
from .configuration import RecurrentConfig, at_least, kernel_size, positive
from .layers import LayerNorm, RecurrentBlock, ShortConvolution, State, new_initial_state, project, starting_states
from .model import RecurrentForCausalLM, RecurrentForSequenceClassification, RecurrentModel


@strict
class GateLoopConfig(RecurrentConfig):
    """
    Configuration of GateLoop: every field of `RecurrentConfig`, without convolution and expansion by default, and

    Args:
        num_heads: heads of the recurrence, which must divide `expansion * hidden_size`; None for as many as there are
            channels, each with a single number for its state (the paper's choice). Fewer heads have larger states: a
            head of d_h channels has d_h x d_h numbers.
        transition: how a_t comes from x_t. "polar" (the paper): a magnitude and a phase for each of a head's d_h rows,
            each from a linear map of its own, a = f(alpha) exp(i g(beta)). "cartesian" (the released package): one
            complex number c for the head, a = f(|c|) exp(i g(arg c)), so that with the sigmoid |a| is at least 1/2.
        complex_transition: False leaves the phase out (the paper's ablation): a = f(alpha), or with the sign of a real
            c, f(|c|) sgn(c). The state is then real.
        data_controlled: False for transitions that are parameters, the same for all tokens (as in S5, LRU and RetNet).
        magnitude_activation: f, "sigmoid" or "exponential", exp(-exp(.)).
        phase_activation: g, "identity" or "tanh", which keeps it within +-pi.
        use_gate: whether a swish gate, silu(W x), multiplies the output.
        use_sub_ln: whether a LayerNorm over all heads together comes before the gate.
        sub_ln_eps: its epsilon.
        post_norm: LayerNorms after each sum of the residual stream and none at its end, in place of RMSNorms before
            each mixer and MLP.
    """

    model_type = "gateloop"
    # WikiText-103 with GPT-2's vocabulary; Memory Horizon, whose vocab_size depends on the task's setting.
    presets = {
        "gateloop-wikitext103-125m": {"hidden_size": 624, "num_hidden_layers": 12, "mlp_ratio": 3},
        "gateloop-memory-horizon": {"hidden_size": 64, "num_hidden_layers": 4, "mlp_ratio": 2},
    }

    expansion: int | float = validated_field(positive, default=1)
    conv_kernel: int = validated_field(kernel_size, default=0)
    num_heads: int | None = validated_field(lambda heads: None if heads is None else at_least(1)(heads), default=None)
    transition: Literal["polar", "cartesian"] = "polar"
    complex_transition: bool = True
    data_controlled: bool = True
    magnitude_activation: Literal["sigmoid", "exponential"] = "sigmoid"
    phase_activation: Literal["identity", "tanh"] = "identity"
    use_gate: bool = True
    use_sub_ln: bool = False
    sub_ln_eps: int | float = validated_field(positive, default=1e-5)
    post_norm: bool = False

    def validate_heads(self):
        """The heads must share the channels evenly."""
        if self.num_heads is not None and self.recurrent_size % self.num_heads:
            raise ValueError(
                f"num_heads must divide expansion * hidden_size = {self.recurrent_size}, got {self.num_heads}"
            )


class GateLoopMixer(nn.Module):
    """(B, L, hidden_size) -> (B, L, hidden_size); the contract is in layers.py."""

    def __init__(self, config: GateLoopConfig):
        super().__init__()
        self.config = config
        size = config.recurrent_size
        self.num_heads = config.num_heads or size
        self.head_size = size // self.num_heads
        self.polar = config.transition == "polar"
        self.complex_state = config.complex_transition
        # What `gateloop_scan` has: no sign in place of a phase, no function of a cartesian one.
        cartesian = self.complex_state and config.phase_activation == "identity"
        self.is_fused = self.head_size == 1 and (self.polar or cartesian)
        self.state_shapes = {"recurrent": (self.num_heads, self.head_size, self.head_size)}
        self.initial_state = new_initial_state(config, self.state_shapes["recurrent"], self.complex_state)

        self.conv1d = None
        if config.conv_kernel:
            self.conv1d = ShortConvolution(config.hidden_size, config.conv_kernel, bias=config.use_conv_bias)
            self.state_shapes["conv"] = self.conv1d.state_shape
        self.in_proj = nn.Linear(config.hidden_size, 3 * size, bias=config.use_bias)
        # polar: [alpha | beta], each (heads, d_h); cartesian: (heads, 2), real and imaginary part
        transitions = (size if self.polar else self.num_heads) * (2 if self.complex_state else 1)
        self.transition_proj = self.transition = None
        if config.data_controlled:
            self.transition_proj = nn.Linear(config.hidden_size, transitions)
        else:
            self.transition = nn.Parameter(torch.empty(transitions))
        self.sub_ln = LayerNorm(size, eps=config.sub_ln_eps) if config.use_sub_ln else None
        # The paper's layer, which has a kernel of its own.
        self.is_channel_loop = self.head_size == 1 and self.polar and self.complex_state and config.data_controlled
        self.is_channel_loop = self.is_channel_loop and not config.use_sub_ln
        self.gate_proj = self.out_proj = None
        if config.use_gate:
            self.gate_proj = nn.Linear(config.hidden_size, size, bias=config.use_bias)
        if config.use_gate or size != config.hidden_size:
            self.out_proj = nn.Linear(size, config.hidden_size, bias=config.use_bias)

    def transition_inputs(self, x: Tensor) -> Tensor:
        """What the transitions are made of: a projection, (B, L, ...), or the parameter in its place, (1, 1, ...)."""
        # A copy: weights that were read from a file lie at any multiple of their own size, complex numbers may not.
        return self.transition[None, None].clone() if self.transition_proj is None else project(self.transition_proj, x)

    def transitions(self, given: Tensor, dtype: torch.dtype) -> Tensor:
        """a of `gateloop_heads_scan` in `dtype` or its complex counterpart, from `transition_inputs`."""
        # Looked up here: as attributes, functions without a name would keep the model from being pickled.
        magnitude = MAGNITUDE_ACTIVATIONS[self.config.magnitude_activation]
        phase = PHASE_ACTIVATIONS[self.config.phase_activation]
        given = given.to(dtype)
        if self.polar:
            given = given.unflatten(-1, (-1, self.num_heads, self.head_size))
            size = magnitude(given[:, :, 0])
            return polar(size, phase(given[:, :, 1])) if self.complex_state else size
        if not self.complex_state:
            return magnitude(given.abs()).copysign(given).unsqueeze(-1)
        c = torch.view_as_complex(given.unflatten(-1, (self.num_heads, 1, 2)))
        return polar(magnitude(c.abs()), phase(c.angle()))

    def _channels(
        self,
        qkv: Tensor,
        given: Tensor,
        before: Tensor | None,
        mask: Tensor | None,
        reset: Tensor | None,
        start: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """`gateloop_heads_scan` where each head is a channel, from the projections, by one kernel."""
        if self.complex_state:
            alpha, beta = given.chunk(2, dim=-1) if self.polar else (given[..., ::2], given[..., 1::2])
        else:
            alpha, beta = given, None
        y, final = gateloop_scan(
            *qkv.chunk(3, dim=-1),
            alpha,
            beta,
            before if before is None else before.flatten(1),
            transition=self.config.transition,
            magnitude=self.config.magnitude_activation,
            phase=self.config.phase_activation if self.complex_state else "identity",
            mask=mask,
            reset=reset,
            reset_state=start if start is None else start.flatten(),
        )
        return y, final[..., None, None]

    def forward(
        self,
        x: Tensor,
        state: State,
        mask: Tensor | None,
        reset: Tensor | None,
        output_attentions: bool | None = None,
    ) -> tuple[Tensor, State] | tuple[Tensor, State, Tensor]:
        """With `output_attentions` (the configuration's when None) also A, (B, heads, L, L): A times v is y, but for
        what `state`, or a learned one at the start of a document, brings into it."""
        new_state = {}
        if self.conv1d is not None:
            x, new_state["conv"] = self.conv1d(x, state.get("conv"), mask, reset)
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        qkv = project(self.in_proj, x)
        before, start = starting_states(self, state, x.shape[0])
        if self.is_channel_loop and not output_attentions:
            y, new_state["recurrent"] = self._channel_loop(x, qkv, before, mask, reset, start)
            return (y if self.out_proj is None else project(self.out_proj, y)), new_state

        given = self.transition_inputs(x)
        wide = torch.promote_types(qkv.dtype, torch.float32)
        if output_attentions or not self.is_fused:
            q, k, v = qkv.unflatten(-1, (3, self.num_heads, self.head_size)).unbind(2)
            a = self.transitions(given, wide)
        if self.is_fused:
            y, new_state["recurrent"] = self._channels(qkv, given, before, mask, reset, start)
        else:
            y, new_state["recurrent"] = gateloop_heads_scan(
                q, k, v, a, before, mask=mask, reset=reset, reset_state=start
            )
            y = y.flatten(2)
        if self.sub_ln is not None:
            y = self.sub_ln(y)
        y = y.to(qkv.dtype)
        if self.gate_proj is not None:
            y = silu_gate(y, project(self.gate_proj, x))
        if self.out_proj is not None:
            y = project(self.out_proj, y)
        if not output_attentions:
            return y, new_state
        one_hot = torch.eye(x.shape[1], dtype=wide, device=x.device)[None, :, None]
        one_hot = one_hot.expand(*k.shape[:3], -1)
        attentions, _ = gateloop_heads_scan(q.to(wide), k.to(wide), one_hot, a, mask=mask, reset=reset)
        return y, new_state, attentions.transpose(1, 2)

    def _channel_loop(self, x: Tensor, qkv: Tensor, state: Tensor | None, mask, reset, start) -> tuple[Tensor, Tensor]:
        """The gated y, (B, L, D), and the state after it."""
        y, state = channel_loop(
            qkv,
            project(self.transition_proj, x),
            None if self.gate_proj is None else project(self.gate_proj, x),
            self.config.magnitude_activation,
            self.config.phase_activation,
            None if state is None else state.flatten(1),
            mask=mask,
            reset=reset,
            reset_state=None if start is None else start.flatten(),
        )
        return y, state[..., None, None]


class GateLoopBlock(RecurrentBlock):
    """A `RecurrentBlock`, or with `config.post_norm` norm(x + mixer(x)), then norm(x + mlp(x))."""

    def __init__(self, config: GateLoopConfig, mixer: nn.Module):
        super().__init__(config, mixer)
        self.post_norm = config.post_norm
        if self.post_norm:
            self.mixer_norm = LayerNorm(config.hidden_size, eps=config.norm_eps)
            if self.has_mlp:
                self.mlp_norm = LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        state: State,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        **mixer_kwargs,
    ) -> tuple[Tensor, State]:
        if not self.post_norm:
            return super().forward(hidden_states, state, mask, reset, **mixer_kwargs)
        dtype = self.mixer_norm.weight.dtype  # of the weights, where the residual stream is wider
        mixed, new_state, *_ = self.mixer(hidden_states.to(dtype), state, mask, reset, **mixer_kwargs)
        hidden_states = self.mixer_norm(hidden_states + self.dropout(mixed))
        if self.has_mlp:
            hidden_states = self.mlp_norm(hidden_states + self.dropout(self.mlp(hidden_states.to(dtype))))
        return hidden_states, new_state


class GateLoopModel(RecurrentModel):
    """GateLoop without a head; see `RecurrentModel`. `output_attentions=True` returns each layer's A, (B, heads, L, L),
    of the tokens of this call."""

    config_class = GateLoopConfig
    mixer_class = GateLoopMixer
    block_class = GateLoopBlock
    mixer_kwargs = ("output_attentions",)
    recurrence_parameters = ("transition_proj", "transition")  # 1e-4 where the rest has 1.25e-4, for WikiText-103
    _can_record_outputs = {"hidden_states": RecurrentBlock, "attentions": OutputRecorder(GateLoopMixer, index=2)}

    def __init__(self, config: GateLoopConfig):
        super().__init__(config)
        if config.post_norm:
            self.norm = None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GateLoopMixer) and module.transition is not None:
            init.normal_(module.transition)  # as the projections of normalised inputs are, in the data-controlled form


class GateLoopForCausalLM(RecurrentForCausalLM):
    """GateLoop with a language-model head; see `RecurrentForCausalLM`."""

    config_class = GateLoopConfig
    model_class = GateLoopModel


class GateLoopForSequenceClassification(RecurrentForSequenceClassification):
    """GateLoop with a classifier on each row's last real token; see `RecurrentForSequenceClassification`."""

    config_class = GateLoopConfig
    model_class = GateLoopModel
