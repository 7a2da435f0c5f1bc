"""RecurrentConfig: the fields that every family has."""

import difflib
import math
from collections.abc import Callable

from huggingface_hub.dataclasses import strict, validated_field
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


def at_least(minimum: int) -> Callable[[int], None]:
    """A field validator: an integer not below `minimum`."""

    def validator(value: int) -> None:
        if value < minimum:
            raise ValueError(f"expected an integer of at least {minimum}, got {value}")

    return validator


def positive(value: float) -> None:
    """A field validator: a finite number above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"expected a finite number above 0, got {value}")


def positive_or_none(value: float | None) -> None:
    """A field validator: a finite number above 0, or None."""
    if value is not None:
        positive(value)


def not_negative(value: float) -> None:
    """A field validator: a finite number, 0 or above."""
    if not 0 <= value < math.inf:
        raise ValueError(f"expected a finite number, 0 or above, got {value}")


def probability(value: float) -> None:
    """A field validator: a share that leaves something, in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"expected a probability in [0, 1), got {value}")


def kernel_size(value: int) -> None:
    """A field validator: the taps of a short convolution, or 0 for none."""
    if value != 0 and value < 2:
        raise ValueError(f"expected 0 (no convolution) or at least 2 taps, got {value}")


def activation(value: str) -> None:
    """A field validator: the name of an activation function that Transformers knows."""
    if value not in ACT2FN:
        raise ValueError(f"expected one of {', '.join(sorted(ACT2FN))}, got {value!r}")


def whole_product(ratio_name: str, ratio: float, hidden_size: int) -> int:
    """`ratio * hidden_size` as the width it stands for.

    Raises:
        ValueError: the product is not a whole number (up to float rounding).
    """
    width = ratio * hidden_size
    if abs(width - round(width)) > 1e-6:
        raise ValueError(
            f"{ratio_name} * hidden_size must be a whole number, got {ratio} * {hidden_size} = {width:.10g}"
        )
    return round(width)


@strict
class RecurrentConfig(PreTrainedConfig):
    r"""
    The fields that every family has. Each is checked when it is set, also after construction.

    Args:
        vocab_size: tokens in the vocabulary, the rows of the embedding.
        hidden_size: width of the residual stream.
        num_hidden_layers: blocks, each one mixer and (with `mlp_ratio`) one MLP.
        expansion: width of the recurrence over `hidden_size`; the product must be whole.
        conv_kernel: taps of the short causal depthwise convolution, the current token included; 0 leaves it out.
        mlp_ratio: inner width of the MLP over `hidden_size`; 0 leaves the MLPs out; the product must be whole.
        hidden_act: activation of the MLP, by its name in Transformers.
        hidden_dropout: probability of dropout on the embeddings and on what each mixer and MLP adds.
        norm_eps: added to the mean square inside every RMSNorm.
        use_bias: whether the projections of mixer and MLP have biases.
        use_mlp_bias: whether those of the MLP do, in place of `use_bias`; None for the same.
        use_conv_bias: whether the short convolution has one.
        tie_word_embeddings: whether the language-model head is the embedding matrix.
        residual_in_fp32: keep the residual stream in float32 where the weights are narrower. It sums
            2 `num_hidden_layers` terms, and bfloat16 keeps 8 bits of each.
        learned_initial_state: whether the recurrent state that a text starts from, at the start of each row and of each
            document packed into it, is a parameter of each layer, which starts as zero; otherwise it is zero. (That of
            the short convolution is always zero: it stands for tokens that are not there.)
        initializer_range: standard deviation of the initial matrices; None for one that suits their widths
            (`RecurrentPreTrainedModel._init_weights`).
        use_cache: whether the model returns its states unless told otherwise.
        bos_token_id, eos_token_id, pad_token_id: special tokens, None where there is none.

    Raises:
        huggingface_hub.errors.StrictDataclassError: a value of the wrong type or out of range; the message names the
            field, what it expects and what it got. (Transformers' configs are checked this way.)
        TypeError: an unknown argument whose name is close to a field's, or that of a property below.
    """

    keys_to_ignore_at_inference = ["past_key_values"]
    presets = {}  # a family's named sizes: the fields of each

    vocab_size: int = validated_field(at_least(1), default=50257)
    hidden_size: int = validated_field(at_least(1), default=768)
    num_hidden_layers: int = validated_field(at_least(1), default=12)
    expansion: int | float = validated_field(positive, default=2)
    conv_kernel: int = validated_field(kernel_size, default=4)
    mlp_ratio: int | float = validated_field(not_negative, default=4)
    hidden_act: str = validated_field(activation, default="gelu")
    hidden_dropout: int | float = validated_field(probability, default=0.0)
    norm_eps: int | float = validated_field(positive, default=1e-6)
    use_bias: bool = False
    use_mlp_bias: bool | None = None
    use_conv_bias: bool = True
    tie_word_embeddings: bool = False
    residual_in_fp32: bool = True
    learned_initial_state: bool = False
    initializer_range: int | float | None = validated_field(positive_or_none, default=None)
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing, as for the models (`RecurrentPreTrainedModel.register_for_auto_class`)."""

    def to_dict(self) -> dict:
        """Without the "auto_map" of the folder that it is from: the file that it names is in that folder alone."""
        fields = super().to_dict()
        fields.pop("auto_map", None)
        return fields

    @classmethod
    def from_preset(cls, name: str, **overrides):
        """The configuration called `name` in `presets`, with `overrides` in place of its fields.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in cls.presets:
            known = ", ".join(cls.presets) or "there are none"
            raise ValueError(f"{cls.__name__} has no preset {name!r}; known: {known}")
        return cls(**{**cls.presets[name], **overrides})

    def __post_init__(self, **kwargs):
        # Transformers keeps unknown arguments as attributes, as files written by other tools need. A misspelt field
        # would so be ignored in silence. Special tokens (sep_token_id and the like) resemble ours and are left alone.
        fields = [name for name in type(self).__dataclass_fields__ if name not in PreTrainedConfig.__dataclass_fields__]
        for name in kwargs:
            derived = getattr(type(self), name, None)
            if isinstance(derived, property) and not hasattr(PreTrainedConfig, name):
                raise TypeError(
                    f"{type(self).__name__} has no field {name!r}, which follows from others: {derived.__doc__}"
                )
            close = difflib.get_close_matches(name, fields, n=1, cutoff=0.8)
            if close and not name.endswith("_token_id"):
                raise TypeError(f"{type(self).__name__} has no field {name!r}: did you mean {close[0]!r}?")
        super().__post_init__(**kwargs)

    def validate_widths(self):
        """The widths that are given as ratios must be whole (run by `validate`, at construction and on saving)."""
        if self.recurrent_size < 1:
            raise ValueError(f"expansion * hidden_size must be at least 1, got {self.expansion} * {self.hidden_size}")
        self.intermediate_size  # noqa: B018  (raises)

    def validate_initial_state(self):
        """A state to start from belongs to one direction (run by `validate`, as the others)."""
        if self.learned_initial_state and getattr(self, "bidirectional", False):
            raise ValueError("learned_initial_state=True needs bidirectional=False: nothing is carried on there")

    def validate_labels(self):
        """There must be a class, and a loss for the problem (run by `validate`, as the others)."""
        if self.num_labels is not None and self.num_labels < 1:
            raise ValueError(f"num_labels must be at least 1, got {self.num_labels}")
        if self.problem_type is not None and self.problem_type not in PROBLEM_TYPES:
            known = ", ".join(map(repr, PROBLEM_TYPES))
            raise ValueError(f"problem_type must be None or one of {known}, got {self.problem_type!r}")

    @property
    def recurrent_size(self) -> int:
        """Channels of the recurrence: expansion * hidden_size."""
        return whole_product("expansion", self.expansion, self.hidden_size)

    @property
    def intermediate_size(self) -> int:
        """Inner width of the MLP: mlp_ratio * hidden_size, 0 without MLPs."""
        return whole_product("mlp_ratio", self.mlp_ratio, self.hidden_size)

    @property
    def mlp_bias(self) -> bool:
        """Whether the projections of the MLP have biases: use_mlp_bias, or use_bias where that is None."""
        return self.use_bias if self.use_mlp_bias is None else self.use_mlp_bias

    @property
    def layer_types(self) -> list[str]:
        """What Transformers' utilities for masks and caches call a recurrent layer."""
        return ["linear_attention"] * self.num_hidden_layers
