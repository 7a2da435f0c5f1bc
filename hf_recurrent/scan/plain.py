"""The scans in plain PyTorch alone, without operators, kernels or a choice between them: what an exported model carries
(`hf-recurrent export --standalone`) in place of ops.py, longhorn.py and elementwise.py.

Each function is that of the same name there as its backend "chunked" computes it, to the bit, from the same
definitions. Arguments are taken as the models give them, without checks, and PyTorch differentiates what it sees.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from . import chunked, longhorn_plain
from .cells import _gateloop, _mingru, _minlstm, _read_gateloop, _s5, discretize, unpadded
from .convolution import _short_convolution, state_after
from .elementwise import _gate, _silu_gate, _skip_gelu, _skip_silu_gate
from .gateloop import _channel_loop
from .gateloop_heads import _by_linear_scan
from .longhorn import _gated_scan
from .norm import _rms_norm
from .ops import started, step_flags
from .reference import COMPLEX_STATE_DTYPES, STATE_DTYPES
from .s5 import _drive, _read, product

__all__ = [
    "COMPLEX_STATE_DTYPES",
    "carried_inputs",
    "channel_loop",
    "discretize",
    "document_borders",
    "drive",
    "gate",
    "gated_scan",
    "gateloop_heads_scan",
    "gateloop_scan",
    "linear",
    "linear_scan",
    "longhorn_scan",
    "mingru_scan",
    "minlstm_scan",
    "of_first",
    "product",
    "read",
    "rms_norm",
    "s5_scan",
    "short_convolution",
    "silu_gate",
    "skip_gelu",
    "state_after",
]


def linear_scan(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_{t-1} + b_t over time, elementwise over channels.

    Args:
        a: coefficients, real or complex, (B, L, D) or any shape that broadcasts to it.
        b: inputs, (B, L, D).
        initial_state: h_{-1}, (B, D); zero when absent.
        mask: (B, L) bool. False is padding: the state passes it untouched.
        reset: (B, L) bool. True is the first token of a document: the state before it is dropped.
        reverse: from the last position to the first, h_t = a_t h_{t+1} + b_t.
        reset_state: the state that documents start from, (D,) or (B, D); zero when absent.

    Returns:
        h, (B, L, D), and the final state, (B, D), in float32 or complex64 for narrower inputs.
    """
    dtype = torch.promote_types(a.dtype, b.dtype)
    return _chunked_scan(dtype, a, b, initial_state, mask, reset, reset_state, reverse)


def _chunked_scan(
    dtype: torch.dtype, a, b, initial_state, mask, reset, reset_state, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The scan, with h in `dtype`, which the inputs of a cell had before its coefficients were computed."""
    wide = torch.promote_types(a.dtype, b.dtype)
    a, b = (x.to(wide)[(None,) * (3 - x.dim())] for x in (a, b))
    if initial_state is not None:
        initial_state = initial_state.to(STATE_DTYPES[wide])
    if reset is not None and reset_state is not None:
        a, b = started(a.to(STATE_DTYPES[wide]), b.to(STATE_DTYPES[wide]), mask, reset, reset_state)
    h, state = chunked.forward(a, b, initial_state, step_flags(mask, reset, reverse), reverse)
    return h.to(dtype), state


def mingru_scan(
    hidden: Tensor,
    gate: Tensor,
    initial_state: Tensor | None = None,
    *,
    positive: bool = False,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = (1 - z_t) h_{t-1} + z_t c_t (arXiv 2410.01201, section 3.1) with z = sigmoid(gate) and the candidate
    c = hidden, or with `positive` g(hidden) of appendix B; (B, L, D) each, the rest as for `linear_scan`."""
    a, b = _mingru(*unpadded(mask, hidden, gate), positive)
    dtype = torch.promote_types(hidden.dtype, gate.dtype)
    return _chunked_scan(dtype, a, b, initial_state, mask, reset, reset_state)


def minlstm_scan(
    hidden: Tensor,
    forget: Tensor,
    input: Tensor,
    initial_state: Tensor | None = None,
    *,
    positive: bool = False,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = f' h_{t-1} + i' c_t with the gates f = sigmoid(forget), i = sigmoid(input) normalised to f' = f / (f + i),
    i' = i / (f + i) (arXiv 2410.01201, section 3.2); the candidate c and the rest as for `mingru_scan`."""
    a, b = _minlstm(*unpadded(mask, hidden, forget, input), positive)
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (hidden, forget, input)))
    return _chunked_scan(dtype, a, b, initial_state, mask, reset, reset_state)


def gateloop_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    transition: str = "polar",
    magnitude: str = "sigmoid",
    phase: str = "identity",
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_{t-1} + k_t v_t and y_t = q_t Re h_t (arXiv 2311.01927, section 3.2, d_h = 1) with
    a = f(alpha) exp(i g(beta)), without beta f(alpha), or for a "cartesian" transition f(|c|) c / |c| with
    c = alpha + i beta; q, k, v: (B, L, D), alpha and beta of any shape that broadcasts to it, the rest as for
    `linear_scan`. Returns y, (B, L, D), and the final state."""
    given = (alpha,) if beta is None else (alpha, beta)
    kind = "real" if beta is None else transition
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (q, k, v, *given)))
    given = (x[(None,) * (3 - x.dim())] for x in given)
    a, b = _gateloop(kind, magnitude, phase, q, *unpadded(mask, k, v, *given))
    h, state = _chunked_scan(b.dtype, a, b, initial_state, mask, reset, reset_state)
    return _read_gateloop(q, h).to(dtype), state


def longhorn_scan(
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Longhorn's recurrence and readout (arXiv 2407.14207, section 3.2):

        beta = sigmoid(dt),  eps = beta / (1 + beta k.k)
        S_t = (1 - eps_t k_t^2) * S_{t-1} + (eps_t x_t) k_t^T,   o_t = S_t q_t

    x, dt: (B, L, D); k, q: (B, L, m); initial_state: (B, D, m); the rest as for `linear_scan`. Returns o, (B, L, D),
    and the final state.
    """
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in (x, dt, k, q)))
    x, dt, k, q = (tensor.to(dtype) for tensor in (*unpadded(mask, x, dt, k), q))
    if initial_state is not None:
        initial_state = initial_state.to(STATE_DTYPES[dtype])
    if reset is None or reset_state is None:
        return longhorn_plain.forward(x, dt, k, q, initial_state, step_flags(mask, reset, reverse), reverse)
    inputs, mask, reset, places = longhorn_plain.with_starts(x, dt, k, q, mask, reset, reset_state)
    o, state = longhorn_plain.forward(*inputs, initial_state, step_flags(mask, reset, reverse), reverse)
    return o.gather(1, places[..., None].expand_as(x)).to(dtype), state


def gateloop_heads_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    initial_state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """H_t = diag(a_t) H_{t-1} + k_t^T v_t and y_t = Re(q_t H_t) in each head (arXiv 2311.01927, section 3.2); q, k:
    (B, L, heads, d_k), v: (B, L, heads, d_v), a: complex or real, of a shape that broadcasts to q's, initial_state:
    (B, heads, d_k, d_v), reset_state: (heads, d_k, d_v); the rest as for `linear_scan`. Returns y, (B, L, heads, d_v),
    and the final state."""
    options = {"mask": mask, "reset": reset, "reset_state": reset_state}
    return _by_linear_scan(linear_scan, q, k, v, a, initial_state, **options)


def s5_scan(
    driven: Tensor,
    rate: Tensor,
    times: Tensor,
    initial_state: Tensor | None = None,
    *,
    discretization: str = "zoh",
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    reset_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The states of dh/dt = r h + u at irregular times (arXiv 2208.04933, section 3.2), by zero-order hold ("zoh") or
    the "bilinear" transform; driven: u, (B, L, D) complex; rate: r, (D,) complex; times: (B, L), each position's time
    since the one before; the rest as for `linear_scan`. Returns h, (B, L, D), and the final state."""
    driven, times = unpadded(mask, driven, times)
    a, b = _s5(discretization == "bilinear", rate, times, driven)
    return _chunked_scan(b.dtype, a, b, initial_state, mask, reset, reset_state, reverse)


# By the definitions that their kernels have.
channel_loop = functools.partial(_channel_loop, gateloop_scan, _silu_gate)
drive = _drive
gated_scan = functools.partial(_gated_scan, longhorn_scan, _skip_silu_gate)
read = _read
rms_norm = _rms_norm
short_convolution = _short_convolution


def carried_inputs(state: Tensor | None, own, mask: Tensor | None, reset: Tensor | None) -> Tensor | None:
    """What a convolution reads before its inputs: an exported model has whole sequences."""
    return state


def document_borders(group: None, position_ids, seq_idx, mask, starts, like, shortest: int) -> tuple:
    """mask and starts: an exported model has whole sequences."""
    return mask, starts


def of_first(x: Tensor) -> Tensor:
    """x: an exported model has whole sequences."""
    return x


def skip_gelu(x: Tensor, skipped: Tensor, d: Tensor, scale: Tensor | None = None) -> Tensor:
    """scale * gelu(x + d * skipped), with the tanh approximation of GELU."""
    return _skip_gelu(x, skipped, d, scale)


def gate(x: Tensor, gate: Tensor, scale: Tensor | None = None) -> Tensor:
    """scale * x * sigmoid(gate)."""
    return _gate(x, gate, None, scale)


def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * silu(gate)."""
    return _silu_gate(x, gate)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias."""
    return F.linear(x, weight, bias)
