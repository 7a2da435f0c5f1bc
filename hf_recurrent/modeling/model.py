"""What every family is built from: the backbone and its heads, generic over the mixer."""

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import can_return_tuple, is_tracing
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..scan.reference import COMPLEX_STATE_DTYPES
from ..scan.split import document_borders
from .cache import RecurrentCache, StaticRecurrentCache
from .cache_layers import recorded_calls
from .configuration import RecurrentConfig
from .head import LanguageModelHead, number_of_chunks, sum_in_chunks
from .layers import RecurrentBlock, RMSNorm, ShortConvolution

IGNORED = -100  # a label without a loss
KEPT_FOR_ASSISTANTS = 64  # tokens that an assistant may take back after it has taken some back
# What the loss takes beside logits and labels; Trainer sends the first.
LOSS_KWARGS = ("num_items_in_batch", "ignore_index", "shift_labels")
# What the backbone takes and needs no code for: the decorators of `forward` see to it, or it changes no result.
INERT_KWARGS = ("output_hidden_states", "output_attentions", "num_items_in_batch", "max_length_q", "max_length_k")


def padding_mask(attention_mask: Tensor | None, batch: int, length: int, past_length: int) -> Tensor | None:
    """
    Args:
        attention_mask: 0 at padding, for the tokens of this call, (B, L), or for all so far, (B, past_length + L).

    Returns:
        (B, L) bool, False at padding; None where there is no padding.

    Raises:
        ValueError: attention_mask has another shape.
    """
    if attention_mask is None:
        return None
    if attention_mask.shape not in ((batch, length), (batch, past_length + length)):
        expected = f"{(batch, length)}"
        if past_length:
            expected += f" or, with the tokens in past_key_values, {(batch, past_length + length)}"
        raise ValueError(f"attention_mask must have the shape {expected}, got {tuple(attention_mask.shape)}")
    mask = attention_mask[:, -length:].bool()
    return None if not is_tracing(mask) and mask.all() else mask


def document_starts(
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    cu_seq_lens: Tensor | None,
    mask: Tensor | None,
    batch: int,
    length: int,
    carries_state: bool,
    some: bool = False,
) -> Tensor | None:
    """
    A document starts where `position_ids` is 0 or does not rise (collators may count from another number than 0),
    where `seq_idx` changes, and where `cu_seq_lens` says. Each token is compared with the real one before it.

    Args:
        position_ids, seq_idx: (B, L) or (1, L).
        cu_seq_lens: (documents + 1,), where each document of a single row starts, and at last L.
        mask: (B, L) bool, False at padding.
        carries_state: whether there is a state from before the first token.
        some: whether some token is known to be a first one, so that none need be looked for, which a GPU is waited for.

    Returns:
        (B, L) bool, True at first tokens; None where there is nothing before any of them.

    Raises:
        ValueError: an argument of another shape.
    """
    device = next((x.device for x in (position_ids, seq_idx, cu_seq_lens) if x is not None), None)
    if device is None:
        return None
    for name, ids in (("position_ids", position_ids), ("seq_idx", seq_idx)):
        if ids is not None and ids.shape not in ((batch, length), (1, length)):
            raise ValueError(f"{name} must have the shape {(batch, length)} or {(1, length)}, got {tuple(ids.shape)}")

    columns = torch.arange(length, device=device).expand(batch, -1)
    # The column of the real token before each, -1 where there is none.
    before = columns if mask is None else torch.where(mask, columns, -1).cummax(dim=1).values
    before = torch.cat([before.new_full((batch, 1), -1), before[:, :-1]], dim=1)
    first = before < 0

    def previous(ids: Tensor) -> Tensor:
        return ids.gather(1, before.clamp(min=0))

    starts = torch.zeros_like(first)
    if position_ids is not None:
        position_ids = position_ids.expand(batch, -1)
        starts = starts | (position_ids == 0) | (~first & (position_ids <= previous(position_ids)))
    if seq_idx is not None:
        seq_idx = seq_idx.expand(batch, -1)
        starts = starts | (~first & (seq_idx != previous(seq_idx)))
    if cu_seq_lens is not None:
        if batch != 1 or cu_seq_lens.ndim != 1:
            raise ValueError(
                f"cu_seq_lens_q must have one dimension, for a single row of packed documents, got the shape "
                f"{tuple(cu_seq_lens.shape)} with {batch} rows"
            )
        if cu_seq_lens.is_floating_point() or len(cu_seq_lens) < 2:
            raise ValueError(
                f"cu_seq_lens_q must be integers, at least 2 of them, got {cu_seq_lens.dtype} of the shape "
                f"{tuple(cu_seq_lens.shape)}"
            )
        if not is_tracing(cu_seq_lens):
            ends = cu_seq_lens.tolist()  # at once: at each look a GPU is waited for
            if ends != sorted(ends):
                raise ValueError(f"cu_seq_lens_q must not fall, got {ends}")
            if ends[0] != 0 or ends[-1] != length:
                raise ValueError(
                    f"cu_seq_lens_q must run from 0 to the row's length {length}, got {ends[0]} to {ends[-1]}"
                )
        document = torch.searchsorted(cu_seq_lens[1:].long(), columns, right=True)
        starts = starts | first | (document != previous(document))
    if not carries_state:
        starts = starts & ~first
    if mask is not None:
        starts = starts & mask
    return None if not some and not is_tracing(starts) and not starts.any() else starts


def classes_checked(
    loss: Callable[[], Tensor], name: str, labels: Tensor, num_classes: int, ignore_index: int = IGNORED
) -> Tensor:
    """`loss()`; its IndexError for a label that is none of the classes is made to name the argument. (Looking at the
    labels first would make a GPU wait at every step.)"""
    try:
        return loss()
    except IndexError:
        outside = labels[((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)]
        raise IndexError(
            f"{name} holds the class {outside[0].item()}, outside the {num_classes} classes (0 to {num_classes - 1})"
        ) from None


def fitting_labels(config: PreTrainedConfig, logits: Tensor, labels: Tensor) -> tuple[str, Tensor]:
    """
    Args:
        logits: (..., num_labels).
        labels: (...) or (..., 1) class indices; or numbers, (..., num_labels), or (...) for one.

    Returns:
        `config.problem_type`, or where it is None what labels like these are taken for; and the labels as its loss
        takes them: int64 of the shape (...), or numbers of the logits' shape.

    Raises:
        ValueError: labels of another shape (a loss would broadcast them).
        TypeError: numbers where class indices are expected.
    """
    problem = config.problem_type
    if problem is None:
        numbers = labels.is_floating_point() or labels.dtype == torch.bool
        problem = "multi_label_classification" if numbers else "single_label_classification"
        problem = "regression" if config.num_labels == 1 else problem
    classes, rows = problem == "single_label_classification", tuple(logits.shape[:-1])
    expected, given = rows if classes else tuple(logits.shape), tuple(labels.shape)
    if given not in (expected, (*rows, 1) if classes else rows if config.num_labels == 1 else expected):
        raise ValueError(f"labels must have the shape {expected} for {problem}, got {given}")
    if classes and (labels.is_floating_point() or labels.is_complex()):
        raise TypeError(f"labels must be integers for {problem}, got {labels.dtype}")
    labels = labels.to(logits.device).reshape(expected)
    return problem, labels.long() if classes else labels.to(torch.promote_types(logits.dtype, torch.float32))


def taking(forward: Callable, **inputs: type) -> Callable:
    """`forward`, whose **kwargs take `inputs` already, with their names in its signature: there Trainer looks for the
    columns to keep and `generate` for the arguments to pass on."""
    signature = inspect.signature(forward)
    *named, kwargs = signature.parameters.values()
    named += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in inputs.items()
    ]

    @functools.wraps(forward)
    def forward_taking(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    forward_taking.__signature__ = signature.replace(parameters=[*named, kwargs])
    return forward_taking


class RecurrentPreTrainedModel(PreTrainedModel):
    """Initialisation and loading, for every family and head."""

    config: RecurrentConfig
    config_class = RecurrentConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _can_record_outputs = {"hidden_states": RecurrentBlock}
    _can_compile_fullgraph = True
    # The cache can take tokens back, which is what assisted decoding needs.
    _is_stateful = False

    def __init_subclass__(cls, **kwargs):
        """The class of the blocks is what device maps keep whole and what FSDP shards one at a time. (A name that the
        model has no module of, as RecurrentBlock where blocks are of another class, is an error to FSDP.)"""
        super().__init_subclass__(**kwargs)
        block_class = getattr(getattr(cls, "model_class", cls), "block_class", None)
        if block_class is not None and "_no_split_modules" not in vars(cls):
            cls._no_split_modules = [block_class.__name__]

    def __init__(self, config: RecurrentConfig):
        if not isinstance(config, self.config_class):
            raise TypeError(
                f"{type(self).__name__} needs a {self.config_class.__name__}, got a {type(config).__name__}"
            )
        config.validate()  # again: fields may have been set since it was made
        super().__init__(config)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing. Transformers calls it where a repository's `trust_remote_code` has led here, and would then copy the
        source of the installed class into every folder that its models are saved to."""

    def save_pretrained(self, save_directory, is_main_process: bool = True, *args, **options) -> None:
        """As in Transformers; and the module by which `trust_remote_code=True` loads the model from the folder, also
        where nobody has imported this package."""
        super().save_pretrained(save_directory, is_main_process, *args, **options)
        if is_main_process:
            self._write_code(Path(save_directory))

    def _write_code(self, folder: Path) -> None:
        from ..hub.code import write_code
        from . import FAMILIES

        if type(self.config) in FAMILIES and (folder / "config.json").is_file():
            write_code(folder, type(self.config))

    def _upload_modified_files(self, working_dir, *args, **options):
        """What `save_pretrained(push_to_hub=True)` of Transformers ends with."""
        self._write_code(Path(working_dir))
        return super()._upload_modified_files(working_dir, *args, **options)

    def push_to_hub(self, repo_id: str, **options) -> str:
        """Push the model, with a model card and the code to load it, to the Hub: `hf_recurrent.hub.push.push_model`."""
        from ..hub.push import push_model

        return push_model(self, repo_id, **options)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """
        Matrices are normal with a standard deviation of `config.initializer_range`, or where it is None of

        - 1 / sqrt(inputs) for projections, which keeps the scale of what passes through, whatever the width;
        - 1 / (4 sqrt(hidden_size)) for embeddings and heads: fresh logits have the standard deviation 1/4, and the loss
          is that of a uniform guess but for 1/32;

        divided, where a mixer or an MLP adds to the residual stream, by the square root of the number of such terms, so
        that the stream's variance does not grow with depth (GPT-2). Short convolutions keep the scale of nn.Conv1d,
        1 / sqrt(taps), as Mamba's do. Biases are zero, weights of norms one.

        Transformers calls this for modules that have parameters themselves, of classes outside its package.
        """
        super()._init_weights(module)
        if getattr(module, "initial_state", None) is not None:
            init.zeros_(module.initial_state)
        if isinstance(module, ShortConvolution):
            bound = 1 / math.sqrt(module.kernel_size[0])
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            std = self.config.initializer_range
            if std is None:
                inner = isinstance(self, RecurrentModel) and isinstance(module, nn.Linear)
                std = (1 if inner else 0.25) / math.sqrt(module.weight.shape[1])
            init.normal_(module.weight, std=std * self._residual_scale(module))

    def _residual_scale(self, module: nn.Module) -> float:
        """By how much the initial `module` is narrower for adding to the residual stream."""
        return 1.0

    def classification_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of `config.problem_type` for one prediction per row, (B, num_labels).

        Raises:
            What `fitting_labels` raises; IndexError for a label that is none of the classes.
        """
        _, labels = fitting_labels(self.config, logits, labels)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return classes_checked(
            lambda: self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config),
            "labels", labels, self.config.num_labels,
        )  # fmt: skip

    def without_cache(self, kwargs: dict) -> dict:
        """The `kwargs` of a head whose outputs have no place for states, with use_cache=False.

        Raises:
            ValueError: `use_cache` is asked for.
        """
        if kwargs.get("use_cache"):
            raise ValueError(f"{type(self).__name__} returns no states: use_cache must be False")
        return {**kwargs, "use_cache": False}

    def parameter_groups(
        self,
        lr: float,
        weight_decay: float = 0.0,
        recurrence_lr: float | None = None,
        exceptions: dict[str, dict] | None = None,
    ) -> list[dict]:
        """
        The trainable parameters in the groups that this family's paper trains them in, for an optimiser such as
        `torch.optim.AdamW`, or for `Trainer(..., optimizers=(optimizer, None))`.

        Matrices decay; vectors (norms, biases, D) and learned initial states do not, nor what the family names in
        `undecayed_parameters`.

        Args:
            lr: learning rate.
            weight_decay: of what decays.
            recurrence_lr: learning rate of what the family names in `recurrence_parameters` (S5's Lambda, B, log_step,
                GateLoop's transitions; nothing in the others); `lr` when None.
            exceptions: options by parameter names, or parts of them ("B", "layers.0"), in place of the above. Where
                several fit, the one of most parts counts, then the one further in. The authors of S5 train some tasks
                with {"B": {"lr": lr, "weight_decay": weight_decay}}.

        Returns:
            Dicts of "params", "lr", "weight_decay" and what `exceptions` adds, no two of which agree in all but params.

        Raises:
            ValueError: a name in `exceptions` that no trainable parameter has.
        """
        backbone = self.base_model
        exceptions = exceptions or {}
        unknown = set(exceptions)
        groups: list[tuple[dict, list[nn.Parameter]]] = []
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            parts = name.split(".")
            decays = parameter.ndim >= 2 and not set(parts) & {"initial_state", *backbone.undecayed_parameters}
            own_rate = recurrence_lr is not None and set(parts) & set(backbone.recurrence_parameters)
            options = {"lr": recurrence_lr if own_rate else lr, "weight_decay": weight_decay if decays else 0.0}
            fitting = [key for key in exceptions if f".{key}." in f".{name}."]
            for key in sorted(fitting, key=lambda key: (key.count("."), f".{name}.".rfind(f".{key}."))):
                options |= exceptions[key]
            unknown -= set(fitting)
            members = next((members for known, members in groups if known == options), None)
            if members is None:
                groups.append((options, members := []))
            members.append(parameter)
        if unknown:
            raise ValueError(f"exceptions: no trainable parameter's name has a part {sorted(unknown)[0]!r}")
        return [{"params": members, **options} for options, members in groups]


class RecurrentModel(RecurrentPreTrainedModel):
    """
    Embedding, blocks and final norm. A family sets `config_class` and `mixer_class`; where its blocks differ it sets
    `block_class` too, and `mixer_kwargs` to the arguments of a call, beyond the contract's, that its mixers take.
    `recurrence_parameters` and `undecayed_parameters` name parameters, or modules, for `parameter_groups`.

    The states live in `past_key_values`, a `RecurrentCache`; mixers see tensors only. All states are replaced together
    at the end of a call, so a call that fails leaves the cache as it was.
    """

    mixer_class: type[nn.Module]
    block_class: type[nn.Module] = RecurrentBlock
    mixer_kwargs: tuple[str, ...] = ()
    recurrence_parameters: tuple[str, ...] = ()
    undecayed_parameters: tuple[str, ...] = ()
    float32_weights = False  # whether they lose too much in a lower precision, in which FSDP would gather them
    context_group = None  # the processes that a sequence is split over, by `hf_recurrent.parallel.context_parallel`

    def __init__(self, config: RecurrentConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(
            self.block_class(config, self.mixer_class(config)) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    @property
    def active_layers(self) -> list[nn.Module]:
        """The layers that run: all, but while `generate` lets the first few draft for the others (it then sets
        `config.num_hidden_layers` to `assistant_early_exit`)."""
        return list(self.layers)[: self.config.num_hidden_layers]

    def _residual_scale(self, module: nn.Module) -> float:
        outputs = [layer.mlp.down_proj for layer in self.layers if layer.has_mlp]
        outputs += [getattr(layer.mixer, "out_proj", None) for layer in self.layers]
        terms = sum(2 if layer.has_mlp else 1 for layer in self.layers)
        return 1 / math.sqrt(terms) if any(module is output for output in outputs) else 1.0

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: (B, L) token ids; or
            inputs_embeds: (B, L, hidden_size).
            attention_mask: (B, L), or (B, tokens seen + L): 0 at padding, wherever it lies. Padding changes neither the
                outputs of real tokens nor the state; the outputs at padding itself mean nothing.
            position_ids: (B, L) or (1, L). Nothing is computed from positions, but a token at position 0, or at a
                position that does not rise, is the first of its document and sees nothing before it: neither other
                documents in its row nor the state in `past_key_values`. The cache holds no positions: the first real
                token of a call goes on with its state wherever it is, unless that is 0.
            past_key_values: the states to go on from, for the same number of rows.
            use_cache: whether to return the states after the last token, in `past_key_values` if it was given (which
                is left as it was with use_cache=False). The configuration's by default.
            seq_idx: (B, L) or (1, L): a new document starts where it changes. Its first value goes on with the state.
            cu_seq_lens_q: (documents + 1,), the boundaries of the documents packed into a single row.
            cu_seq_lens_k: the same, if given.
            kwargs: `output_hidden_states`, `return_dict`; `max_length_q` and `max_length_k`, which change no result.

        Returns:
            last_hidden_state, (B, L, hidden_size), after the final norm; past_key_values with `use_cache`;
            hidden_states with `output_hidden_states`, the embeddings and what each block returns, the last one normed.

        Raises:
            ValueError: shapes that do not fit each other or the model; what these models cannot honour.
            TypeError: an unknown argument, a cache of another type.
            IndexError: a token id outside the vocabulary.
        """
        mixer_kwargs = {name: kwargs.pop(name) for name in self.mixer_kwargs if name in kwargs}
        self._check_kwargs(kwargs)
        inputs_embeds = self._embed(input_ids, inputs_embeds)
        batch, length, _ = inputs_embeds.shape
        if past_key_values is not None:
            self._check_cache(past_key_values, batch)
            self._refuse_reentrant_checkpoints()
        elif use_cache:
            past_key_values = RecurrentCache(self.config)
        # Asked for only where it matters: a static cache has it in a tensor, which would stop the compiler.
        carries_state = past_key_values is not None and past_key_values.batch_size > 0
        past_length = past_key_values.get_seq_length() if carries_state and attention_mask is not None else 0
        if cu_seq_lens_k is not None and (
            cu_seq_lens_q is None or not is_tracing(cu_seq_lens_k) and not torch.equal(cu_seq_lens_k, cu_seq_lens_q)
        ):
            raise ValueError("cu_seq_lens_k must equal cu_seq_lens_q: a recurrence has no keys apart from queries")
        mask = padding_mask(attention_mask, batch, length, past_length)
        reset = document_starts(position_ids, seq_idx, cu_seq_lens_q, mask, batch, length, carries_state)
        if self.context_group is not None:
            self._refuse_in_split_context(past_key_values, cu_seq_lens_q, mixer_kwargs.get("output_attentions"))
        mask, reset = document_borders(
            self.context_group, position_ids, seq_idx, mask, reset, inputs_embeds, max(self.config.conv_kernel - 1, 1)
        )

        hidden_states = self.dropout(inputs_embeds)
        if self.config.residual_in_fp32:
            hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        layers = self.active_layers
        before = [{} for _ in layers]
        if past_key_values is not None:
            before = past_key_values.current_states()
        states = []
        recording = contextlib.nullcontext([])
        if use_cache and past_key_values.record_past:
            recording = recorded_calls([layer.mixer for layer in layers])
        with recording as calls:
            for layer, state in zip(layers, before, strict=True):
                hidden_states, state = layer(hidden_states, state, mask, reset, **mixer_kwargs)
                states.append(state)
        hidden_states = hidden_states.to(self.dtype) if self.norm is None else self.norm(hidden_states)
        if use_cache:
            past_key_values.advance(states, length, calls, before[0])
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states, past_key_values=past_key_values if use_cache else None
        )

    def _check_kwargs(self, kwargs: dict) -> None:
        for name, value in kwargs.items():
            if value is not None and name not in INERT_KWARGS:
                raise TypeError(f"{type(self).__name__}.forward() got an unexpected keyword argument {name!r}")
        if kwargs.get("output_attentions", self.config.output_attentions) and (
            "attentions" not in self._can_record_outputs
        ):
            raise ValueError(f"output_attentions=True: {type(self).__name__} has no attention weights to return")

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The (B, L, hidden_size) embeddings of whichever is given."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is not None:
            if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.config.hidden_size:
                raise ValueError(
                    f"inputs_embeds must have the shape (batch, length, {self.config.hidden_size}), "
                    f"got {tuple(inputs_embeds.shape)}"
                )
            if not inputs_embeds.is_floating_point():
                raise ValueError(f"inputs_embeds must be floats, got {inputs_embeds.dtype}: are they input_ids?")
        elif input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"input_ids must be integers (int64 or int32) of the shape (batch, length), "
                f"got {input_ids.dtype} of the shape {tuple(input_ids.shape)}"
            )
        name, given = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
        if given.numel() == 0:
            raise ValueError(f"{name} is empty, with the shape {tuple(given.shape)}: there must be a row and a token")
        if inputs_embeds is not None:
            return inputs_embeds
        try:
            return self.embed_tokens(input_ids)
        except IndexError:
            size = self.embed_tokens.num_embeddings
            outside = input_ids[(input_ids < 0) | (input_ids >= size)]
            raise IndexError(
                f"input_ids holds the token id {outside[0].item()}, outside the vocabulary of {size} tokens "
                f"(ids 0 to {size - 1})"
            ) from None

    def _refuse_in_split_context(self, past_key_values, cu_seq_lens_q, output_attentions) -> None:
        """Raises ValueError for what a sequence that is split over processes cannot have."""
        if past_key_values is not None:
            raise ValueError("a context that is split over processes has no cache: use_cache must be False")
        if cu_seq_lens_q is not None:
            raise ValueError("cu_seq_lens_q must be None in a context that is split over processes: give seq_idx")
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions must be False in a context that is split over processes")

    def _refuse_cache(self, past_key_values: RecurrentCache | None, use_cache: bool | None) -> None:
        """Raises ValueError where a bidirectional model is asked for states."""
        if use_cache or past_key_values is not None:
            name = type(self).__name__.removesuffix("Model")
            raise ValueError(
                f"a bidirectional {name} has no state to carry on: use_cache must be False and past_key_values None"
            )

    def _refuse_reentrant_checkpoints(self) -> None:
        """Raises ValueError where gradients would silently not flow through the states."""
        if self.training and torch.is_grad_enabled() and getattr(self.layers[0], "gradient_checkpointing", False):
            if getattr(self.layers[0]._gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
                raise ValueError(
                    "gradient checkpointing with use_reentrant=True sends no gradients through past_key_values: "
                    "use_reentrant must be False"
                )

    def _check_cache(self, cache: RecurrentCache, batch: int) -> None:
        """Raises TypeError or ValueError where `cache` cannot be this model's for `batch` rows."""
        if not isinstance(cache, RecurrentCache):
            raise TypeError(
                f"past_key_values must be a RecurrentCache, got a {type(cache).__name__}; "
                "without one, use_cache=True makes it"
            )
        layers = self.active_layers
        if len(cache.layers) != len(layers):
            raise ValueError(f"past_key_values has {len(cache.layers)} layers, {type(self).__name__} has {len(layers)}")
        if cache.batch_size not in (-1, batch):
            advice = ""
            if batch % cache.batch_size == 0:  # as with num_return_sequences and beams
                advice = f" (past_key_values.batch_repeat_interleave({batch // cache.batch_size}) repeats them)"
            raise ValueError(
                f"past_key_values holds the states of {cache.batch_size} rows, the input has {batch}{advice}"
            )
        real = torch.float64 if self.dtype is torch.float64 else torch.float32
        for index, (held, layer) in enumerate(zip(cache.layers, layers, strict=True)):
            states, mixer = held.states, layer.mixer
            if not states:
                continue
            shapes = {name: state.shape[1:] for name, state in states.items()}
            if shapes != mixer.state_shapes:
                shapes = {name: tuple(shape) for name, shape in shapes.items()}
                raise ValueError(
                    f"past_key_values holds states of another model: layer {index} has the shapes {shapes}, "
                    f"{type(self).__name__} expects {mixer.state_shapes} (without the batch)"
                )
            expected = COMPLEX_STATE_DTYPES[real] if mixer.complex_state else real
            if (dtype := states["recurrent"].dtype) is not expected:
                raise TypeError(
                    f"past_key_values holds a state of another dtype: layer {index} has {dtype}, "
                    f"{type(self).__name__} in {self.dtype} expects {expected}"
                )
        field = cache.differing_field(self.config, ignoring=("num_hidden_layers",))
        if field is not None:
            raise ValueError(
                f"past_key_values belongs to a model with {field} = {getattr(cache.config, field, None)!r}, "
                f"{type(self).__name__} has {getattr(self.config, field, None)!r}"
            )


class RecurrentForCausalLM(RecurrentPreTrainedModel, GenerationMixin):
    """The backbone with a language-model head. A family sets `config_class` and `model_class`."""

    model_class: type[RecurrentModel]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RecurrentConfig):
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool = False,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """
        Args:
            labels: (B, L), -100 where there is nothing to predict. The loss shifts them: the logits at t predict
                labels[t + 1].
            logits_to_keep: how many of the last positions get logits, 0 for all; or the positions, (positions,) for all
                rows or (B, positions) for each; or a bool mask (B, L), which flattens the logits to (True, vocab_size).
            skip_logits: whether to return the loss without logits, which are then computed for a part of the positions
                at a time, so that those of all never take memory. A `loss_function` of one's own must be a sum over
                tokens, divided by `num_items_in_batch`, and have nothing to train.
            kwargs: `num_items_in_batch` (the loss is then the sum over tokens divided by it), `ignore_index` and
                `shift_labels` (labels that are already shifted) for the loss; the rest as in `RecurrentModel.forward`,
                as all other arguments.

        Returns:
            loss with `labels` or `shift_labels`; logits, (B, L or logits_to_keep, vocab_size), None with
            `skip_logits`; past_key_values and hidden_states as `RecurrentModel.forward`.

        Raises:
            What `RecurrentModel.forward` raises; ValueError for labels that do not fit the logits, or `skip_logits`
            without any; TypeError for labels that are no integers; IndexError for a label outside the vocabulary.
        """
        loss_kwargs = {name: kwargs.pop(name) for name in LOSS_KWARGS if kwargs.get(name) is not None}
        name = "shift_labels" if "shift_labels" in loss_kwargs else "labels"
        targets = loss_kwargs.get(name, labels)
        if skip_logits and targets is None:
            raise ValueError("skip_logits=True needs labels: there would be neither logits nor a loss")
        if targets is not None and targets.dtype is not torch.long:
            if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
                raise TypeError(f"{name} must be integers, got {targets.dtype}")
            targets = targets.long()
            if name == "labels":
                labels = targets
        before = None
        if type(past_key_values) is RecurrentCache and not torch.compiler.is_compiling():
            before = past_key_values.held()
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        # Its states have been replaced, none has been written over.
        with contextlib.nullcontext() if before is None else past_key_values.restored_on_failure(before):
            hidden_states = keep_positions(outputs.last_hidden_state, logits_to_keep)
            if targets is not None and targets.shape != hidden_states.shape[:-1]:
                raise ValueError(
                    f"{name} must have the shape {tuple(hidden_states.shape[:-1])} of the positions with logits, "
                    f"got {tuple(targets.shape)}"
                )
            logits = None if skip_logits else self.lm_head(hidden_states)
            loss = None
            if targets is not None:
                if name == "shift_labels":
                    loss_kwargs[name] = targets.contiguous()
                size, ignored = self.config.vocab_size, loss_kwargs.get("ignore_index", IGNORED)
                if skip_logits:
                    loss_of = functools.partial(self._loss_in_chunks, hidden_states)
                else:
                    loss_of = functools.partial(self.loss_function, logits=logits, vocab_size=size)
                loss = classes_checked(lambda: loss_of(labels=labels, **loss_kwargs), name, targets, size, ignored)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss_in_chunks(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
    ) -> Tensor:
        """`self.loss_function` of the logits of `hidden_states`, which are never there all together."""
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != ignore_index).sum()
        options = {"ignore_index": ignore_index, "num_items_in_batch": num_items_in_batch}
        size = self.config.vocab_size
        chunks = number_of_chunks(size, self.config.hidden_size)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return self.loss_function(logits=logits, labels=None, shift_labels=targets, vocab_size=size, **options)

        if isinstance(self.lm_head, LanguageModelHead):
            return self.lm_head(hidden_states, shift_labels, loss, chunks)
        return sum_in_chunks(self.lm_head, hidden_states, shift_labels, loss, chunks)  # an adapter, say, in its place

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: RecurrentCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs,
    ) -> dict:
        """The inputs of one step of `generate`.

        Raises:
            ValueError: nothing to read; a cache that has seen all of `input_ids`, or more.
        """
        kwargs.pop("tokenizer", None)  # of `stop_strings`: the methods of sampling and of beams pass it on
        if input_ids.shape[1] == 0 and inputs_embeds is None:
            raise ValueError(
                f"input_ids is empty, with the shape {tuple(input_ids.shape)}: a prompt has a token or more"
            )
        seen = past_key_values.get_seq_length() if is_first_iteration and past_key_values is not None else 0
        if seen and inputs_embeds is not None:  # the whole text's, unless the places are of a longer one
            places = next((x for x in (attention_mask, kwargs.get("position_ids")) if x is not None), inputs_embeds)
            new_only = places.shape[1] == seen + inputs_embeds.shape[1]
            next_sequence_length = inputs_embeds.shape[1] - (0 if new_only else seen)
        elif seen and next_sequence_length is None and attention_mask is not None:
            # Assisted decoding gives the whole text, also where a cache has seen a part of it.
            if attention_mask.shape[1] == input_ids.shape[1]:
                next_sequence_length = input_ids.shape[1] - seen
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"past_key_values has seen {past_key_values.get_seq_length()} tokens, input_ids has "
                f"{input_ids.shape[1]}: pass the whole sequence, or only what is new with an attention_mask for both"
            )
        if not is_first_iteration and past_key_values is not None and next_sequence_length is not None:
            # Tokens that were just generated are neither padding nor the first of a document. One is asked about first:
            # a static cache has its length in a tensor.
            if next_sequence_length == 1 or past_key_values.get_seq_length() > 0:
                attention_mask = None
                kwargs.pop("position_ids", None)
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def _prefill(self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict, *args, **kwargs):
        """As in Transformers, but a prompt in pieces goes on from `past_key_values` that have seen some of it: versions
        before 5.21 read what was seen again, and cut the mask as if nothing had been."""
        cache, size = model_kwargs.get("past_key_values"), generation_config.prefill_chunk_size
        if size is not None and size < 1:
            raise ValueError(f"prefill_chunk_size must be at least 1, got {size}")
        seen = 0 if cache is None else cache.get_seq_length()
        if size is None or not seen:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        mask, length = model_kwargs.get("attention_mask"), input_ids.shape[1]
        is_whole = length == (getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1])
        start = seen if is_whole else 0
        while length - start > size:
            start += size
            later = length - start
            cut = {name: model_kwargs.get(name) for name in ("attention_mask", "position_ids")}
            cut = {name: value[..., : value.shape[-1] - later] for name, value in cut.items() if value is not None}
            self(**self.prepare_inputs_for_generation(input_ids[:, start - size : start], **(model_kwargs | cut)))
        generation_config = copy.copy(generation_config)
        generation_config.prefill_chunk_size = None
        rest = input_ids if is_whole else input_ids[:, start:]
        return super()._prefill(rest, generation_config, model_kwargs, *args, **kwargs)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs) -> Tensor | None:
        """The mask that `generate` passes on beside a static cache: a recurrence has no (L, L) one to prepare."""
        return attention_mask

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """`generate` asks here for its cache: a RecurrentCache, whatever the length."""
        if generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
            raise ValueError("prefill_chunk_size cuts input_ids, and cannot be combined with inputs_embeds")
        if model_kwargs.get("past_key_values") is not None:
            if generation_config.use_cache is False:
                raise ValueError("past_key_values needs use_cache=True: without it, each step reads all of the text")
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        elif generation_config.use_cache is not False:
            kind = generation_config.cache_implementation
            if kind not in (None, "dynamic", "static"):
                raise ValueError(
                    f"cache_implementation must be None, 'dynamic' or 'static', got {kind!r}: "
                    f"{type(self).__name__} has a RecurrentCache, of constant size"
                )
            cache_class = StaticRecurrentCache if kind == "static" else RecurrentCache
            model_kwargs["past_key_values"] = cache_class(self.config)
            if generation_config.is_assistant:
                cache = model_kwargs["past_key_values"]
                cache.activate_past_recording()
                # One with a tokenizer of its own tokenises a text anew that goes on, which may change earlier tokens.
                for layer in cache.layers:
                    layer.kept_by_crop = KEPT_FOR_ASSISTANTS

    def _assisted_decoding(self, input_ids: Tensor, *args, inputs_tensor: Tensor | None = None, **kwargs):
        """As in Transformers. But afterwards the cache records what it recorded before, and the model has all of its
        layers, also after an error: `assistant_early_exit` changes the configuration on the way."""
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        num_layers = self.model.config.num_hidden_layers
        layers = cache.layers if isinstance(cache, RecurrentCache) else []
        if layers and cache.get_seq_length() and mask is not None and mask.shape[1] != input_ids.shape[1]:
            # Transformers would cut off the mask of what is new, in place of the one of what was seen.
            if input_ids.shape[1] and not mask[:, -input_ids.shape[1] :].all():
                raise ValueError("assisted decoding cannot start from padding that follows past_key_values")
            del kwargs["attention_mask"]
        recording = [(layer.record_past, layer.window) for layer in layers]
        try:
            return super()._assisted_decoding(input_ids, *args, inputs_tensor=inputs_tensor, **kwargs)
        finally:
            self.model.config.num_hidden_layers = num_layers
            for layer, (record_past, window) in zip(layers, recording, strict=True):
                layer.record_past, layer.window = record_past, window
                if not record_past:
                    layer.calls = []


def keep_positions(hidden_states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """(B, L, D) -> (B, kept, D): what `RecurrentForCausalLM.forward` says of `logits_to_keep`."""
    if isinstance(logits_to_keep, int):
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be 0 (all) or a number of positions, got {logits_to_keep}")
        return hidden_states[:, -logits_to_keep:]
    if logits_to_keep.ndim == 2 and logits_to_keep.dtype != torch.bool:
        return torch.take_along_dim(hidden_states, logits_to_keep[..., None], dim=1)
    return hidden_states[logits_to_keep] if logits_to_keep.ndim == 2 else hidden_states[:, logits_to_keep]


def last_token(
    hidden_states: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None, pad_token_id: int | None
) -> Tensor:
    """(B, L, D) -> (B, D): what `RecurrentForSequenceClassification.forward` says of the last real token."""
    batch, length, _ = hidden_states.shape
    columns = torch.arange(length, device=hidden_states.device)
    if attention_mask is not None:
        last = torch.where(attention_mask[:, -length:] != 0, columns, 0).amax(dim=1)
    elif input_ids is not None and pad_token_id is not None:
        last = torch.where(input_ids != pad_token_id, columns, 0).amax(dim=1)
    else:
        last = columns[-1:].expand(batch)
    return hidden_states[torch.arange(batch, device=hidden_states.device), last]


def mean_token(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, L, D) -> (B, D): the mean over what `attention_mask` marks as real, 0 where nothing is."""
    if attention_mask is None:
        return hidden_states.mean(dim=1)
    real = attention_mask[:, -hidden_states.shape[1] :, None] != 0
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)  # a sum may leave float16's range
    total = torch.where(real, hidden_states, 0).sum(dim=1, dtype=dtype)
    return (total / real.sum(dim=1).clamp(min=1)).to(hidden_states.dtype)


class RecurrentForSequenceClassification(RecurrentPreTrainedModel):
    """The backbone with a linear classifier on the last real token. A family sets `config_class` and `model_class`."""

    model_class: type[RecurrentModel]
    score_bias = False
    # Its losses are means over the batch and most take no divisor, so Trainer divides over accumulation steps itself.
    accepts_loss_kwargs = False

    def __init__(self, config: RecurrentConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=self.score_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> SequenceClassifierOutputWithPast:
        """
        The classifier reads the last token that `attention_mask` marks as real. Without a mask it reads the last that
        is not `pad_token_id`, and without that (or with inputs_embeds) the last of the row.

        Args:
            labels: (B,) class indices, or (B,) or (B, num_labels) numbers for the other `config.problem_type`s.

        Returns:
            loss with `labels`; logits, (B, num_labels); past_key_values and hidden_states as `RecurrentModel.forward`,
            whose arguments the others are.

        Raises:
            What `RecurrentModel.forward` raises; ValueError or TypeError for labels that do not fit the problem type;
            IndexError for a label outside the classes.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.score(self.pool(outputs.last_hidden_state, input_ids, attention_mask))

        loss = None
        if labels is not None:
            loss = self.classification_loss(logits, labels)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def pool(self, hidden_states: Tensor, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor:
        """(B, L, D) -> (B, D): what the classifier reads."""
        return last_token(hidden_states, input_ids, attention_mask, self.config.pad_token_id)
