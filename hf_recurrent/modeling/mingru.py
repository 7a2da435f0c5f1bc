"""minGRU (arXiv 2410.01201, section 3.1 and appendix B): a GRU whose gates do not see the state.

    paper      code                                            shape
    x_t        x, after the norm and the short convolution     (B, L, hidden_size)
    d_h        config.recurrent_size = expansion * hidden_size
    W_h x_t    hidden, the first half of in_proj's rows        (B, L, recurrent_size)
    W_z x_t    gate, the second half                           (B, L, recurrent_size)
    z_t        sigmoid(gate), inside mingru_scan
    h~_t       the candidate: hidden, or g(hidden)             candidate="vanilla" or "positive"
    g(u)       u + 0.5 for u >= 0, sigmoid(u) below            appendix B.2.1
    h_t        h = (1 - z_t) h_{t-1} + z_t h~_t                (B, L, recurrent_size)
    h_0        state["recurrent"]; at the start initial_state  (B, recurrent_size)

The paper runs its second variant in log-space, so that a product of many gates does not underflow; g is there to keep
h positive, as a logarithm needs. Here the recurrence runs directly, with its state in float32, and g stays.
"""

from typing import Literal

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from ..scan import mingru_scan
from .configuration import RecurrentConfig
from .layers import RecurrentBlock, RMSNorm, ShortConvolution, State, new_initial_state, project, starting_states
from .model import RecurrentForCausalLM, RecurrentForSequenceClassification, RecurrentModel


@strict
class MinGRUConfig(RecurrentConfig):
    """
    Configuration of minGRU: every field of `RecurrentConfig`, and

    Args:
        candidate: "positive" (the paper's log-space variant, its choice for language) or "vanilla".
        conv_residual: the convolution, followed by a projection of its own, is a residual branch without a norm, before
            that of the recurrence (the released package); False: it is part of the latter, between norm and recurrence.
    """

    model_type = "mingru"
    # The paper's language model of Shakespeare's characters, and its model of Selective Copying.
    presets = {
        "mingru-shakespeare": {
            "vocab_size": 65, "hidden_size": 384, "num_hidden_layers": 3, "hidden_dropout": 0.2,
        },
        "mingru-selective-copying": {
            "vocab_size": 16, "hidden_size": 64, "num_hidden_layers": 3, "expansion": 6, "conv_kernel": 0,
            "mlp_ratio": 0, "hidden_dropout": 0.1,
        },
    }  # fmt: skip

    candidate: Literal["positive", "vanilla"] = "positive"
    conv_residual: bool = False

    def validate_convolution(self):
        """There must be a convolution where it has a branch (run by `validate`, at construction and on saving)."""
        if self.conv_residual and not self.conv_kernel:
            raise ValueError("conv_residual=True needs a convolution: conv_kernel of at least 2, got 0")


class MinGRUMixer(nn.Module):
    """(B, L, hidden_size) -> (B, L, hidden_size); the contract is in layers.py. With `conv_residual` it reads the
    residual stream as it is, and has the norm of the recurrence inside."""

    scan = staticmethod(mingru_scan)
    num_inputs = 2  # of the scan: hidden, gate
    complex_state = False

    def __init__(self, config: MinGRUConfig):
        super().__init__()
        self.positive = config.candidate == "positive"
        self.state_shapes = {"recurrent": (config.recurrent_size,)}
        self.initial_state = new_initial_state(config, self.state_shapes["recurrent"])
        self.conv1d = self.conv_proj = self.norm = None
        if config.conv_kernel:
            self.conv1d = ShortConvolution(config.hidden_size, config.conv_kernel, bias=config.use_conv_bias)
            self.state_shapes["conv"] = self.conv1d.state_shape
        if config.conv_residual:
            self.conv_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.use_conv_bias)
            self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.in_proj = nn.Linear(config.hidden_size, self.num_inputs * config.recurrent_size, bias=config.use_bias)
        self.out_proj = None
        if config.recurrent_size != config.hidden_size:
            self.out_proj = nn.Linear(config.recurrent_size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor, state: State, mask: Tensor | None, reset: Tensor | None) -> tuple[Tensor, State]:
        new_state, branch = {}, None
        if self.conv1d is not None:
            u = x if self.conv_proj is None else x.to(self.conv1d.weight.dtype)
            u, new_state["conv"] = self.conv1d(u, state.get("conv"), mask, reset)
            if self.conv_proj is None:
                x = u
            else:
                branch = project(self.conv_proj, u)
                x = self.norm(x + branch)
        inputs = project(self.in_proj, x).chunk(self.num_inputs, dim=-1)
        before, start = starting_states(self, state, x.shape[0])
        h, new_state["recurrent"] = self.scan(
            *inputs, before, positive=self.positive, mask=mask, reset=reset, reset_state=start
        )
        y = h if self.out_proj is None else project(self.out_proj, h)
        return y if branch is None else branch + y, new_state


class MinGRUBlock(RecurrentBlock):
    """A `RecurrentBlock`; with `conv_residual` its mixer has the first norm."""

    def __init__(self, config: MinGRUConfig, mixer: MinGRUMixer):
        super().__init__(config, mixer)
        if config.conv_residual:
            self.mixer_norm = nn.Identity()


class MinGRUModel(RecurrentModel):
    """minGRU without a head; see `RecurrentModel`."""

    config_class = MinGRUConfig
    mixer_class = MinGRUMixer
    block_class = MinGRUBlock


class MinGRUForCausalLM(RecurrentForCausalLM):
    """minGRU with a language-model head; see `RecurrentForCausalLM`."""

    config_class = MinGRUConfig
    model_class = MinGRUModel


class MinGRUForSequenceClassification(RecurrentForSequenceClassification):
    """minGRU with a classifier on each row's last real token; see `RecurrentForSequenceClassification`."""

    config_class = MinGRUConfig
    model_class = MinGRUModel
