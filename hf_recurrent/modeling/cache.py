"""RecurrentCache: what a recurrent model remembers, of a size that does not depend on how many tokens it has seen."""

import contextlib
import copy
import json
import operator
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..files import replacing
from .cache_layers import MixerCall, RecurrentLayer, StaticLayer, at_a_fixed_address, can_be_written

STATE_FILE = "hf_recurrent.RecurrentCache/1"  # the "format" of a state file's metadata
# Of a tensor in such a file.
STATE_NAME = re.compile(r"layers\.(?P<layer>\d+)\.(?P<state>conv|recurrent)(?P<complex>\.complex)?")
# Fields of a configuration that change nothing about what a state means.
MEANINGLESS_FIELDS = {"hidden_dropout", "initializer_range", "learned_initial_state", "use_cache", "vocab_size"}
_REPLACING = threading.Lock()  # held for the moment in which a cache's states are read, or take the place of others


class RecurrentCache(Cache):
    """
    The `past_key_values` of a recurrent model: one set of states per layer, and the number of tokens seen.

    Its bytes depend on the model and the batch, never on the number of tokens. The model only replaces states, it never
    writes into them: `copy.copy` of a layer's dict is a snapshot, and a call that fails leaves the cache as it was.

    A cache is a value: `clone()` it, take rows of it (`cache[0]`, `cache[2:5]`), `save` it to a file and `load` it in
    another process. A long prefix is read once, and every continuation starts from a clone:

        prefix = model(prefix_ids, use_cache=True).past_key_values
        outputs = [model.generate(ids, past_key_values=prefix.clone()) for ids in texts_with_the_prefix]

    Args:
        config: the model's configuration.
    """

    layer_class = RecurrentLayer

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=[self.layer_class() for _ in range(config.num_hidden_layers)])
        self.config = config
        self.seen_tokens = 0

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.layers)} layers, batch size {self.batch_size}, "
            f"{self.seen_tokens} tokens seen, {self.nbytes} bytes)"
        )

    def __deepcopy__(self, memo: dict) -> "RecurrentCache":
        return self._map(lambda state: state.detach().clone())

    def detach(self) -> "RecurrentCache":
        """The same states outside the graph of gradients, as `Tensor.detach`: what is computed from them sends no
        gradients into the calls before. What is recorded comes along."""
        return self._map(Tensor.detach)

    @staticmethod
    def concatenate(caches: Sequence["RecurrentCache"]) -> "RecurrentCache":
        """The rows of all `caches` in one, in order; those that have seen fewer tokens than others count as padded.
        What is recorded stays behind.

        Raises:
            ValueError: there is no cache; one is empty, or another model's.
        """
        if not caches:
            raise ValueError("there is no cache to concatenate")
        first = caches[0]
        for index, cache in enumerate(caches):
            if cache.batch_size < 0:
                raise ValueError(f"cache {index} is empty: it has no rows yet")
            if field := first.differing_field(cache.config):
                theirs, ours = (getattr(config, field, None) for config in (cache.config, first.config))
                raise ValueError(f"cache {index} belongs to a model with {field} = {theirs!r}, the first has {ours!r}")
        joined = []
        for layers in zip(*(cache.layers for cache in caches), strict=True):
            layer = type(layers[0])()
            layer.hold({name: torch.cat([held.states[name] for held in layers]) for name in layers[0].states})
            joined.append(layer)
        other = first._with(joined)
        other.seen_tokens = max(cache.seen_tokens for cache in caches)
        return other

    def differing_field(self, config: PreTrainedConfig, ignoring: Sequence[str] = ()) -> str | None:
        """A field, "model_type" first, in which a model of `config` differs from the one that this cache belongs to, so
        that its states mean something else there; None where they mean the same."""
        if config is self.config:
            return None
        own, other = _meaning(self.config), _meaning(config)
        if own == other:
            self.config = config  # which is known at once the next time
            return None
        differing = (name for name in [*own, *other] if own.get(name) != other.get(name))
        return next((name for name in differing if name not in ignoring), None)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> "RecurrentCache":
        """A cache of its own with some of the rows, by index, slice, or a sequence or tensor of indices.

        Raises:
            IndexError: there is no such row; the cache is empty.
        """
        if self.batch_size < 0:
            raise IndexError("an empty cache has no rows")
        rows = torch.arange(self.batch_size)[rows].reshape(-1)
        return self._map(lambda state: state[rows.to(state.device)])

    def _map(self, function: Callable[[Tensor], Tensor]) -> "RecurrentCache":
        return self._with([layer.map(function) for layer in self.layers])

    def _with(self, layers: list[RecurrentLayer]) -> "RecurrentCache":
        """A cache that has seen as much as this one, and holds `layers`."""
        other = copy.copy(self)
        other.layers = layers
        return other

    def held(self) -> tuple[list[tuple[dict[str, Tensor], list[MixerCall]]], int]:
        """What each layer holds, and the tokens seen, for `restored_on_failure`."""
        return [(layer.states, [*layer.calls]) for layer in self.layers], self.seen_tokens

    @contextlib.contextmanager
    def restored_on_failure(self, held: tuple[list, int]) -> Iterator[None]:
        """Where what is inside the `with` block fails, the cache holds what it did before a call that has just advanced
        it; unless somebody else has advanced it since."""
        layers, seen_tokens = held
        advanced = self.layers[0].states
        try:
            yield
        except BaseException:
            with _replacing():
                if self.layers[0].states is advanced:
                    for layer, (states, calls) in zip(self.layers, layers, strict=True):
                        layer.states, layer.calls = states, calls
                    self.seen_tokens = seen_tokens
            raise

    def clone(self) -> "RecurrentCache":
        """An independent copy, with what is recorded. (Unlike `copy.deepcopy`, it stays in the graph of gradients.)"""
        return self._map(Tensor.clone)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "RecurrentCache":
        """A copy as a model on `device`, with weights of `dtype`, would hold it: the recurrent states of narrower
        weights are in float32 (complex64) all the same. What is recorded stays behind.

        Raises:
            TypeError: `dtype` is not a floating-point one.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"dtype must be the floating-point one of a model's weights, got {dtype}")
        layers = []
        for layer in self.layers:
            new, states = type(layer)(), {}
            for name, state in layer.states.items():
                wanted = None
                if dtype is not None:
                    wanted = torch.promote_types(dtype, torch.float32) if name == "recurrent" else dtype
                    wanted = wanted.to_complex() if state.is_complex() else wanted
                states[name] = state.to(device=device, dtype=wanted, copy=True)
            new.hold(states)
            layers.append(new)
        other = self._with(layers)
        if dtype is not None:
            other.config = copy.copy(self.config)
            other.config.dtype = dtype
        return other

    def current_states(self) -> list[dict[str, Tensor]]:
        """The states of all layers, after the same tokens also where another thread replaces them."""
        with _replacing():
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                for layer in self.layers:
                    # Autograd saves no tensor that was made in inference mode.
                    if any(state.is_inference() for state in layer.states.values()):
                        layer.hold({name: state.clone() for name, state in layer.states.items()})
            return [layer.states for layer in self.layers]

    def advance(
        self,
        states: Sequence[dict[str, Tensor]],
        num_tokens: int,
        calls: Sequence[MixerCall] = (),
        before: dict[str, Tensor] | None = None,
    ) -> None:
        """Replaces the states of all layers by those `num_tokens` later, after `calls` of their mixers.

        Raises:
            RuntimeError: the states of the first layer are not those from `before` that `states` were computed from.
        """
        # Before anything is replaced, and without the lock: it computes, and can fail.
        recorded = [layer.to_record(calls[index] if calls else None) for index, layer in enumerate(self.layers)]
        with _replacing():
            if before is not None and self.layers[0].states is not before:
                raise RuntimeError("the cache was changed while a model was reading it: it serves one call at a time")
            for layer, new, call in zip(self.layers, states, recorded, strict=True):
                layer.advance(new, call)
            self._count(num_tokens)

    def _count(self, num_tokens: int) -> None:
        self.seen_tokens += num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes that all states take, and what is recorded."""
        return sum(layer.nbytes for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far: as in every cache of Transformers, padding counts, though it changes no state."""
        return self.seen_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    def offload(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Moves the states of a layer, or of all, to the CPU, until `prefetch`. (No layer is a sliding one.)"""
        for layer in self.layers if layer_idx is None else [self.layers[layer_idx]]:
            layer.offload()

    def prefetch(self, layer_idx: int | None = None, only_non_sliding: bool = True) -> None:
        """Moves the states of a layer, or of all, back to where `offload` took them from."""
        for layer in self.layers if layer_idx is None else [self.layers[layer_idx]]:
            layer.prefetch()

    def reset(self) -> None:
        """Forgets everything; the next call starts from the initial state."""
        super().reset()
        self.seen_tokens = 0

    # ---- taking tokens back ------------------------------------------------------------------------------------------

    @property
    def record_past(self) -> bool:
        """Whether what is fed can be taken back. Each layer has its own, which `generate` switches off."""
        return all(layer.record_past for layer in self.layers)

    def activate_past_recording(self, window: int | None = None) -> None:
        """From now on `crop` can take tokens back.

        Args:
            window: tokens that are to be kept for that. The rest is forgotten: never more than the inputs of twice as
                many tokens are held, whatever is fed. (A call of more tokens than the window takes a second pass of
                the mixers for it.) Without it all that was fed since the last `crop` can be taken back.

        Raises:
            ValueError: a window below 1.
            TypeError: a window that is no whole number.
        """
        if window is not None and operator.index(window) < 1:
            raise ValueError(f"window must be at least 1 token, got {window}")
        for layer in self.layers:
            layer.record_past, layer.window = True, window

    def crop(self, tokens_to_remove: int) -> None:
        """
        Takes back the last tokens: the states are those before them, to the bit, short convolutions included. What was
        recorded is forgotten, without a window; recording goes on. `crop(0)` therefore says that all tokens are to
        stay. With a window, of what was recorded before the tokens that are taken back some can be taken back later:
        they count in the window, too.

        Args:
            tokens_to_remove: -n takes back n tokens, as in Transformers' recurrent caches. Columns count, also padding.

        Raises:
            RuntimeError: nothing is being recorded, see `activate_past_recording`.
            ValueError: a positive number; more tokens than were recorded. The cache is as it was.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be -n to take back n tokens, or 0; got {tokens_to_remove}")
        num_tokens = -tokens_to_remove
        if num_tokens:
            if not self.record_past:
                raise RuntimeError(
                    f"cannot take back {num_tokens} tokens: call activate_past_recording() before feeding what may "
                    "have to be taken back; without it a RecurrentCache keeps the state after the last token only"
                )
            recorded = self.layers[0].recorded_tokens
            if num_tokens > recorded:
                raise ValueError(
                    f"cannot take back {num_tokens} tokens: {recorded} are recorded, since recording began, the last "
                    "crop, or within its window"
                )
            states = [layer.states_before(num_tokens) for layer in self.layers]
            with _replacing():
                for layer, state in zip(self.layers, states, strict=True):
                    layer.hold(state)
                self.seen_tokens -= num_tokens
        for layer in self.layers:
            layer.crop(num_tokens)

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
        """Writes the states, and `metadata` of the caller's beside them, to a safetensors file, whole or not at all.
        What is recorded stays behind."""
        tensors = {}
        for index, layer in enumerate(self.layers):
            for name, state in layer.states.items():
                state = state.detach().contiguous()
                if state.is_complex():  # safetensors has no complex128
                    name, state = f"{name}.complex", torch.view_as_real(state)
                tensors[f"layers.{index}.{name}"] = state
        metadata = {
            **(metadata or {}),
            "format": STATE_FILE,
            "seen_tokens": str(self.seen_tokens),
            "config": json.dumps(_meaning(self.config)),
            **({} if self.config.dtype is None else {"model_dtype": _name(self.config.dtype)}),
        }
        with replacing(Path(path)) as temporary:
            save_file(tensors, temporary, metadata)

    @classmethod
    def load(
        cls, path: str | os.PathLike, config: PreTrainedConfig, device: torch.device | str = "cpu"
    ) -> "RecurrentCache":
        """
        The cache that `save` wrote, for a model of `config`, on `device`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a whole state file; it was saved for another family, other sizes or another dtype
                (where both configurations tell theirs), which are named.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no state file {path}")
        cache = cls(config)
        try:
            with safe_open(path, "pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
        if metadata.get("format") != STATE_FILE:
            raise ValueError(
                f"{path} is not a state file: its format is {metadata.get('format')!r}, not {STATE_FILE!r}"
            )
        try:
            saved = json.loads(metadata["config"])
            if not isinstance(saved, dict):
                raise ValueError(f"config = {saved!r}")
            cache.seen_tokens = int(metadata["seen_tokens"])
            if not 0 <= cache.seen_tokens < 2**63:
                raise ValueError(f"seen_tokens = {cache.seen_tokens}")
            for name, tensor in tensors.items():
                match = STATE_NAME.fullmatch(name)
                if match is None or not tensor.is_floating_point() or not tensor.ndim:
                    raise ValueError(f"{name} of {tensor.dtype} and the shape {tuple(tensor.shape)} is no state")
                # A copy: numbers in a file lie at any multiple of their own size, complex numbers in memory may not.
                state = torch.view_as_complex(tensor.clone()) if match["complex"] else tensor
                cache.layers[int(match["layer"])].states[match["state"]] = state
            for layer in cache.layers:
                layer.hold(layer.states)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is a damaged state file: {error!r}") from None
        own = _meaning(config)
        if "model_dtype" in metadata and config.dtype is not None:
            saved["dtype"], own["dtype"] = metadata["model_dtype"], _name(config.dtype)
        for name in [*own, *saved]:
            if saved.get(name) != own.get(name) and name not in MEANINGLESS_FIELDS:
                raise ValueError(
                    f"{path} was saved by a model with {name} = {saved.get(name)!r}, this one has {own.get(name)!r}"
                )
        names = {frozenset(layer.states) for layer in cache.layers}
        rows = {len(state) for layer in cache.layers for state in layer.states.values()}
        if len(names) > 1 or len(rows) > 1 or 0 in rows or bool(rows) != (cache.seen_tokens > 0):
            raise ValueError(f"{path} is a damaged state file: its layers do not fit each other")
        return cache


class StaticRecurrentCache(RecurrentCache):
    """
    A cache whose states stay at their addresses: each call writes over them. Compiled decoding needs that where it is
    captured in a CUDA graph; `generate(cache_implementation="static")` makes such a cache. It does all that a
    `RecurrentCache` does, but who keeps its tensors sees them change, and a call whose head or loss fails has advanced
    it; copies (`clone`) have addresses of their own.

    It is for decoding: a call that keeps a graph of gradients is refused with a RuntimeError.
    """

    layer_class = StaticLayer

    def __init__(self, config: PreTrainedConfig):
        # A tensor beside the states: a step would be captured anew for each value of a number.
        self._seen = torch.zeros((), dtype=torch.long)
        super().__init__(config)

    @property
    def seen_tokens(self) -> int:
        return int(self._seen)

    @seen_tokens.setter
    def seen_tokens(self, value: int) -> None:
        if can_be_written(self._seen, self._seen):
            self._seen.fill_(value)
        else:
            self._seen = at_a_fixed_address(torch.full_like(self._seen, value))

    def _count(self, num_tokens: int) -> None:
        target = self._seen.to(self.layers[0].states["recurrent"].device)
        if not can_be_written(self._seen, target):
            self._seen = at_a_fixed_address(target)
        self._seen.add_(num_tokens)

    def _with(self, layers: list[RecurrentLayer]) -> "RecurrentCache":
        other = super()._with(layers)
        other._seen = at_a_fixed_address(self._seen)
        return other

    def advance(self, states: Sequence[dict[str, Tensor]], *args, **kwargs) -> None:
        if any(state.requires_grad for layer in states for state in layer.values()):
            raise RuntimeError("a StaticRecurrentCache is for decoding: call the model under torch.no_grad()")
        super().advance(states, *args, **kwargs)


def _replacing() -> contextlib.AbstractContextManager:
    """The lock, which the compiler does not know: compiled steps are left to one thread."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else _REPLACING


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _meaning(config: PreTrainedConfig) -> dict:
    """The fields of `config` that a state depends on, the family's name first, as JSON gives them back."""
    fields = [name for name in type(config).__dataclass_fields__ if name not in PreTrainedConfig.__dataclass_fields__]
    fields = [name for name in fields if name not in MEANINGLESS_FIELDS and not name.endswith("_token_id")]
    values = {"model_type": config.model_type} | {name: getattr(config, name) for name in fields}
    return json.loads(json.dumps(values))
