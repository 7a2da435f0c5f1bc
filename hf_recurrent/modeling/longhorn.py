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
    S_0        state["recurrent"]; at the start initial_state
    o_t        S_t q_t + D * x_t, gated by silu(z_t)                       (B, L, d)

The block is Mamba's (in_proj, convolution, selective recurrence, gate, out_proj, and no MLP) without its A and its
step-size floor: forgetting follows from the regression. As in the paper, the update takes the diagonal of k_t k_t^T.

With `bidirectional`, x goes also through a convolution and a recurrence from the last token to the first, with weights
of their own (conv1d_b, x_proj_b, dt_head_b, D_b), and o_t is the mean of both. Vision Longhorn is Vision Mamba
(arXiv 2401.09417, models named "midclstok_div2") with this block: patches of an image row by row, a class token amid
them, learnt positions, and a classifier on the class token.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict, validated_field
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, ImageClassifierOutput
from transformers.utils import can_return_tuple

from ..scan import longhorn_scan
from ..scan.elementwise import silu_gate
from ..scan.longhorn import gated_scan
from .cache import RecurrentCache
from .configuration import RecurrentConfig, at_least, kernel_size, not_negative, positive
from .layers import ShortConvolution, State, new_initial_state, project, starting_states
from .model import (
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentModel,
    RecurrentPreTrainedModel,
    document_starts,
    mean_token,
)

_IMAGENET = {"image_size": 224, "num_labels": 1000, "num_hidden_layers": 24, "bidirectional": True}


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
        bidirectional: a second recurrence from the last token to the first. No states are carried between calls.
        image_size: height and width of the images that the model reads as `pixel_values`, a multiple of `patch_size`;
            None for token ids. A model of images is bidirectional: its class token stands amid the patches.
        patch_size: height and width of the patches that become one token each.
        num_channels: of the images.

    The paper's language models (`presets`, named as it names them) are as wide as Transformers of their size and, since
    a block here has no MLP, twice as deep. Their vocabularies, padded, are GPT-2's for OpenWebText and GPT-NeoX's. Its
    vision models have Vision Mamba's sizes and the 1000 classes of ImageNet: 6.9 and 25.2 million parameters, 7 and 26
    by the paper's table (Vision Mamba has 7.1 and 25.8, with its A).
    """

    model_type = "longhorn"
    presets = {
        "longhorn-125m": {"vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 24},
        "longhorn-350m": {"vocab_size": 50304, "hidden_size": 1024, "num_hidden_layers": 48},
        "longhorn-1.3b": {"vocab_size": 50280, "hidden_size": 2048, "num_hidden_layers": 48},
        "vision-longhorn-tiny": {**_IMAGENET, "hidden_size": 192},
        "vision-longhorn-small": {**_IMAGENET, "hidden_size": 384},
    }

    conv_kernel: int = validated_field(kernel_size, default=4)
    mlp_ratio: int | float = validated_field(not_negative, default=0)
    norm_eps: int | float = validated_field(positive, default=1e-5)
    tie_word_embeddings: bool = True
    state_size: int = validated_field(at_least(1), default=16)
    dt_rank: int | Literal["auto"] = validated_field(_rank, default="auto")
    bidirectional: bool = False
    image_size: int | None = None
    patch_size: int = validated_field(at_least(1), default=16)
    num_channels: int = validated_field(at_least(1), default=3)

    def validate_image(self):
        """The patches must tile the images (run by `validate`, at construction and on saving)."""
        if self.image_size is None:
            return
        if self.image_size < 1 or self.image_size % self.patch_size:
            raise ValueError(
                f"image_size must be None or a multiple of patch_size, got image_size={self.image_size}, "
                f"patch_size={self.patch_size}"
            )
        if not self.bidirectional:
            raise ValueError(f"image_size={self.image_size} needs bidirectional=True, got bidirectional=False")

    @property
    def step_rank(self) -> int:
        """`dt_rank` as a number."""
        return math.ceil(self.hidden_size / 16) if self.dt_rank == "auto" else self.dt_rank


class LonghornMixer(nn.Module):
    """(B, L, hidden_size) -> (B, L, hidden_size); the contract is in layers.py."""

    complex_state = False

    def __init__(self, config: LonghornConfig):
        super().__init__()
        size, rank, m = config.recurrent_size, config.step_rank, config.state_size
        self.widths = (rank, m, m)
        self.bidirectional = config.bidirectional
        self.state_shapes = {} if config.bidirectional else {"recurrent": (size, m)}
        self.initial_state = new_initial_state(config, (size, m))
        self.in_proj = nn.Linear(config.hidden_size, 2 * size, bias=config.use_bias)
        self.conv1d = self.conv1d_b = None
        for suffix in ("", "_b") if config.bidirectional else ("",):
            if config.conv_kernel:
                convolution = ShortConvolution(size, config.conv_kernel, bias=config.use_conv_bias)
                setattr(self, f"conv1d{suffix}", convolution)
            setattr(self, f"x_proj{suffix}", nn.Linear(size, sum(self.widths), bias=False))
            setattr(self, f"dt_head{suffix}", nn.Linear(rank, size))
            setattr(self, f"D{suffix}", nn.Parameter(torch.ones(size)))
        if config.conv_kernel and not config.bidirectional:
            self.state_shapes["conv"] = self.conv1d.state_shape
        self.out_proj = nn.Linear(size, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor, state: State, mask: Tensor | None, reset: Tensor | None) -> tuple[Tensor, State]:
        new_state = {}
        x, z = project(self.in_proj, x).chunk(2, dim=-1)
        if self.conv1d is None:
            u = F.silu(x)
        else:
            u, new_state["conv"] = self.conv1d(x, state.get("conv"), mask, reset, silu=True)
        before, start = starting_states(self, state, x.shape[0])
        inputs = self._inputs(u, self.x_proj, self.dt_head)
        if not self.bidirectional:
            y, new_state["recurrent"] = gated_scan(
                *inputs, self.D, z, before, mask=mask, reset=reset, reset_state=start
            )
            return project(self.out_proj, y), new_state
        o = self._recur(inputs, self.D, before, mask=mask, reset=reset, reset_state=start)
        u = F.silu(x if self.conv1d_b is None else self._convolve_back(x, mask, reset))
        inputs = self._inputs(u, self.x_proj_b, self.dt_head_b)
        o = (o + self._recur(inputs, self.D_b, None, mask=mask, reset=reset, reverse=True)) / 2
        return project(self.out_proj, silu_gate(o.to(z.dtype), z)), {}

    def _inputs(self, u: Tensor, x_proj: nn.Linear, dt_head: nn.Linear) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, dt, k and q of `longhorn_scan`."""
        dt, k, q = project(x_proj, u).split(self.widths, dim=-1)
        return u, project(dt_head, dt), k, q

    def _recur(self, inputs: tuple[Tensor, ...], D: Tensor, state: Tensor | None, **options) -> Tensor:
        """o, (B, L, d), before the gate; `options` are those of `longhorn_scan`."""
        o, _ = longhorn_scan(*inputs, state, **options)
        return torch.addcmul(o, inputs[0].to(o.dtype), D.to(o.dtype))

    def _convolve_back(self, x: Tensor, mask: Tensor | None, reset: Tensor | None) -> Tensor:
        """The convolution over each token and the next ones: over the row in reverse, where a document starts with
        its last token."""
        flipped = None if mask is None else mask.flip(1)
        if reset is not None:
            document = (reset if mask is None else reset & mask).cumsum(1).flip(1)
            reset = document_starts(None, document, None, flipped, *x.shape[:2], carries_state=False, some=True)
        return self.conv1d_b(x.flip(1), None, flipped, reset)[0].flip(1)


class LonghornPatchEmbeddings(nn.Module):
    """
    Images to tokens, (B, num_channels, height, width) -> (B, patches + 1, hidden_size): patches row by row, before
    patch number patches // 2 the class token, all with learnt positions.
    """

    def __init__(self, config: LonghornConfig):
        super().__init__()
        self.config = config
        self.grid = config.image_size // config.patch_size
        self.projection = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.class_token = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.position_embeddings = nn.Parameter(torch.empty(1, self.grid**2 + 1, config.hidden_size))

    def init_weights(self) -> None:
        """The projection keeps the scale of what passes through; token and positions are narrow as all embeddings."""
        width = self.config.hidden_size
        std = self.config.initializer_range
        init.normal_(self.projection.weight, std=std or 1 / math.sqrt(self.projection.weight[0].numel()))
        init.zeros_(self.projection.bias)
        for parameter in (self.class_token, self.position_embeddings):
            init.normal_(parameter, std=std or 0.25 / math.sqrt(width))

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """
        Raises:
            ValueError: `pixel_values` are no such images.
        """
        channels, size, patch = self.config.num_channels, self.config.image_size, self.config.patch_size
        if pixel_values.ndim != 4 or pixel_values.shape[1] != channels or not pixel_values.is_floating_point():
            raise ValueError(
                f"pixel_values must be floats of the shape (batch, {channels}, height, width), "
                f"got {pixel_values.dtype} of the shape {tuple(pixel_values.shape)}"
            )
        if pixel_values.numel() == 0:
            raise ValueError(f"pixel_values is empty, with the shape {tuple(pixel_values.shape)}")
        height, width = pixel_values.shape[2:]
        if not interpolate_pos_encoding and (height, width) != (size, size):
            raise ValueError(
                f"pixel_values must be images of {size} x {size} pixels, got {height} x {width}: "
                "other sizes need interpolate_pos_encoding=True"
            )
        if height % patch or width % patch:
            raise ValueError(
                f"height and width of pixel_values must be multiples of patch_size={patch}, got {height} x {width}"
            )
        patches = self.projection(pixel_values.to(self.projection.weight.dtype))
        grid = patches.shape[2:]
        patches = patches.flatten(2).transpose(1, 2)
        token = self.class_token.expand(len(patches), -1, -1)
        return self._amid(patches, token.to(patches.dtype)) + self._positions(*grid)

    @staticmethod
    def _amid(patches: Tensor, token: Tensor) -> Tensor:
        """(B, patches, D) and (B, 1, D) -> (B, patches + 1, D)."""
        middle = patches.shape[1] // 2
        return torch.cat([patches[:, :middle], token, patches[:, middle:]], dim=1)

    def _positions(self, rows: int, columns: int) -> Tensor:
        """The position embeddings of a grid of patches: the learnt grid, by bicubic interpolation for another one."""
        learnt, grid = self.position_embeddings, self.grid
        if (rows, columns) == (grid, grid):
            return learnt
        before, token, after = learnt.split([grid**2 // 2, 1, grid**2 - grid**2 // 2], dim=1)
        image = torch.cat([before, after], dim=1).unflatten(1, (grid, grid)).permute(0, 3, 1, 2)
        image = F.interpolate(image, size=(rows, columns), mode="bicubic", align_corners=False)
        return self._amid(image.flatten(2).transpose(1, 2), token)


class LonghornModel(RecurrentModel):
    """Longhorn without a head, of text or (with an image_size in the configuration) of images; see `RecurrentModel`."""

    config_class = LonghornConfig
    mixer_class = LonghornMixer

    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        if config.image_size is not None:
            self.main_input_name, self.input_modalities = "pixel_values", ("image",)
            self._input_embed_layer = "embed_patches"
            del self.embed_tokens
            self.embed_patches = LonghornPatchEmbeddings(config)
            self._no_split_modules.add("LonghornPatchEmbeddings")
            self.post_init()  # again, for embed_patches

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LonghornMixer):
            for D in (module.D, module.D_b) if module.bidirectional else (module.D,):
                init.ones_(D)
        elif isinstance(module, LonghornPatchEmbeddings):
            module.init_weights()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            pixel_values: (B, num_channels, image_size, image_size) floats, in place of `input_ids` with an image_size
                in the configuration. They become L = patches + 1 tokens, of which number patches // 2 (from 0) is the
                class token.
            interpolate_pos_encoding: take images of any height and width that are multiples of patch_size, with the
                position embeddings interpolated.
            The others: see `RecurrentModel.forward`.

        Returns:
            What `RecurrentModel.forward` returns.

        Raises:
            What `RecurrentModel.forward` raises; ValueError for images where token ids are expected and the reverse,
            for images of other sizes, and for a cache in a bidirectional model.
        """
        if self.config.bidirectional:
            self._refuse_cache(past_key_values, use_cache)
            use_cache = False
        if self.config.image_size is None:
            if pixel_values is not None or interpolate_pos_encoding:
                raise ValueError("this model reads token ids (image_size=None): pass input_ids, not pixel_values")
        elif input_ids is not None:
            raise ValueError(
                f"this model reads images (image_size={self.config.image_size}): pass pixel_values, not input_ids"
            )
        elif (pixel_values is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of pixel_values or inputs_embeds")
        elif pixel_values is not None:
            inputs_embeds = self.embed_patches(pixel_values, bool(interpolate_pos_encoding))
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


def _refuse_images(model_class: type, config: LonghornConfig) -> None:
    if isinstance(config, LonghornConfig) and config.image_size is not None:
        raise ValueError(f"{model_class.__name__} reads token ids: it needs image_size=None, got {config.image_size}")


class LonghornForCausalLM(RecurrentForCausalLM):
    """
    Longhorn with a language-model head; see `RecurrentForCausalLM`.

    Raises:
        ValueError: a configuration that is bidirectional or reads images.
    """

    config_class = LonghornConfig
    model_class = LonghornModel

    def __init__(self, config: LonghornConfig):
        _refuse_images(type(self), config)
        if isinstance(config, LonghornConfig) and config.bidirectional:
            raise ValueError(
                "a language model reads from left to right: LonghornForCausalLM needs bidirectional=False, got True"
            )
        super().__init__(config)


class LonghornForSequenceClassification(RecurrentForSequenceClassification):
    """
    Longhorn with a classifier on each row's last real token, or with `bidirectional` on the mean of the real ones; see
    `RecurrentForSequenceClassification`.

    Raises:
        ValueError: a configuration that reads images.
    """

    config_class = LonghornConfig
    model_class = LonghornModel

    def __init__(self, config: LonghornConfig):
        _refuse_images(type(self), config)
        super().__init__(config)

    def pool(self, hidden_states: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """(B, L, D) -> (B, D): what the classifier reads. The last token of a bidirectional model has only itself
        behind it."""
        if self.config.bidirectional:
            return mean_token(hidden_states, attention_mask)
        return super().pool(hidden_states, input_ids, attention_mask)


class LonghornForImageClassification(RecurrentPreTrainedModel):
    """
    Vision Longhorn: a linear classifier on the class token; classification, multi-label classification or regression
    by `config.problem_type`.

    Raises:
        ValueError: a configuration without an image_size.
    """

    config_class = LonghornConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    accepts_loss_kwargs = False  # as in RecurrentForSequenceClassification
    _no_split_modules = ["RecurrentBlock", "LonghornPatchEmbeddings"]
    _input_embed_layer = "embed_patches"

    def __init__(self, config: LonghornConfig):
        if isinstance(config, LonghornConfig) and config.image_size is None:
            raise ValueError("LonghornForImageClassification reads images: it needs an image_size, got None")
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = LonghornModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs,
    ) -> ImageClassifierOutput:
        """
        Args:
            pixel_values, interpolate_pos_encoding, kwargs: as `LonghornModel.forward`.
            labels: (B,) class indices, or (B,) or (B, num_labels) numbers for the other `config.problem_type`s.

        Returns:
            loss with `labels`; logits, (B, num_labels); hidden_states.

        Raises:
            What `LonghornModel.forward` raises; ValueError, TypeError or IndexError for labels that do not fit.
        """
        outputs = self.model(
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            **self.without_cache(kwargs),
        )
        tokens = outputs.last_hidden_state
        logits = self.score(tokens[:, (tokens.shape[1] - 1) // 2])
        loss = None
        if labels is not None:
            loss = self.classification_loss(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
