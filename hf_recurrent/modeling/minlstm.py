"""minLSTM (arXiv 2410.01201, section 3.2 and appendix B): an LSTM whose gates do not see the state.

    paper      code                                            shape
    x_t        x, after the short convolution                  (B, L, hidden_size)
    d_h        config.recurrent_size = expansion * hidden_size
    W_h x_t    hidden, the first third of in_proj's rows       (B, L, recurrent_size)
    W_f x_t    forget, the second third                        (B, L, recurrent_size)
    W_i x_t    input, the last third                           (B, L, recurrent_size)
    f_t, i_t   sigmoid(forget), sigmoid(input), inside minlstm_scan
    f'_t       f_t / (f_t + i_t)                               the share of the state that is kept
    i'_t       i_t / (f_t + i_t) = 1 - f'_t                    the share of the candidate
    h~_t       the candidate: hidden, or g(hidden)             candidate="vanilla" or "positive"
    g(u)       u + 0.5 for u >= 0, sigmoid(u) below            appendix B
    h_t        h = f'_t h_{t-1} + i'_t h~_t                    (B, L, recurrent_size)
    h_0        state["recurrent"]; at the start initial_state  (B, recurrent_size)

Unlike an LSTM's, its one state is both the cell's and the output: normalising the gates keeps its scale constant over
time, so neither an output gate nor a tanh is needed. All but the cell is minGRU's.
"""

from typing import Literal

from huggingface_hub.dataclasses import strict

from ..scan import minlstm_scan
from .configuration import RecurrentConfig
from .mingru import MinGRUBlock, MinGRUMixer
from .model import RecurrentForCausalLM, RecurrentForSequenceClassification, RecurrentModel


@strict
class MinLSTMConfig(RecurrentConfig):
    """
    Configuration of minLSTM: every field of `RecurrentConfig`, and

    Args:
        candidate: "positive" (the paper's log-space variant, its choice for language) or "vanilla".
        conv_residual: the convolution, followed by a projection of its own, is a residual branch without a norm, before
            that of the recurrence (the released package); False: it is part of the latter, between norm and recurrence.
    """

    model_type = "minlstm"
    # The paper's language model of Shakespeare's characters, and its model of Selective Copying.
    presets = {
        "minlstm-shakespeare": {
            "vocab_size": 65, "hidden_size": 384, "num_hidden_layers": 3, "hidden_dropout": 0.2,
        },
        "minlstm-selective-copying": {
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


class MinLSTMMixer(MinGRUMixer):
    """minGRU's, around the cell of minLSTM."""

    scan = staticmethod(minlstm_scan)
    num_inputs = 3  # hidden, forget, input


class MinLSTMModel(RecurrentModel):
    """minLSTM without a head; see `RecurrentModel`."""

    config_class = MinLSTMConfig
    mixer_class = MinLSTMMixer
    block_class = MinGRUBlock


class MinLSTMForCausalLM(RecurrentForCausalLM):
    """minLSTM with a language-model head; see `RecurrentForCausalLM`."""

    config_class = MinLSTMConfig
    model_class = MinLSTMModel


class MinLSTMForSequenceClassification(RecurrentForSequenceClassification):
    """minLSTM with a classifier on each row's last real token; see `RecurrentForSequenceClassification`."""

    config_class = MinLSTMConfig
    model_class = MinLSTMModel
