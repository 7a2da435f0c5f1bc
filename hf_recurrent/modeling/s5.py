"""S5 (arXiv 2208.04933): one linear state space model with many inputs and outputs, diagonal, under a gate.

    paper       code                                                         shape
    u           x, after the norm                                            (B, L, H)
    H           config.recurrent_size, by default hidden_size
    P           config.state_size; P' = P / 2 states are kept with conj_sym
    J           config.num_blocks, blocks of A at initialisation
    Lambda      Lambda_re + i Lambda_im, eigenvalues of A = HiPPO-N          (P',)
    B~ = V^-1 B B, its real and imaginary parts                              (P', H, 2)
    C~ = C V    C, or C1 and C2 of the forward and the backward scan         (H, P', 2)
    D           D, elementwise                                               (H,)
    Delta       step_rescale * exp(log_step), times the timesteps if given   (P', 1)
    Lambda-bar  a, of `discretize`; with timesteps inside `s5_scan`           (P',)
    B-bar       gain * B~, with the gain of `discretize`
    x_k         h: h_k = Lambda-bar h_{k-1} + B-bar u_k                      (B, L, P') complex
    y_k         2 Re(C~ h_k) + D u_k (no 2 without conj_sym)                 (B, L, H)

All products with B~ and C~ are products of real matrices. Parameters of the SSM have the names and shapes of the
authors' code (lindermanlab/S5). So have the defaults, but for the norm ("layer") and the final norm after the blocks.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict, validated_field
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple, is_tracing

from ..scan import linear_scan, s5_scan
from ..scan.cells import discretize
from ..scan.elementwise import gate, skip_gelu
from ..scan.s5 import drive, product, read
from ..scan.split import of_first
from .cache import RecurrentCache
from .configuration import RecurrentConfig, activation, at_least, kernel_size, not_negative, positive, probability
from .hippo import hippo_normal, lecun_normal
from .layers import MLP, LayerNorm, RecurrentBlock, ShortConvolution, State, new_initial_state, project, starting_states
from .model import (
    IGNORED,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentModel,
    RecurrentPreTrainedModel,
    classes_checked,
    fitting_labels,
    last_token,
    mean_token,
    taking,
)

# Sizes from the authors' run scripts and, for the last three, the paper's table 11. The pendulum's images go through a
# CNN in the paper, whose outputs can be passed as inputs_embeds; here a Linear reads their pixels.
_PAPER = {"norm": "batch", "norm_eps": 1e-5, "final_norm": False, "residual_in_fp32": False}
_LRA = {**_PAPER, "bidirectional": True, "num_hidden_layers": 6}
_IMAGE = {**_LRA, "hidden_size": 512, "state_size": 384, "num_blocks": 3, "c_init": "lecun_normal", "clip_eigs": True}


@strict
class S5Config(RecurrentConfig):
    """
    Configuration of S5: every field of `RecurrentConfig`, some with the paper's defaults (no convolution, no MLP,
    expansion 1, biases), and

    Args:
        input_size: width of the features that the model reads as `input_features`; None for token ids.
        input_projection: False for features that go to the first block as they are; they are hidden_size wide.
        state_size: P. With `conj_sym`, the states come in conjugate pairs of which one is kept.
        num_blocks: J, HiPPO-N blocks that the state matrix starts from. Each has state_size / num_blocks states: a
            whole number, and an even one with `conj_sym`.
        conj_sym: whether the states come in conjugate pairs.
        discretization: "zoh" or "bilinear".
        dt_min, dt_max: Delta is log-uniform between them at initialisation.
        step_rescale: Delta is multiplied by it: 2.0 where a model reads signals of half the sampling rate it was
            trained with. A call's `step_rescale` takes its place.
        c_init: how C starts: "trunc_standard_normal" (variance 1/P) or "lecun_normal" (1/(P H)), times the
            eigenvectors, or "complex_normal" (variance 1, without them).
        clip_eigs: keep the real parts of the eigenvalues at -1e-4 or below, so that no state ever grows. For
            generation and sequences much longer than those of training.
        bidirectional: a second scan from the end, with a C of its own. No states are carried between calls.
        activation: what follows the SSM, with g = GELU(y): "gelu" g, "half_glu1" g * sigmoid(W g), "half_glu2"
            y * sigmoid(W g), "full_glu" (V g) * sigmoid(W g).
        hidden_act: that GELU (and the MLP's), the authors' tanh approximation by default.
        hidden_dropout: dropout of whole channels, after the GELU, after the gate, and on what an MLP adds.
        norm: "layer", or "batch": statistics over all real positions of the batch, running ones in evaluation.
        batch_norm_momentum: share of a batch in the running statistics (the authors' bn_momentum is 1 minus it).
        prenorm: norm before each mixer and MLP; False: after the sum with the residual.
        normed_residual: what a mixer or an MLP adds is added to its normed input (s5-pytorch), which needs prenorm;
            False: to the input itself.
        mlp_type: "plain", act(W x); "glu", with a product of two projections, (V x) * act(W x); "linear", without the
            activation. s5-pytorch has the last two.
        final_norm: RMSNorm after the last block, which the paper's models lack.
        pooling: what classifiers read: "mean" of the real positions, or the "last" of them.
        use_bias: whether Linear layers have biases, the classifiers' always do.
    """

    model_type = "s5"
    presets = {
        "s5-lra-listops": {
            **_LRA, "vocab_size": 20, "num_labels": 10, "num_hidden_layers": 8, "hidden_size": 128, "state_size": 16,
            "num_blocks": 8, "c_init": "lecun_normal", "activation": "half_glu2",
        },
        "s5-lra-text": {
            **_LRA, "vocab_size": 135, "num_labels": 2, "hidden_size": 256, "state_size": 192, "num_blocks": 12,
            "c_init": "lecun_normal", "activation": "half_glu2", "hidden_dropout": 0.1,
        },
        # The authors count the characters of their data; 256 holds every byte.
        "s5-lra-retrieval": {
            **_LRA, "vocab_size": 256, "num_labels": 2, "hidden_size": 128, "state_size": 256, "num_blocks": 16,
        },
        "s5-lra-image": {**_IMAGE, "input_size": 1, "num_labels": 10, "hidden_dropout": 0.1},
        "s5-lra-pathfinder": {
            **_LRA, "input_size": 1, "num_labels": 2, "hidden_size": 192, "state_size": 256, "num_blocks": 8,
            "hidden_dropout": 0.05, "batch_norm_momentum": 0.1,
        },
        "s5-lra-pathx": {
            **_LRA, "input_size": 1, "num_labels": 2, "hidden_size": 128, "state_size": 256, "num_blocks": 16,
            "c_init": "complex_normal", "dt_min": 1e-4, "batch_norm_momentum": 0.1,
        },
        "s5-speech35": {
            **_LRA, "input_size": 1, "num_labels": 35, "hidden_size": 96, "state_size": 128, "num_blocks": 16,
            "c_init": "lecun_normal", "hidden_dropout": 0.1,
        },
        "s5-pendulum": {
            "input_size": 576, "num_labels": 2, "problem_type": "regression", "num_hidden_layers": 4, "hidden_size": 30,
            "state_size": 16, "num_blocks": 8, "activation": "half_glu2", "prenorm": False, "final_norm": False,
            "dt_min": 1e-2, "residual_in_fp32": False,
        },
        "s5-smnist": {
            **_PAPER, "input_size": 1, "num_labels": 10, "num_hidden_layers": 4, "hidden_size": 96, "state_size": 128,
            "num_blocks": 1, "hidden_dropout": 0.1,
        },
        "s5-psmnist": {
            **_PAPER, "input_size": 1, "num_labels": 10, "num_hidden_layers": 4, "hidden_size": 128, "state_size": 128,
            "num_blocks": 2, "hidden_dropout": 0.15,
        },
        "s5-scifar": {**_IMAGE, "input_size": 3, "num_labels": 10, "hidden_dropout": 0.1},
    }  # fmt: skip

    expansion: int | float = validated_field(positive, default=1)
    conv_kernel: int = validated_field(kernel_size, default=0)
    mlp_ratio: int | float = validated_field(not_negative, default=0)
    hidden_act: str = validated_field(activation, default="gelu_pytorch_tanh")
    use_bias: bool = True
    input_size: int | None = None
    input_projection: bool = True
    state_size: int = validated_field(at_least(1), default=256)
    num_blocks: int = validated_field(at_least(1), default=8)
    conj_sym: bool = True
    discretization: Literal["zoh", "bilinear"] = "zoh"
    dt_min: int | float = validated_field(positive, default=1e-3)
    dt_max: int | float = validated_field(positive, default=1e-1)
    step_rescale: int | float = validated_field(positive, default=1.0)
    c_init: Literal["trunc_standard_normal", "lecun_normal", "complex_normal"] = "trunc_standard_normal"
    clip_eigs: bool = False
    bidirectional: bool = False
    activation: Literal["gelu", "half_glu1", "half_glu2", "full_glu"] = "half_glu1"
    norm: Literal["layer", "batch"] = "layer"
    batch_norm_momentum: int | float = validated_field(probability, default=0.05)
    prenorm: bool = True
    normed_residual: bool = False
    mlp_type: Literal["plain", "glu", "linear"] = "plain"
    final_norm: bool = True
    pooling: Literal["mean", "last"] = "mean"

    def validate_state(self):
        """The blocks must divide the states (run by `validate`, at construction and on saving)."""
        if self.state_size % self.num_blocks:
            raise ValueError(
                f"num_blocks must divide state_size, got num_blocks={self.num_blocks}, state_size={self.state_size}"
            )
        if self.conj_sym and self.state_size // self.num_blocks % 2:
            raise ValueError(
                "conj_sym needs an even number of states in each block, got state_size / num_blocks = "
                f"{self.state_size} / {self.num_blocks} = {self.state_size // self.num_blocks}"
            )
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min must not be above dt_max, got dt_min={self.dt_min}, dt_max={self.dt_max}")
        if self.input_size is not None and self.input_size < 1:
            raise ValueError(f"input_size must be None or at least 1, got {self.input_size}")

    def validate_residual(self):
        """What is added to what must fit (run by `validate`, as the others)."""
        if not self.input_projection and self.input_size != self.hidden_size:
            raise ValueError(
                f"input_projection=False needs input_size = hidden_size = {self.hidden_size}, got {self.input_size}"
            )
        if self.normed_residual and not self.prenorm:
            raise ValueError("normed_residual=True needs prenorm=True, got prenorm=False")
        if self.mlp_type != "plain" and not self.intermediate_size:
            raise ValueError(f"mlp_type={self.mlp_type!r} needs an MLP: mlp_ratio above 0, got 0")


def _skip(y: Tensor, x: Tensor, d: Tensor) -> Tensor:
    return torch.addcmul(y, d, x)


class S5SSM(nn.Module):
    """The state space model alone, (B, L, H) -> (B, L, H)."""

    def __init__(self, config: S5Config):
        super().__init__()
        self.config = config
        width, self.states = config.recurrent_size, config.state_size // (2 if config.conj_sym else 1)
        self.Lambda_re = nn.Parameter(torch.empty(self.states))
        self.Lambda_im = nn.Parameter(torch.empty(self.states))
        self.B = nn.Parameter(torch.empty(self.states, width, 2))
        for name in ("C1", "C2") if config.bidirectional else ("C",):
            self.register_parameter(name, nn.Parameter(torch.empty(width, self.states, 2)))
        self.D = nn.Parameter(torch.empty(width))
        self.log_step = nn.Parameter(torch.empty(self.states, 1))

    def init_weights(self) -> None:
        """As the authors' code does; only what was not loaded."""
        config, width = self.config, self.D.shape[0]
        size = config.state_size // config.num_blocks
        eigenvalues, vectors = hippo_normal(size)
        kept = size // 2 if config.conj_sym else size
        eigenvalues, vectors = eigenvalues[:kept].repeat(config.num_blocks), vectors[:, :kept]
        init.copy_(self.Lambda_re, eigenvalues.real)
        init.copy_(self.Lambda_im, eigenvalues.imag)
        b = lecun_normal(config.num_blocks, size, width, fan_in=config.state_size).to(vectors.dtype)
        init.copy_(self.B, torch.view_as_real(vectors.mH @ b).view(self.B.shape))
        for c in (self.C1, self.C2) if config.bidirectional else (self.C,):
            if config.c_init == "complex_normal":
                init.normal_(c, std=math.sqrt(0.5))
                continue
            fan_in = config.state_size * (width if config.c_init == "lecun_normal" else 1)
            values = torch.view_as_complex(lecun_normal(width, config.num_blocks, size, 2, fan_in=fan_in))
            init.copy_(c, torch.view_as_real(values @ vectors).view(c.shape))
        init.normal_(self.D)
        init.uniform_(self.log_step, math.log(config.dt_min), math.log(config.dt_max))

    @property
    def poles(self) -> tuple[Tensor, Tensor]:
        """Real and imaginary part of Lambda, (P',) each."""
        return self.Lambda_re.clamp(max=-1e-4) if self.config.clip_eigs else self.Lambda_re, self.Lambda_im

    def discretize(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            step: Delta, (..., P').

        Returns:
            Lambda-bar and the gain of B-bar = gain * B~, (..., P') complex: by zero-order hold (section 3.2 of the
            paper) or the bilinear transform.
        """
        poles = torch.complex(*(part.to(step.dtype) for part in self.poles))
        return discretize(poles, step, self.config.discretization == "bilinear")

    def forward(
        self,
        x: Tensor,
        state: Tensor | None,
        mask: Tensor | None,
        reset: Tensor | None,
        step_rescale: float | None = None,
        timesteps: Tensor | None = None,
        skip: Callable[[Tensor, Tensor, Tensor], Tensor] = _skip,
        reset_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            x: (B, L, H).
            state: (B, P') complex; none with `bidirectional`.
            mask, reset: as for every mixer (layers.py).
            step_rescale: in place of the configuration's.
            timesteps: (B, L), the time from the sample before to this one, in units of Delta. The backward scan takes
                the time to the next sample, 1 at the end, as the authors' code does.
            skip: (C h, x, D) -> y, for a caller that fuses what follows with C h + D x.
            reset_state: what a document starts from, (P',) complex; zero when None.

        Returns:
            y, (B, L, H), and the state after the last real position, None with `bidirectional`.
        """
        step_rescale = self.config.step_rescale if step_rescale is None else step_rescale
        log_step = self.log_step[:, 0]
        bidirectional = self.config.bidirectional
        if timesteps is None:
            is_bilinear = self.config.discretization == "bilinear"
            scan = linear_scan
            inputs = backward_inputs = drive(x, self.B, *self.poles, log_step, step_rescale, is_bilinear)
        else:
            dtype = torch.promote_types(x.dtype, torch.float32)
            step = step_rescale * log_step.to(dtype).exp()
            rate = torch.complex(*(part.to(dtype) * step for part in self.poles))
            # Time in units of Delta, by which u is multiplied here: B is smaller than what it drives.
            driven = product(x, step[:, None, None] * self.B.to(dtype))
            times = timesteps.to(dtype)
            if mask is not None:
                times = times.masked_fill(~mask, 1)
            scan = functools.partial(s5_scan, discretization=self.config.discretization)
            inputs = driven, rate, times
            backward_inputs = (driven, rate, _times_to_next(times, mask, reset)) if bidirectional else ()
        scale = 2.0 if self.config.conj_sym else 1.0
        h, final = scan(*inputs, state, mask=mask, reset=reset, reset_state=reset_state)
        if not bidirectional:
            return skip(read(h, self.C, scale, x.dtype), x, self.D), final
        backward, _ = scan(*backward_inputs, mask=mask, reset=reset, reverse=True)
        y = read(h, self.C1, scale, x.dtype) + read(backward, self.C2, scale, x.dtype)
        return skip(y, x, self.D), None


def _times_to_next(times: Tensor, mask: Tensor | None, reset: Tensor | None) -> Tensor:
    """From the times since the real sample before, (B, L), those to the real sample after, 1 at the end of a
    document."""
    batch, length = times.shape
    columns = torch.arange(length, device=times.device).expand(batch, -1)
    if mask is not None:
        columns = torch.where(mask, columns, length)
    # The first real column after each; behind the last one there is `length`.
    after = F.pad(columns[:, 1:], (0, 1), value=length).flip(1).cummin(1).values.flip(1)
    to_next = times if reset is None else times.masked_fill(reset, 1)
    return F.pad(to_next, (0, 1), value=1).gather(1, after)


class ChannelDropout(nn.Dropout):
    """Dropout of whole channels: (B, L, D) with one draw per row and channel."""

    def scale(self, x: Tensor) -> Tensor | None:
        """What `forward` multiplies x by, (B, 1, D); None where that is 1."""
        if not self.training or not self.p:
            return None
        return of_first(super().forward(x.new_ones(x.shape[0], 1, x.shape[2])))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x)
        return x if scale is None else x * scale


class S5BatchNorm(nn.Module):
    """
    Batch norm over the real positions of all rows. As flax has it, the running variance is the biased one.

    Each forward pass in training updates the running statistics, with gradient checkpointing also the repeated one.
    Under data parallelism each process normalises by its own rows. DDP gives the first process's running statistics to
    the others before each step, so that only its rows count in them. Under FSDP2 each process keeps its own: the model
    that is saved has the first one's, a sharded checkpoint those of any one.
    """

    def __init__(self, channels: int, eps: float, momentum: float):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)  # of the statistics too: sums may leave float16's range
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        if self.training and mask is None:
            y, mean, inverse = torch.native_batch_norm(x.flatten(0, 1), weight, bias, None, None, True, 0.0, self.eps)
            self._track(mean, inverse**-2 - self.eps, self.momentum)
            return y.view_as(x)
        mean, variance = self.running_mean.to(dtype), self.running_var.to(dtype)
        if self.training:
            count = mask.sum().clamp(min=1)
            mean = torch.where(mask[..., None], x, 0).sum((0, 1), dtype=dtype) / count
            variance = torch.where(mask[..., None], x - mean, 0).square().sum((0, 1)) / count
            # A batch of padding has no statistics.
            self._track(mean, variance, self.momentum * mask.any().to(self.running_mean.dtype))
        scale = torch.rsqrt(variance + self.eps) * weight
        return torch.addcmul(bias - mean * scale, x.to(dtype), scale).to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, share: float | Tensor) -> None:
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def _norm(config: S5Config) -> nn.Module:
    if config.norm == "batch":
        return S5BatchNorm(config.hidden_size, config.norm_eps, config.batch_norm_momentum)
    return LayerNorm(config.hidden_size, eps=config.norm_eps)


class S5Mixer(nn.Module):
    """The SSM and the activation after it, (B, L, hidden_size) -> (B, L, hidden_size); the contract is in layers.py."""

    complex_state = True

    def __init__(self, config: S5Config):
        super().__init__()
        inner, width, bias = config.recurrent_size, config.hidden_size, config.use_bias
        self.activation = config.activation
        self.state_shapes = {}
        self.conv1d = self.in_proj = self.out_proj = self.out1 = self.out2 = None
        if config.conv_kernel:
            self.conv1d = ShortConvolution(width, config.conv_kernel, bias=config.use_conv_bias)
            self.state_shapes["conv"] = self.conv1d.state_shape
        if inner != width:
            self.in_proj = nn.Linear(width, inner, bias=bias)
            self.out_proj = nn.Linear(inner, width, bias=bias)
        self.ssm = S5SSM(config)
        if not config.bidirectional:
            self.state_shapes["recurrent"] = (self.ssm.states,)
        self.initial_state = new_initial_state(config, (self.ssm.states,), is_complex=True)
        self.act_fn = ACT2FN[config.hidden_act]
        self.gelu_is_fused = config.hidden_act == "gelu_pytorch_tanh"
        if config.activation == "full_glu":
            self.out1 = nn.Linear(inner, inner, bias=bias)
        if config.activation != "gelu":
            self.out2 = nn.Linear(inner, inner, bias=bias)
        self.dropout = ChannelDropout(config.hidden_dropout)

    def forward(
        self, x: Tensor, state: State, mask: Tensor | None, reset: Tensor | None, **steps
    ) -> tuple[Tensor, State]:
        """`steps`: step_rescale and timesteps, see `S5SSM.forward`."""
        new_state = {}
        if self.conv1d is not None:
            x, new_state["conv"] = self.conv1d(x, state.get("conv"), mask, reset)
        if self.in_proj is not None:
            x = project(self.in_proj, x)
        # One tensor after the SSM in place of four, where nothing but its GELU is needed and that is the default one.
        fused = self.activation != "half_glu2" and self.gelu_is_fused
        skip = (lambda y, x, d: skip_gelu(y, x, d, self.dropout.scale(x))) if fused else _skip
        before, start = starting_states(self, state, x.shape[0])
        y, final_state = self.ssm(x, before, mask, reset, **steps, skip=skip, reset_state=start)
        if final_state is not None:
            new_state["recurrent"] = final_state
        g = y if fused else self.dropout(self.act_fn(y))
        if self.activation == "gelu":
            y = g
        else:
            value = y if self.activation == "half_glu2" else g if self.out1 is None else project(self.out1, g)
            y = gate(value, project(self.out2, g), self.dropout.scale(g))
        return y if self.out_proj is None else project(self.out_proj, y), new_state


class S5MLP(MLP):
    """The MLP of the configuration's `mlp_type`; the rows of up_proj are [V, W] for "glu"."""

    def __init__(self, config: S5Config):
        super().__init__(config)
        self.gated = config.mlp_type == "glu"
        if self.gated:
            self.up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        elif config.mlp_type == "linear":
            self.act_fn = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return super().forward(x)
        value, gated = project(self.up_proj, x).chunk(2, dim=-1)
        return project(self.down_proj, value * self.act_fn(gated))


class S5Block(RecurrentBlock):
    """A `RecurrentBlock` with the norm of the configuration, before each part or after the sum."""

    def __init__(self, config: S5Config, mixer: S5Mixer):
        super().__init__(config, mixer)
        self.prenorm, self.normed_residual = config.prenorm, config.normed_residual
        self.mixer_norm = _norm(config)
        self.dropout = ChannelDropout(config.hidden_dropout)
        if self.has_mlp:
            self.mlp_norm = _norm(config)
            self.mlp = S5MLP(config)

    def forward(
        self, hidden_states: Tensor, state: State, mask: Tensor | None = None, reset: Tensor | None = None, **steps
    ) -> tuple[Tensor, State]:
        x = self._before(self.mixer_norm, hidden_states, mask)
        mixed, new_state = self.mixer(x, state, mask, reset, **steps)  # the mixer has its own dropout
        residual = x if self.normed_residual else hidden_states
        hidden_states = self._after(self.mixer_norm, residual + mixed, mask)
        if self.has_mlp:
            x = self._before(self.mlp_norm, hidden_states, mask)
            residual = x if self.normed_residual else hidden_states
            hidden_states = self._after(self.mlp_norm, residual + self.dropout(self.mlp(x)), mask)
        return hidden_states, new_state

    def _before(self, norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        return (self._normalise(norm, x, mask) if self.prenorm else x).to(norm.weight.dtype)

    def _after(self, norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if self.prenorm else self._normalise(norm, x, mask)

    def _normalise(self, norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
        return norm(x, mask) if isinstance(norm, S5BatchNorm) else norm(x)


class S5PreTrainedModel(RecurrentPreTrainedModel):
    """Initialisation and pooling, for the model and its heads."""

    config_class = S5Config

    def __init__(self, config: S5Config):
        super().__init__(config)
        if config.input_size is not None:
            self.main_input_name = "input_features"
            self._input_embed_layer = "embed_features"  # what get_input_embeddings returns

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The SSM by HiPPO-N and the authors' distributions (`S5SSM.init_weights`), the rest as every family's."""
        super()._init_weights(module)
        if isinstance(module, S5SSM):
            module.init_weights()
        elif isinstance(module, S5BatchNorm):
            for x, value in ((module.weight, 1), (module.bias, 0), (module.running_mean, 0), (module.running_var, 1)):
                init.constant_(x, value)

    def pool(self, hidden_states: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """(B, L, D) -> (B, D): what classifiers read, by `config.pooling`."""
        if self.config.pooling == "last":
            return last_token(hidden_states, input_ids, attention_mask, self.config.pad_token_id)
        return mean_token(hidden_states, attention_mask)


class S5Model(S5PreTrainedModel, RecurrentModel):
    """S5 without a head; see `RecurrentModel`."""

    mixer_class = S5Mixer
    block_class = S5Block
    mixer_kwargs = ("step_rescale", "timesteps")
    # The authors' "standard" setting; it names "norm" too, but compares with names of parameters, which no norm has.
    undecayed_parameters = recurrence_parameters = ("Lambda_re", "Lambda_im", "B", "log_step")
    float32_weights = True  # bfloat16 has three digits for poles that lie at the edge of stability

    def __init__(self, config: S5Config):
        super().__init__(config)
        self.dropout = nn.Identity()  # whole channels are dropped, and inside the blocks only
        if config.input_size is not None:
            self.embed_tokens = None
            self.embed_features = nn.Identity()
            if config.input_projection:
                self.embed_features = nn.Linear(config.input_size, config.hidden_size, bias=config.use_bias)
        if not config.final_norm:
            self.norm = None
        self.post_init()  # again, for embed_features

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        input_features: Tensor | None = None,
        timesteps: Tensor | None = None,
        step_rescale: float | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_features: (B, L, input_size) floats, in place of `input_ids` with an input_size in the configuration.
            timesteps: (B, L), above 0: the time from the sample before to this one in units of the model's step, for
                irregular samples. Values at padding do not matter.
            step_rescale: in place of the configuration's, above 0.
            The others: see `RecurrentModel.forward`.

        Returns:
            What `RecurrentModel.forward` returns.

        Raises:
            What `RecurrentModel.forward` raises; ValueError for features where token ids are expected and the reverse,
            for steps that are not above 0, and for a cache in a bidirectional model.
        """
        if self.config.bidirectional:
            self._refuse_cache(past_key_values, use_cache)
            use_cache = False
        if input_features is not None:
            if input_ids is not None or inputs_embeds is not None:
                raise ValueError("You must specify exactly one of input_ids, inputs_embeds or input_features")
            inputs_embeds = self._embed_features(input_features)
        elif input_ids is not None and self.config.input_size is not None:
            raise ValueError(
                f"this model reads features (input_size={self.config.input_size}): pass input_features, not input_ids"
            )
        if step_rescale is not None and not 0 < step_rescale < math.inf:
            raise ValueError(f"step_rescale must be a finite number above 0, got {step_rescale}")
        given = input_ids if inputs_embeds is None else inputs_embeds
        if timesteps is not None and given is not None:
            _check_timesteps(timesteps, tuple(given.shape[:2]), attention_mask)
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            step_rescale=step_rescale,
            timesteps=timesteps,
            **kwargs,
        )

    def _embed_features(self, features: Tensor) -> Tensor:
        size = self.config.input_size
        if size is None:
            raise ValueError("this model reads token ids (input_size=None): pass input_ids, not input_features")
        if features.ndim != 3 or features.shape[-1] != size or not features.is_floating_point():
            raise ValueError(
                f"input_features must be floats of the shape (batch, length, {size}), "
                f"got {features.dtype} of the shape {tuple(features.shape)}"
            )
        if features.numel() == 0:
            raise ValueError(f"input_features is empty, with the shape {tuple(features.shape)}")
        return self.embed_features(features.to(self.dtype))


def _check_timesteps(timesteps: Tensor, shape: tuple[int, int], attention_mask: Tensor | None) -> None:
    if timesteps.shape != shape:
        raise ValueError(f"timesteps must have the shape {shape}, got {tuple(timesteps.shape)}")
    if is_tracing(timesteps):
        return
    bad = ~((timesteps > 0) & timesteps.isfinite())
    if attention_mask is not None and attention_mask.shape[0] == shape[0]:
        bad = bad & (attention_mask[:, -shape[1] :] != 0)
    if bad.any():
        raise ValueError(f"timesteps must be finite and above 0, got {timesteps[bad][0].item()}")


class S5ForCausalLM(S5PreTrainedModel, RecurrentForCausalLM):
    """
    S5 with a language-model head; see `RecurrentForCausalLM`, and `S5Model` for the steps. `generate` takes
    `step_rescale` too.

    Raises:
        ValueError: a configuration that is bidirectional or reads features.
    """

    model_class = S5Model

    def __init__(self, config: S5Config):
        if isinstance(config, S5Config) and (config.bidirectional or config.input_size is not None):
            raise ValueError(
                "a language model reads token ids from left to right: S5ForCausalLM needs bidirectional=False and "
                f"input_size=None, got bidirectional={config.bidirectional}, input_size={config.input_size}"
            )
        super().__init__(config)

    forward = taking(RecurrentForCausalLM.forward, timesteps=Tensor | None, step_rescale=float | None)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args) -> None:
        """As `RecurrentForCausalLM` has it, and the place where `generate` shows what it will pass on."""
        if model_kwargs.get("timesteps") is not None:
            raise ValueError(
                "generate takes no timesteps, which tokens to come do not have: call the model with the prompt and its "
                "timesteps, and generate from the past_key_values that it returns"
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)


class S5ForSequenceClassification(S5PreTrainedModel, RecurrentForSequenceClassification):
    """
    S5 with a linear classifier on the mean of the real positions, or the last of them (`config.pooling`);
    classification, multi-label classification or regression by `config.problem_type`. The mean is that of the positions
    that `attention_mask` marks as real, without one of all in this call. See `RecurrentForSequenceClassification`; the
    other inputs are those of `S5Model.forward`.
    """

    model_class = S5Model
    score_bias = True
    forward = taking(
        RecurrentForSequenceClassification.forward,
        input_features=Tensor | None,
        timesteps=Tensor | None,
        step_rescale=float | None,
    )


class S5ForTokenClassification(S5PreTrainedModel):
    """S5 with a linear layer on every position; classification, multi-label classification or regression."""

    accepts_loss_kwargs = False  # as in RecurrentForSequenceClassification

    def __init__(self, config: S5Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = S5Model(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        input_features: Tensor | None = None,
        timesteps: Tensor | None = None,
        step_rescale: float | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """
        Args:
            labels: (B, L) class indices, -100 where there is none; or numbers, (B, L, num_labels), or (B, L) for one,
                for "regression" (the default with one label) and "multi_label_classification". Padding is left out.
            The others: as in `S5Model.forward`.

        Returns:
            loss with `labels`, logits, (B, L, num_labels), and hidden_states.

        Raises:
            What `S5Model.forward` raises; ValueError, TypeError or IndexError for labels that do not fit.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds=inputs_embeds,
            input_features=input_features,
            timesteps=timesteps,
            step_rescale=step_rescale,
            **self.without_cache(kwargs),
        )
        logits = self.score(outputs.last_hidden_state)
        loss = None if labels is None else self._loss(logits, labels, attention_mask)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)

    def _loss(self, logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        problem, labels = fitting_labels(self.config, logits, labels)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        real = torch.ones_like(logits[..., 0], dtype=torch.bool)
        if attention_mask is not None:  # for the tokens of this call, or for all so far
            real = attention_mask[:, -logits.shape[1] :] != 0
        if problem == "single_label_classification":
            targets = labels.masked_fill(~real, IGNORED)
            return classes_checked(
                lambda: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
                "labels", targets, self.num_labels,
            )  # fmt: skip
        loss = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        return loss(logits[real], labels[real])


class S5ForDocumentMatching(S5PreTrainedModel):
    """
    Whether two documents belong together: both go through one S5, and an MLP reads [X1, X2, X1 - X2, X1 * X2] of their
    pooled outputs. That is the order of the authors' code and so of its checkpoints; the paper prints the last two the
    other way round.
    """

    accepts_loss_kwargs = False

    def __init__(self, config: S5Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"
        self.model = S5Model(config)
        self.dense = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        input_features: Tensor | None = None,
        timesteps: Tensor | None = None,
        step_rescale: float | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids, attention_mask, timesteps: (B, 2, L), the two documents of each pair side by side.
            inputs_embeds, input_features: (B, 2, L, width).
            labels: (B,), as for sequence classification.
            step_rescale, kwargs: as in `S5Model.forward`.

        Returns:
            loss with `labels`; logits, (B, num_labels); hidden_states, of 2 B rows.

        Raises:
            What `S5Model.forward` raises; ValueError for inputs that do not come in pairs.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "inputs_embeds": inputs_embeds,
            "input_features": input_features,
            "timesteps": timesteps,
        }
        for name, x in inputs.items():
            if x is not None:
                if x.ndim < 3 or x.shape[1] != 2:
                    raise ValueError(f"{name} must hold pairs, with the shape (batch, 2, ...), got {tuple(x.shape)}")
                inputs[name] = x.flatten(0, 1)
        outputs = self.model(**inputs, step_rescale=step_rescale, **self.without_cache(kwargs))
        pooled = self.pool(outputs.last_hidden_state, inputs["input_ids"], inputs["attention_mask"])
        first, second = pooled.unflatten(0, (-1, 2)).unbind(1)
        features = torch.cat([first, second, first - second, first * second], dim=-1)
        logits = self.score(self.act_fn(self.dense(features)))
        loss = None
        if labels is not None:
            loss = self.classification_loss(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
