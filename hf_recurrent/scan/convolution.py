"""The short causal depthwise convolution that comes before a recurrence, over the real tokens of each row's document.

By one kernel for each direction (csrc/convolution.h), on CPUs and NVIDIA GPUs; where there is none, in plain PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from transformers.utils import is_tracing

from . import convolution_cuda, cpu, recomputed
from .ops import check_mask, choose_backend, step_flags
from .reference import STATE_DTYPES
from .unobserved import unobserved

MOST_TAPS = {"cpu": 32, "cuda": convolution_cuda.MOST_TAPS}
_SEGMENT = 64  # positions that a thread takes at least

# batch, length, channels, threads, segments, taps, silu, flags; x, state; weight, bias, out, new_state; grad_out;
# grad_new_state, grad_x, grad_state, grad_weight
_PROBLEM = cpu.Problem("28q")
_NO_GRADS = (*cpu.NOTHING, 0, 0, 0, 0)


# ---- the operator ----------------------------------------------------------------------------------------------------


def _call_cpu(backwards: bool, x, weight, state, bias, flags, silu: bool, segments: int, *fields: int) -> None:
    """`fields`: those of the problem from `out` on."""
    state, bias = (t if t is None else t.contiguous() for t in (state, bias))
    x, weight = cpu.rows(x), weight.contiguous()
    fields = (
        *x.shape, cpu.threads_for(x.numel()), segments, weight.shape[2], silu, cpu.pointer(flags), *cpu.describe(x),
        *cpu.describe_if(state), weight.data_ptr(), cpu.pointer(bias), *fields,
    )  # fmt: skip
    cpu.call("convolution_cpu", "hfr_short_convolution", x.dtype, _PROBLEM, fields, backwards)


def _segments(x: Tensor) -> int:
    return max(1, min(cpu.threads_for(x.numel()), x.shape[1] // _SEGMENT))


def _empty(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """y, and a state."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, y.new_empty(x.shape[0], weight.shape[2] - 1, x.shape[2])


def _cpu_forward(x, weight, state, bias, flags, silu: bool) -> tuple[Tensor, Tensor]:
    y, new_state = _empty(x, weight)
    addresses = y.data_ptr(), new_state.data_ptr()
    _call_cpu(False, x, weight, state, bias, flags, silu, _segments(x), *addresses, *_NO_GRADS)
    return y, new_state


def _cpu_backward(x, weight, state, bias, flags, silu: bool, grad_y, grad_new_state) -> tuple[Tensor, Tensor, Tensor]:
    """As `convolution_cuda.backward`."""
    grad_y, grad_new_state = cpu.rows(grad_y), grad_new_state.contiguous()
    grad_x, grad_state = torch.empty(x.shape, dtype=x.dtype), torch.empty_like(grad_new_state)
    segments = _segments(x)
    grad_weight = torch.empty(x.shape[0] * segments, weight.shape[2] + 1, x.shape[2], dtype=STATE_DTYPES[x.dtype])
    addresses = (t.data_ptr() for t in (grad_new_state, grad_x, grad_state, grad_weight))
    _call_cpu(
        True, x, weight, state, bias, flags, silu, segments, 0, 0, *cpu.describe(grad_y), *addresses,
    )  # fmt: skip
    return grad_x, grad_state, grad_weight


def _forward(inputs, states, flags, silu: bool, backend: str) -> tuple[Tensor, Tensor]:
    (x, weight), (state, bias) = inputs, states
    if not x.numel():
        y, new_state = _empty(x, weight)
        return y, new_state.zero_() if state is None else new_state.copy_(state)
    run = convolution_cuda.forward if backend == "cuda" else _cpu_forward
    return run(x, weight, state, bias, flags, silu)


def _backward(inputs, states, flags, grad_y, grad_new_state, silu: bool, backend: str) -> tuple[Tensor, ...]:
    (x, weight), (state, bias) = inputs, states
    if x.numel():
        run = convolution_cuda.backward if backend == "cuda" else _cpu_backward
        grad_x, grad_state, parts = run(x, weight, state, bias, flags, silu, grad_y, grad_new_state)
    else:
        grad_x, grad_state = torch.empty_like(x), grad_new_state.clone(memory_format=torch.contiguous_format)
        parts = x.new_zeros(1, weight.shape[2] + 1, x.shape[2])
    sums = parts.sum(0)
    grad_weight = sums[:-1].T.contiguous()[:, None].to(weight.dtype)
    return grad_x, grad_weight, grad_state, x.new_empty(0) if bias is None else sums[-1].to(bias.dtype)


recomputed.define("short_convolution", ["x", "weight"], ["state", "bias"], _forward, _backward, _empty, option="silu")


# ---- the function ----------------------------------------------------------------------------------------------------


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """
    y_t = bias + sum_j weight[:, 0, j] * x_{t - k + 1 + j}

    Differentiable once by the kernels, any number of times in plain PyTorch.

    Args:
        x: (B, L, D).
        weight, bias: (D, 1, k) and (D,), or no bias.
        state: the k - 1 real inputs before x, (B, k - 1, D); zeros when None.
        mask: (B, L) bool, False at padding: no tap lands on it, and it changes no state.
        reset: (B, L) bool, True at the first token of a document: no tap reaches over it.
        silu: whether y goes through a SiLU.

    Returns:
        y, (B, L, D), zero at padding, and the new state, (B, k - 1, D).

    Raises:
        ValueError: mask or reset of another shape; tensors on different devices.
        TypeError: mask or reset that is not of booleans.
    """
    if unobserved(x, weight, bias, state, mask, reset):
        runs = x.numel() and _fits("cpu", x, weight, bias, state)
        if not runs or cpu.kernel("convolution_cpu", "hfr_short_convolution", x.dtype, _PROBLEM) is None:
            return _short_convolution(x, weight, bias, state, mask=mask, reset=reset, silu=silu)
        check_mask("mask", mask, x)
        check_mask("reset", reset, x)
        return _cpu_forward(x, weight, state, bias, step_flags(mask, reset, reverse=False), silu)
    given, device = x.dtype, x.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and given != torch.float64:  # as PyTorch's convolutions do
        x, weight, bias, state = (
            None if t is None else t.to(torch.get_autocast_dtype(device)) for t in (x, weight, bias, state)
        )
    for name, t in (("weight", weight), ("bias", bias), ("state", state)):
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} is on {t.device}, expected {x.device} as the inputs")
    # Its kernels drop the tangents of forward-mode derivatives.
    backend = "reference" if getattr(forward_ad, "_current_level", 0) >= 0 else choose_backend(None, x.device)
    if backend in MOST_TAPS and _fits(backend, x, weight, bias, state):
        check_mask("mask", mask, x)
        check_mask("reset", reset, x)
        flags = step_flags(mask, reset, reverse=False)
        y, state = torch.ops.hf_recurrent.short_convolution(x.resolve_neg(), weight, state, bias, flags, silu, backend)
    else:
        y, state = _short_convolution(x, weight, bias, state, mask=mask, reset=reset, silu=silu)
    return y, state.to(given)


def _fits(backend: str, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> bool:
    """Whether the kernels take tensors such as these."""
    dtype, (batch, _, channels), taps = x.dtype, x.shape, weight.shape[2]
    return (
        dtype in cpu.REAL
        and taps <= MOST_TAPS[backend]
        and weight.dtype is dtype
        and weight.shape == (channels, 1, taps)
        and (bias is None or (bias.dtype is dtype and bias.shape == (channels,)))
        and (state is None or (state.dtype is dtype and state.shape == (batch, taps - 1, channels)))
    )


# ---- in plain PyTorch ------------------------------------------------------------------------------------------------


def _short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    y, state = _convolve_documents(x, weight, bias, state, mask, reset)
    return F.silu(y) if silu else y, state


def _convolve_documents(x, weight, bias, state, mask, reset) -> tuple[Tensor, Tensor]:
    length, taps_back = x.shape[1], weight.shape[2] - 1
    state = _zeros(x, taps_back) if state is None else state.to(x.dtype)
    inputs = torch.cat([state, x], dim=1)  # (B, k - 1 + L, D)
    if mask is None and reset is None:
        y = _weigh(inputs, weight, bias)[:, None] if length == 1 else _convolve(inputs, weight, bias)
        # A copy: the state would otherwise keep the whole of `inputs` alive.
        return y, inputs[:, length:].clone()

    taps, keep = _taps(x, taps_back, mask, reset)
    rows = torch.arange(x.shape[0], device=x.device)
    last = _gather(inputs, rows[:, None], taps[:, -1], keep[:, -1])  # (B, k, D)
    taps, keep = taps[:, :-1], keep[:, :-1]
    if is_tracing(x):
        y = _weigh(_gather(inputs, rows[:, None, None], taps, keep), weight, bias)
    else:
        # Nearly all tokens have their taps right before them and in their document; the others are done over.
        contiguous = torch.arange(length, device=x.device)[:, None] + torch.arange(taps_back + 1, device=x.device)
        apart = ((taps != contiguous) | ~keep).any(-1)
        at = (apart if mask is None else apart & mask).nonzero(as_tuple=True)
        y = _convolve(inputs, weight, bias)
        done_over = _weigh(_gather(inputs, at[0][:, None], taps[at], keep[at]), weight, bias)
        y = y.index_put(at, done_over.to(y.dtype))
    return (y if mask is None else torch.where(mask[..., None], y, 0)), last[:, 1:]


def state_after(x: Tensor, taps_back: int, mask: Tensor | None, reset: Tensor | None) -> Tensor:
    """The state after x alone, (B, taps_back, D)."""
    inputs = torch.cat([_zeros(x, taps_back), x], dim=1)
    if mask is None and reset is None:
        return inputs[:, x.shape[1] :]
    taps, keep = _taps(x, taps_back, mask, reset)
    rows = torch.arange(x.shape[0], device=x.device)
    return _gather(inputs, rows[:, None], taps[:, -1], keep[:, -1])[:, 1:]


def _zeros(x: Tensor, taps_back: int) -> Tensor:
    return x.new_zeros(x.shape[0], taps_back, x.shape[2])


def _taps(x: Tensor, taps_back: int, mask: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the taps of each token lie in [state, x], (B, L + 1, k) in the order of the weights, and which of them
    lie in the token's own document; the last entry is the token that would come next, less its own tap."""
    batch, length = x.shape[:2]
    size = taps_back + length
    position = torch.arange(size, device=x.device).expand(batch, -1)
    real = position.new_ones(batch, size, dtype=torch.bool)
    if mask is not None:
        # Not joined by `cat`: inductor lays the mask into its output, and takes the strides for those of every length.
        real = F.pad(mask, (taps_back, 0), value=True)
    # order[n] is the position of the n-th real input, rank[p] the n of position p (or of the last real one before)
    rank = real.cumsum(1) - 1
    order = torch.zeros(batch, size + 1, dtype=torch.long, device=x.device)
    order = order.scatter(1, torch.where(real, rank, size), position)
    rank = torch.cat([rank[:, taps_back:], rank[:, -1:]], dim=1)  # (B, L + 1)
    # Below 0 only at padding before the first real token, where any tap will do.
    nth = (rank[:, :, None] - torch.arange(taps_back, -1, -1, device=x.device)).clamp(min=0)
    taps = order.gather(1, nth.flatten(1)).view_as(nth)
    if reset is None:
        return taps, torch.ones_like(taps, dtype=torch.bool)
    if mask is not None:
        reset = reset & mask
    document = torch.cat([reset.new_zeros(batch, taps_back), reset], dim=1).cumsum(1)
    own = torch.cat([document[:, taps_back:], document[:, -1:]], dim=1)
    return taps, document.gather(1, taps.flatten(1)).view_as(taps) == own[:, :, None]


def _gather(inputs: Tensor, rows: Tensor, taps: Tensor, keep: Tensor) -> Tensor:
    """The inputs (..., k, D) under the taps (..., k), zero where they are not kept."""
    return torch.where(keep[..., None], inputs[rows, taps], 0)


def _weigh(windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., k, D) -> (..., D): the convolution at chosen positions."""
    y = (windows * weight.squeeze(1).T).sum(-2)
    return y if bias is None else y + bias


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, k - 1 + L, D) -> (B, L, D). As a convolution of images one pixel high whose channels come last in
    memory, which is what `inputs` is already: conv1d would transpose it."""
    image, weight = inputs.transpose(1, 2).unsqueeze(2), weight.unsqueeze(2)
    weight = weight.contiguous(memory_format=torch.channels_last)
    return F.conv2d(image, weight, bias, groups=len(weight)).squeeze(2).transpose(1, 2)
