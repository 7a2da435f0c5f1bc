"""What surrounds the backends: checking of arguments, choice of the backend, and the operators that PyTorch sees.

`hf_recurrent::scan` and `hf_recurrent::scan_backward` are registered with torch.library, with fake kernels and
autograd, so torch.compile keeps each call as one node. They take the name of a cell and the list of its inputs.
"""

import functools
import warnings

import torch
from torch import Tensor

from . import chunked, cpu, cuda, split
from .cells import (
    LINEAR,
    MINGRU_POSITIVE,
    MINGRU_VANILLA,
    MINLSTM_POSITIVE,
    MINLSTM_VANILLA,
    Cell,
    unpadded,
)
from .kernel_cache import BackendUnavailable, turned_off
from .reference import STATE_DTYPES, linear_scan_loop
from .unobserved import unobserved

BACKENDS = ("reference", "chunked", "cpu", "cuda")
COMPILED = {"cpu": cpu, "cuda": cuda}  # each by the type of the devices that it serves


# ---- operators -------------------------------------------------------------------------------------------------------

torch.library.define(
    "hf_recurrent::scan",
    "(str cell, Tensor[] inputs, Tensor? initial_state, Tensor? flags, bool reverse, str backend) -> (Tensor, Tensor)",
)
torch.library.define(
    "hf_recurrent::scan_",
    "(str cell, Tensor[] inputs, Tensor(a!) state, Tensor? flags, bool reverse, str backend) -> Tensor",
)
torch.library.define(
    "hf_recurrent::scan_backward",
    "(str cell, Tensor[] inputs, Tensor h, Tensor? initial_state, Tensor? flags, Tensor grad_h, Tensor grad_final, "
    "bool reverse, str backend) -> (Tensor[], Tensor)",
)


@torch.library.impl("hf_recurrent::scan", "default")
def _scan(cell, inputs, initial_state, flags, reverse, backend):
    if backend in COMPILED:
        return COMPILED[backend].forward(cell, inputs, initial_state, flags, reverse)
    return chunked.forward(*inputs, initial_state, flags, reverse)


@torch.library.impl("hf_recurrent::scan_", "default")
def _scan_in_place(cell, inputs, state, flags, reverse, backend):
    """h alone; the final state takes the place of the one that was given."""
    if backend == "cuda":
        return cuda.forward(cell, inputs, state, flags, reverse, final=state)[0]
    h, final = torch.ops.hf_recurrent.scan(cell, inputs, state, flags, reverse, backend)
    state.copy_(final)
    return h


@torch.library.impl("hf_recurrent::scan_backward", "default")
def _scan_backward(cell, inputs, h, initial_state, flags, grad_h, grad_final, reverse, backend):
    if backend in COMPILED:
        return COMPILED[backend].backward(cell, inputs, h, initial_state, flags, grad_h, grad_final, reverse)
    grad_a, grad_b, grad_initial = chunked.backward(inputs[0], h, initial_state, flags, grad_h, grad_final, reverse)
    return [grad_a, grad_b], grad_initial


@torch.library.register_fake("hf_recurrent::scan")
def _(cell, inputs, initial_state, flags, reverse, backend):
    batch, _, channels = inputs[-1].shape
    h = torch.empty_like(inputs[-1], memory_format=torch.contiguous_format)
    return h, h.new_empty(batch, channels, dtype=STATE_DTYPES[h.dtype])


@torch.library.register_fake("hf_recurrent::scan_")
def _(cell, inputs, state, flags, reverse, backend):
    return torch.empty_like(inputs[-1], memory_format=torch.contiguous_format)


@torch.library.register_fake("hf_recurrent::scan_backward")
def _(cell, inputs, h, initial_state, flags, grad_h, grad_final, reverse, backend):
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    return grads, torch.empty_like(grad_final, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    ctx.cell, tensors, initial_state, flags, ctx.reverse, ctx.backend = inputs
    h, _ = output
    ctx.has_initial = initial_state is not None
    ctx.has_flags = flags is not None
    optional = [x for x in (initial_state, flags) if x is not None]
    ctx.save_for_backward(h, *optional, *tensors)


def _backward(ctx, grad_h, grad_final):
    h, *saved = ctx.saved_tensors
    initial_state = saved.pop(0) if ctx.has_initial else None
    flags = saved.pop(0) if ctx.has_flags else None
    grads, grad_initial = torch.ops.hf_recurrent.scan_backward(
        ctx.cell,
        saved,
        h,
        initial_state,
        flags,
        grad_h.resolve_conj().resolve_neg(),
        grad_final.resolve_conj().resolve_neg(),
        ctx.reverse,
        ctx.backend,
    )
    return None, grads, grad_initial if ctx.has_initial else None, None, None, None


def _no_double_backward(ctx, *grads):
    raise NotImplementedError(
        "the compiled scans are differentiable once (no scan_backward of scan_backward); "
        "backend='reference' can be differentiated any number of times"
    )


torch.library.register_autograd("hf_recurrent::scan", _backward, setup_context=_setup_context)
torch.library.register_autograd("hf_recurrent::scan_backward", _no_double_backward)


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """PyTorch drops the tangents of what enters an operator without a rule for them, and says nothing."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "the compiled and chunked scans have no forward-mode derivative; backend='reference' has one"
        )


# ---- backends --------------------------------------------------------------------------------------------------------


def backend_report() -> dict[str, str]:
    """Each backend's name with "available", or in one line the reason why it is not."""
    compiled = {name: backend.unavailable_reason() or "available" for name, backend in COMPILED.items()}
    return {"reference": "available", "chunked": "available", **compiled}


def available_backends() -> list[str]:
    """The names that `backend=` takes here; compiles the CPU kernels at the first call."""
    return [name for name, state in backend_report().items() if state == "available"]


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


ADVICE = {
    "cpu": "With that mended, a C++ compiler (g++ or clang++) makes the fast CPU kernels at first use.",
    "cuda": "pip install 'hf-recurrent[cuda]' brings the fast CUDA kernels.",
}


@torch.compiler.assume_constant_result
def _unavailable_reason(backend: str) -> str | None:
    return COMPILED[backend].unavailable_reason()


@torch.compiler.assume_constant_result
def _warn_of_fallback(backend: str, reason: str) -> None:
    if turned_off(backend):  # by who knows it
        return
    _warn_once(
        "hf_recurrent runs its scans in plain PyTorch (backend 'chunked'), several times slower: "
        f"{reason}. {ADVICE[backend]}"
    )


def _in_transform() -> bool:
    """Inside vmap, grad, jvp and the like of torch.func, whose tensors no operator of ours takes."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def choose_backend(backend: str | None, device: torch.device) -> str:
    """
    Raises:
        ValueError: no such backend, or one of another device.
        NotImplementedError: a backend other than "reference" inside a transform of torch.func.
        BackendUnavailable: the reason is in `backend_report`.
    """
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))} or None, got {backend!r}")
    if backend != "reference" and _in_transform():
        if backend is not None:
            raise NotImplementedError(f"torch.func's transforms work with backend='reference', not with {backend!r}")
        _warn_once(
            "Inside torch.func's transforms hf_recurrent runs its scans as a loop over the positions (backend "
            "'reference'), which is slow for long sequences."
        )
        return "reference"
    if backend is None:
        if device.type not in COMPILED:
            return "chunked"
        reason = _unavailable_reason(device.type)
        if reason is not None:
            _warn_of_fallback(device.type, reason)
        return device.type if reason is None else "chunked"
    if backend in COMPILED:
        if device.type != backend:
            raise ValueError(f"backend {backend!r} takes tensors on a {backend} device, got tensors on {device}")
        reason = _unavailable_reason(backend)
        if reason is not None:
            raise BackendUnavailable(f"backend {backend!r} is not available: {reason}")
    return backend


# ---- arguments -------------------------------------------------------------------------------------------------------


def step_flags(mask: Tensor | None, reset: Tensor | None, reverse: bool) -> Tensor | None:
    """mask and reset as one byte per position in scan terms (see chunked.MASKED and DROP); padding ignores reset."""
    if mask is None and reset is None:
        return None
    flags = None
    if reset is not None:
        drop = reset if mask is None else reset & mask
        if reverse:
            # Walking backwards, the state is dropped before the position that precedes a document's first token.
            drop = torch.cat([drop[:, 1:], torch.zeros_like(drop[:, :1])], dim=1)
        flags = drop.to(torch.uint8) * chunked.DROP
    if mask is not None:
        masked = (~mask).to(torch.uint8) * chunked.MASKED
        flags = masked if flags is None else flags | masked
    return flags.contiguous()


def check_reverse(reverse: bool) -> None:
    """Raises TypeError: of what is no bool the operators say nothing but their schema."""
    if not isinstance(reverse, bool):
        raise TypeError(f"reverse must be True or False, got {reverse!r}")


def _check_dense(name: str, x: Tensor) -> None:
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {x.layout}")


def check_tensor(name: str, x: Tensor, like: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    _check_dense(name, x)
    if x.dtype not in STATE_DTYPES:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES)
        raise TypeError(f"{name} must be one of {kinds}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, expected {like.device} as the inputs")


def check_mask(name: str, x: Tensor | None, like: Tensor) -> None:
    """Raises TypeError or ValueError where x is neither None nor a (batch, length) bool tensor for `like`."""
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor, got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")
    _check_dense(name, x)
    if x.shape != like.shape[:2]:
        raise ValueError(f"{name} must have the shape (batch, length) = {tuple(like.shape[:2])}, got {tuple(x.shape)}")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, expected {like.device} as the inputs")


def as_state(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A state as the kernels take it."""
    return None if x is None else x.to(dtype).resolve_conj().resolve_neg()


def checked_state(
    state: Tensor | None, sizes: dict[str, int], like: Tensor, dtype: torch.dtype, because: str = ""
) -> Tensor | None:
    """`as_state` of an initial state, if there is one.

    Args:
        sizes: its shape, by the names of its dimensions.
        dtype: what the state is carried in; `because`: why that is real, if it is.

    Raises:
        TypeError, ValueError: it does not fit these; not a tensor, or on another device than `like`.
    """
    if state is None:
        return None
    check_tensor("initial_state", state, like)
    names, shape = ", ".join(sizes), tuple(sizes.values())
    if state.shape != shape:
        raise ValueError(f"initial_state must have the shape ({names}) = {shape}, got {tuple(state.shape)}")
    if state.is_complex() and not dtype.is_complex:
        raise TypeError(f"initial_state is {state.dtype}, but {because}")
    return as_state(state, dtype)


def check_reset_state(x: Tensor, shapes: tuple, like: Tensor, reverse: bool, may_be_complex: bool) -> None:
    """Raises TypeError or ValueError where x is not a `reset_state` of one of `shapes` for `like`."""
    check_tensor("reset_state", x, like)
    if x.shape not in shapes:
        raise ValueError(f"reset_state must have the shape {' or '.join(map(str, shapes))}, got {tuple(x.shape)}")
    if x.is_complex() and not may_be_complex:
        raise TypeError(f"reset_state is {x.dtype}, but the inputs are real")
    if reverse:
        raise ValueError("reset_state goes with reverse=False: backwards, a document starts at its last token")


def check_updatable(state: Tensor | None, dtype: torch.dtype, inputs: list[Tensor]) -> None:
    """Raises ValueError or TypeError where a scan of `inputs` cannot write its final state into `state`."""
    if state is None:
        raise ValueError("update_state needs an initial_state to write into")
    if state.dtype != dtype:
        raise TypeError(f"initial_state must be {dtype} to be updated in place, got {state.dtype}")
    if not state.is_contiguous():
        raise ValueError(f"initial_state must be contiguous to be updated in place, got strides {state.stride()}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state)):
        raise ValueError("update_state overwrites what gradients would need: call it under torch.no_grad()")
    if torch.compiler.is_compiling():
        return
    if state.data_ptr() % state.element_size():
        raise ValueError("initial_state starts at no multiple of its elements' size, and cannot be updated in place")
    if state.is_conj() or state.is_neg():
        raise ValueError("initial_state is a conjugated or negated view, and cannot be updated in place")
    start, end = state.data_ptr(), state.data_ptr() + state.nbytes
    for x in inputs:
        storage = x.untyped_storage()
        if x.numel() and state.numel() and storage.data_ptr() < end and start < storage.data_ptr() + storage.nbytes():
            raise ValueError("initial_state shares memory with an input, and cannot be updated in place")


def started(a: Tensor, b: Tensor, mask: Tensor | None, reset: Tensor, reset_state: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients and inputs, in the state's dtype, with which documents start from `reset_state`, (D,) or (B, D)."""
    drop = (reset if mask is None else reset & mask)[..., None]
    start = reset_state.to(b.dtype) if reset_state.dim() == 1 else reset_state.to(b.dtype)[:, None]
    # Where no document starts a may be anything, which a product with 0 would let into the gradients.
    return a, b + torch.where(drop, a, 0) * start


def _needs_no_checks(inputs: list[Tensor], state: Tensor | None) -> bool:
    """Whether these can go to the CPU kernel as they are: for a decoded token all checks cost more than the scan."""
    last = inputs[-1]
    if not unobserved(*inputs, state) or last.dim() != 3:
        return False
    shape, dtype = last.shape, last.dtype
    for x in inputs:
        if x is None or x.dtype is not dtype or (x.shape != shape and x.shape != shape[2:]):
            return False
    if dtype not in STATE_DTYPES:
        return False
    if state is not None and (state.dtype is not STATE_DTYPES[dtype] or state.shape != (shape[0], shape[2])):
        return False
    return cpu.unavailable_reason() is None


def scan(
    cell: Cell,
    inputs: dict[str, Tensor],
    initial_state: Tensor | None,
    mask: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
    backend: str | None,
    reset_state: Tensor | None = None,
    update_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """The common path of all public scans: checks, promotes, picks the backend, calls the operator. `inputs` by their
    names; the last one has the full shape (B, L, D), the others broadcast to it."""
    check_reverse(reverse)
    given_state = initial_state
    names, tensors = list(inputs), list(inputs.values())
    last = tensors[-1]
    is_bare = backend is mask is reset is reset_state is None and not update_state
    if is_bare and last is not None and _needs_no_checks(tensors, initial_state):
        return cpu.forward(cell.name, tensors, initial_state, None, reverse)
    for name, x in reversed(inputs.items()):  # the last one first, which the others are compared with
        check_tensor(name, x, last)
    if last.dim() != 3:
        raise ValueError(f"{names[-1]} must have the shape (batch, length, channels), got {tuple(last.shape)}")
    batch, length, channels = last.shape
    for name, x in inputs.items():
        trailing = last.shape[3 - x.dim() :] if x.dim() <= 3 else ()
        if x.dim() > 3 or any(have not in (1, want) for have, want in zip(x.shape, trailing, strict=True)):
            raise ValueError(f"{name} has the shape {tuple(x.shape)}, which does not broadcast to {tuple(last.shape)}")
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    # Leading dimensions only: the kernels read broadcast ones through zero strides.
    tensors = [x.to(dtype)[(None,) * (3 - x.dim())].resolve_conj().resolve_neg() for x in tensors]
    state_dtype = STATE_DTYPES[dtype]
    sizes = {"batch": batch, "channels": channels}
    initial_state = checked_state(initial_state, sizes, last, state_dtype, f"the inputs are real ({dtype})")
    check_mask("mask", mask, last)
    check_mask("reset", reset, last)
    if update_state:
        check_updatable(given_state, state_dtype, tensors)

    def coefficients(tensors):
        return cell.coefficients(*(tensors if cell is LINEAR else unpadded(mask, *tensors)))

    if reset_state is not None:
        check_reset_state(reset_state, ((channels,), (batch, channels)), last, reverse, state_dtype.is_complex)
        if reset is not None:
            a, b = started(*(x.to(state_dtype) for x in coefficients(tensors)), mask, reset, reset_state)
            h, final_state = scan(
                LINEAR,
                {"a": a, "b": b},
                given_state,
                mask,
                reset,
                reverse,
                backend,
                update_state=update_state,
            )
            return h.to(dtype), final_state
    backend = choose_backend(backend, last.device)
    refuse_forward_mode(*(() if backend == "reference" else (*tensors, initial_state)))
    flags = None if backend == "reference" else step_flags(mask, reset, reverse)

    def run(tensors, initial_state):
        if backend in COMPILED:
            return torch.ops.hf_recurrent.scan(cell.name, list(tensors), initial_state, flags, reverse, backend)
        a, b = coefficients(tensors)
        if backend == "reference":
            h, final_state = linear_scan_loop(a, b, initial_state, mask, reset, reverse)
        else:
            h, final_state = torch.ops.hf_recurrent.scan("linear", [a, b], initial_state, flags, reverse, backend)
        return h.to(dtype), final_state

    if group := split.current_group():
        check_split(initial_state, reverse)

        def kept(tensors):
            return split.kept_state(coefficients(tensors)[0].to(state_dtype), length, mask, reset)

        return split.scan(group, run, kept, tensors)
    if update_state:
        if backend == "reference":
            h, final_state = run(tensors, initial_state)
            return h, given_state.copy_(final_state)
        compiled = backend in COMPILED
        name, operands = (cell.name, tensors) if compiled else ("linear", list(coefficients(tensors)))
        h = torch.ops.hf_recurrent.scan_(name, operands, given_state, flags, reverse, backend)
        return h.to(dtype), given_state
    return run(tensors, initial_state)


def check_split(initial_state: Tensor | None, reverse: bool) -> None:
    """Raises ValueError where a scan cannot run over a sequence that is split over processes."""
    if initial_state is not None:
        raise ValueError("initial_state must be None where the sequence is split over processes: it comes from them")
    if reverse:
        raise ValueError("reverse must be False where the sequence is split over processes")


def linear_scan(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
    reset_state: Tensor | None = None,
    update_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """The linear recurrence h_t = a_t h_{t-1} + b_t over time, elementwise over channels.

    Equivalent to, for each row of the batch:

        h = initial_state
        for t in range(L):
            if mask[t]:
                h = a[t] * (reset_state if reset[t] else h) + b[t]
            outputs[t] = h
        final_state = h

    up to rounding, which is measured by a channel's largest state: a state may be taken to be gone where the product of
    the coefficients since has come below 5e-20, as where time is divided among threads. On GPUs and by the backend
    "chunked" the products of some neighbouring coefficients are formed too (of 16 at most on GPUs), and where they
    overflow, with coefficients far above one, so does the result, though h itself may not.

    Args:
        a: coefficients, real or complex, (B, L, D) or any shape that broadcasts to it; never copied to the full shape.
        b: inputs, (B, L, D).
        initial_state: h_{-1}, (B, D); zero when absent.
        mask: (B, L) bool. False is padding: the state passes it untouched, and h repeats the state.
        reset: (B, L) bool. True is the first token of a document: the state before it is dropped. Ignored at padding.
        reverse: from the last position to the first, h_t = a_t h_{t+1} + b_t. `initial_state` is then the state after
            the last position and `final_state` the one at the first. `reset` still marks first tokens: the state is
            dropped on the step from a document's first token to the position before it.
        reset_state: the state that documents start from, (D,) or (B, D); zero when absent. Not with `reverse`.
        backend: "reference" (the loop), "chunked" (plain PyTorch, any device), "cpu" or "cuda" (compiled); None picks
            the fastest that can run.
        update_state: write the final state into `initial_state`, which is then what is returned as final_state: for
            decoding at a fixed address, as in a captured CUDA graph. Without gradients; `initial_state` is contiguous
            and of the state's dtype, and shares no memory with the inputs.

    Returns:
        h, (B, L, D) in the inputs' promoted dtype, and final_state, (B, D), in float32 or complex64 (float64 or
        complex128 for such inputs), in which the state is also carried. Both are differentiable, with respect to a, b
        and initial_state.

    Raises:
        TypeError: a dtype that is not supported, or a mask or reset that is not bool.
        ValueError: shapes or devices that do not fit; an unknown backend; a state that cannot be updated.
        BackendUnavailable: the named backend cannot run here (the message says why).
    """
    return scan(LINEAR, {"a": a, "b": b}, initial_state, mask, reset, reverse, backend, reset_state, update_state)


def mingru_scan(
    hidden: Tensor,
    gate: Tensor,
    initial_state: Tensor | None = None,
    *,
    positive: bool = False,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
    reset_state: Tensor | None = None,
    update_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """The minGRU cell, fused with its recurrence: h_t = (1 - z_t) h_{t-1} + z_t c_t (arXiv 2410.01201, section 3.1).

    Args:
        hidden: pre-activation of the candidate c, (B, L, D): c = hidden, or with `positive` (the log-space variant,
            appendix B) c = g(hidden), g(x) = x + 0.5 for x >= 0 and sigmoid(x) below.
        gate: pre-activation of the update gate, (B, L, D): z = sigmoid(gate).
        initial_state, mask, reset, reset_state, reverse, backend, update_state: as for `linear_scan`; real only.

    Returns:
        h, (B, L, D), and final_state, (B, D), as `linear_scan` does.

    Raises:
        What `linear_scan` raises; TypeError for complex inputs.
    """
    _check_real_and_alike(hidden=hidden, gate=gate)
    cell = MINGRU_POSITIVE if positive else MINGRU_VANILLA
    return scan(
        cell, {"hidden": hidden, "gate": gate}, initial_state, mask, reset, reverse, backend, reset_state, update_state
    )


def minlstm_scan(
    hidden: Tensor,
    forget: Tensor,
    input: Tensor,
    initial_state: Tensor | None = None,
    *,
    positive: bool = False,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
    reset_state: Tensor | None = None,
    update_state: bool = False,
) -> tuple[Tensor, Tensor]:
    """The minLSTM cell, fused with its recurrence: h_t = f' h_{t-1} + i' c_t with the gates f = sigmoid(forget) and
    i = sigmoid(input) normalised to f' = f / (f + i), i' = i / (f + i) (arXiv 2410.01201, section 3.2).

    Args:
        hidden: pre-activation of the candidate c, (B, L, D), as for `mingru_scan`.
        forget, input: pre-activations of the two gates, (B, L, D).
        positive, initial_state, mask, reset, reset_state, reverse, backend, update_state: as for `mingru_scan`.

    Returns:
        h, (B, L, D), and final_state, (B, D), as `linear_scan` does.

    Raises:
        What `mingru_scan` raises.
    """
    _check_real_and_alike(hidden=hidden, forget=forget, input=input)
    cell = MINLSTM_POSITIVE if positive else MINLSTM_VANILLA
    inputs = {"hidden": hidden, "forget": forget, "input": input}
    return scan(cell, inputs, initial_state, mask, reset, reverse, backend, reset_state, update_state)


def _check_real_and_alike(**inputs: Tensor) -> None:
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_complex():
            raise TypeError(f"{name} must be real, got {x.dtype}")
    first, *others = inputs.values()
    if any(x.shape != first.shape for x in others):
        *names, last = inputs
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs.values())
        raise ValueError(f"{', '.join(names)} and {last} must have one shape, got {shapes}")
