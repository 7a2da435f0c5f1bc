"""What one layer remembers: its states, and, where tokens may have to be taken back, the calls that led to them."""

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn


class MixerCall:
    """What a mixer was called with: enough to give its states after any of the call's tokens, if they are asked for.

    That is smaller than all of those states, for Longhorn by the factor `state_size`. The mixer itself is held weakly.
    """

    def __init__(self, mixer: nn.Module, args: tuple, kwargs: dict):
        self.mixer = weakref.ref(mixer)
        self.forgotten = 0  # tokens at the call's beginning, see `last`
        self.taken_back = 0  # tokens at its end, see `first`
        (self.x, self.state, self.mask, self.reset), self.kwargs = args, kwargs
        self.with_grad, device_type = torch.is_grad_enabled(), self.x.device.type
        self.autocast = None  # arguments of torch.autocast, for devices that have it
        if torch.amp.is_autocast_available(device_type):
            enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
            self.autocast = {"device_type": device_type, "dtype": dtype, "enabled": enabled}

    @property
    def num_tokens(self) -> int:
        return self.x.shape[1] - self.taken_back

    @property
    def nbytes(self) -> int:
        given = [self.x, self.mask, self.reset, *self.state.values(), *self.kwargs.values()]
        return sum(value.nbytes for value in given if isinstance(value, Tensor))

    def states_after(self, num_tokens: int) -> dict[str, Tensor]:
        """The states after the first `num_tokens` of this call.

        The rest is masked, not cut off: products of the same shapes give the same bits, and padding changes no state.
        """
        if num_tokens == 0:
            return self.state
        if self.forgotten:
            return self._with_padding().states_after(self.forgotten + num_tokens)
        mixer = self.mixer()
        if mixer is None:
            raise RuntimeError("the model whose calls this cache has recorded is gone, and needed to take tokens back")
        kept = torch.arange(self.x.shape[1], device=self.x.device) < num_tokens
        mask = kept.expand(len(self.x), -1) if self.mask is None else self.mask & kept
        autocast = contextlib.nullcontext() if self.autocast is None else torch.autocast(**self.autocast)
        with torch.set_grad_enabled(self.with_grad), autocast:
            return mixer(self.x, self.state, mask, self.reset, **self.kwargs)[1]

    def first(self, num_tokens: int) -> "MixerCall":
        """The call without what it read after its first `num_tokens`. That is kept, for products of the same shapes."""
        other = copy.copy(self)
        other.taken_back += self.num_tokens - num_tokens
        return other

    def last(self, num_tokens: int) -> "MixerCall":
        """The call without what it read before its last `num_tokens`, in whose place is the state after it. That takes
        another pass of the mixer."""
        forgotten = self.num_tokens - num_tokens
        other = self._along_time(lambda value: value[:, forgotten:].clone())
        other.state, other.forgotten = self.states_after(forgotten), self.forgotten + forgotten
        return other

    def _with_padding(self) -> "MixerCall":
        """The call at its full length, with padding in the place of what is forgotten: see `states_after`."""
        if self.mask is None:
            mask = torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
        else:
            mask = self.mask
        other = self._along_time(
            lambda value: torch.cat([value.new_zeros(len(value), self.forgotten, *value.shape[2:]), value], dim=1)
        )
        other.mask = torch.cat([mask.new_zeros(len(mask), self.forgotten), mask], dim=1)
        other.forgotten = 0
        return other

    def _along_time(self, function: Callable[[Tensor], Tensor]) -> "MixerCall":
        """This call with `function` applied to every tensor that has its rows and tokens."""
        return self._with_inputs(function, self.x.shape[:2])

    def _with_inputs(self, function: Callable[[Tensor], Tensor], sizes: torch.Size) -> "MixerCall":
        """This call with `function` applied to every input whose first dimensions have these sizes."""
        other = copy.copy(self)

        def apply(value):
            return function(value) if isinstance(value, Tensor) and value.shape[: len(sizes)] == sizes else value

        other.x, other.mask, other.reset = apply(self.x), apply(self.mask), apply(self.reset)
        other.kwargs = {name: apply(value) for name, value in self.kwargs.items()}
        return other

    def __deepcopy__(self, memo: dict) -> "MixerCall":
        return self.map(lambda value: value.detach().clone())

    def map(self, function: Callable[[Tensor], Tensor]) -> "MixerCall":
        """This call with `function` applied to every tensor that has its rows."""
        other = self._with_inputs(function, self.x.shape[:1])
        other.state = {name: function(value) for name, value in self.state.items()}
        return other


@contextlib.contextmanager
def recorded_calls(mixers: Sequence[nn.Module]) -> Iterator[list[MixerCall]]:
    """The calls of `mixers` inside the `with` block, in their order; those of other threads, which may use the same
    model at the same time, are not among them."""
    calls: list[MixerCall] = []
    own_thread = threading.get_ident()

    def record(mixer: nn.Module, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() == own_thread:
            calls.append(MixerCall(mixer, args, kwargs))

    handles = [mixer.register_forward_pre_hook(record, with_kwargs=True) for mixer in mixers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class RecurrentLayer:
    """The states of one layer, by name: tensors (B, ...), as its mixer returned them. Empty before the first token."""

    # What `Cache` and `generate` ask of every layer.
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self):
        self.states: dict[str, Tensor] = {}
        self.record_past = False
        self.window: int | None = None
        self.kept_by_crop = 0  # tokens, without a window
        self.calls: list[MixerCall] = []
        self.device: torch.device | None = None  # where the states belong, while they are offloaded

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(state.shape)} {state.dtype}" for name, state in self.states.items())
        return f"{type(self).__name__}({shapes})"

    def __getstate__(self) -> dict:
        """For pickles: the states. What was recorded needs the model, and stays behind."""
        states = {name: state.detach() for name, state in self.states.items()}
        return {**self.__dict__, "states": states, "record_past": False, "calls": []}

    def __deepcopy__(self, memo: dict) -> "RecurrentLayer":
        return self.map(lambda state: state.detach().clone())

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first token."""
        return next((len(state) for state in self.states.values()), -1)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states.values()) + sum(call.nbytes for call in self.calls)

    @property
    def recorded_tokens(self) -> int:
        return sum(call.num_tokens for call in self.calls)

    def map(self, function: Callable[[Tensor], Tensor]) -> "RecurrentLayer":
        """This layer with `function` applied to every state, and to what is recorded."""
        other = type(self)()
        other.record_past, other.window, other.kept_by_crop = self.record_past, self.window, self.kept_by_crop
        other.hold({name: function(state) for name, state in self.states.items()})
        other.calls = [call.map(function) for call in self.calls]
        return other

    def hold(self, states: dict[str, Tensor]) -> None:
        """Takes `states` in place of its own."""
        self.states = states

    def become(self, other: "RecurrentLayer") -> None:
        """Takes what `other` holds and has recorded."""
        self.hold(other.states)
        self.calls = other.calls

    def to_record(self, call: MixerCall | None) -> MixerCall | None:
        """What is to be kept of a call, None where nothing is. It may take another pass of the mixer; the layer stays
        as it is."""
        if not self.record_past or call is None:
            return None
        return call if self.window is None or call.num_tokens <= self.window else call.last(self.window)

    def advance(self, states: dict[str, Tensor], call: MixerCall | None) -> None:
        """Takes `states`, and what `to_record` has given for the call that led to them."""
        self.hold(states)
        if call is None:
            self.calls = []
            return
        self.calls.append(call)
        if self.window is not None:
            self._keep(self.window)

    def crop(self, num_tokens: int) -> None:
        """Forgets the last `num_tokens` of those recorded, and of those before them all but the window."""
        while num_tokens:
            call = self.calls.pop()
            if num_tokens < call.num_tokens:
                self.calls.append(call.first(call.num_tokens - num_tokens))
                break
            num_tokens -= call.num_tokens
        self._keep(self.kept_by_crop if self.window is None else self.window)

    def _keep(self, num_tokens: int) -> None:
        """Forgets the first calls that are not needed for so many tokens. Those held count, taken back or not, lest
        they add up."""
        while self.calls and (not num_tokens or sum(call.x.shape[1] for call in self.calls[1:]) >= num_tokens):
            del self.calls[0]

    def states_before(self, num_tokens: int) -> dict[str, Tensor]:
        """The states before the last `num_tokens` of those recorded."""
        for call in reversed(self.calls):
            if num_tokens <= call.num_tokens:
                return call.states_after(call.num_tokens - num_tokens)
            num_tokens -= call.num_tokens
        return self.states

    def offload(self) -> None:
        """Moves what is held to the CPU, until `prefetch`."""
        device = next((state.device for state in self.states.values()), None)
        if device is not None and device.type != "cpu":
            self.become(self.map(lambda state: state.to("cpu")))
            self.device = device

    def prefetch(self) -> None:
        """Moves what `offload` has taken away back to where it was."""
        if self.device is not None:
            self.become(self.map(lambda state: state.to(self.device)))
            self.device = None

    def reset(self) -> None:
        self.states, self.calls, self.device = {}, [], None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.become(self.map(lambda state: state[indices.to(state.device)]))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.become(self.map(lambda state: state.repeat_interleave(repeats, dim=0)))


def can_be_written(buffer: Tensor, like: Tensor) -> bool:
    """Whether `like` can be written over `buffer`; outside inference mode what was made inside cannot be changed."""
    if (buffer.shape, buffer.dtype, buffer.device) != (like.shape, like.dtype, like.device):
        return False
    return torch.compiler.is_compiling() or buffer.is_inference() <= torch.is_inference_mode_enabled()


def at_a_fixed_address(tensor: Tensor) -> Tensor:
    """A copy that a CUDA graph may write to."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor, guard=False)  # a graph is not compiled again for another cache
    return tensor


class StaticLayer(RecurrentLayer):
    """A layer whose states stay where they are in memory: what comes is written over them."""

    is_compileable = True

    def __init__(self):
        super().__init__()
        self.buffers: dict[str, Tensor] = {}  # also while there is no state, after `reset`

    def hold(self, states: dict[str, Tensor]) -> None:
        self.states = {name: self._written(name, state) for name, state in states.items()}

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "buffers": {}}

    def _written(self, name: str, state: Tensor) -> Tensor:
        if name in self.buffers and can_be_written(self.buffers[name], state):
            return self.buffers[name].copy_(state)
        self.buffers[name] = at_a_fixed_address(state)
        return self.buffers[name]

    def to_record(self, call: MixerCall | None) -> MixerCall | None:
        call = super().to_record(call)
        if call is not None:  # its state is about to be written over
            call.state = {name: state.clone() for name, state in call.state.items()}
        return call
