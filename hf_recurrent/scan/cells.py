"""The cells: each recurrence, and what is fused with it, in plain PyTorch, beside the name of its kernel."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..transitions import MAGNITUDE_ACTIVATIONS, PHASE_ACTIVATIONS, polar
from .reference import COMPLEX_STATE_DTYPES, STATE_DTYPES


@dataclass(frozen=True)
class Cell:
    """
    A recurrence and what is fused with it, as plain PyTorch defines it on every device.

    Args:
        coefficients: (*inputs) -> (a, b).
        kernel: its twin of csrc/cells.h, which is tested against it, with `State` for what a real number of the inputs
            is computed with.
        has_complex_state: though its inputs are real.
        timed: its second input is a real number for each position, (B, L), which all channels have in common.
        read: (*inputs, h) -> y, where not the state itself is given.
    """

    name: str
    coefficients: Callable[..., tuple[Tensor, Tensor]]
    kernel: str
    has_complex_state: bool = False
    timed: bool = False
    read: Callable[..., Tensor] | None = None

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the state is carried in where the inputs have `dtype`."""
        return (COMPLEX_STATE_DTYPES if self.has_complex_state else STATE_DTYPES)[dtype]

    def parted(self, inputs: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """The inputs that have channels, and the one that has none.

        Raises:
            ValueError: the rate of a timed cell is not the same at all positions.
        """
        if not self.timed:
            return inputs, None
        if inputs[0].shape[:2] != (1, 1):
            raise ValueError(f"the rate must have the shape (1, 1, channels), got {tuple(inputs[0].shape)}")
        return [inputs[0], *inputs[2:]], inputs[1]


def _linear(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a, b


def _in_state_dtype(*inputs: Tensor) -> list[Tensor]:
    """As in the kernels, which compute with what the state is carried in."""
    dtype = STATE_DTYPES[functools.reduce(torch.promote_types, (x.dtype for x in inputs))]
    return [x.to(dtype) for x in inputs]


def _candidate(hidden: Tensor, positive: bool) -> Tensor:
    return torch.where(hidden >= 0, hidden + 0.5, torch.sigmoid(hidden)) if positive else hidden


def _mingru(hidden: Tensor, gate: Tensor, positive: bool) -> tuple[Tensor, Tensor]:
    hidden, gate = _in_state_dtype(hidden, gate)
    # sigma(-gate) is 1 - z without the cancellation.
    return torch.sigmoid(-gate), torch.sigmoid(gate) * _candidate(hidden, positive)


def _minlstm(hidden: Tensor, forget: Tensor, input: Tensor, positive: bool) -> tuple[Tensor, Tensor]:
    hidden, forget, input = _in_state_dtype(hidden, forget, input)
    # f / (f + i) as a logistic function of log f - log i, so that two shut gates keep their proportion.
    difference = torch.nn.functional.logsigmoid(forget) - torch.nn.functional.logsigmoid(input)
    return torch.sigmoid(difference), torch.sigmoid(-difference) * _candidate(hidden, positive)


def unpadded(mask: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What enters `coefficients`, (B, L, ...) each, with zeros at padding: what is not finite there would get into
    gradients, as zero times a slope. What all positions share is left as it is."""
    if mask is None:
        return inputs
    length = mask.shape[1]
    return tuple(
        torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, 0) if x.shape[1] == length else x for x in inputs
    )


LINEAR = Cell("linear", _linear, "LinearCell<State>")
MINGRU_VANILLA = Cell("mingru_vanilla", functools.partial(_mingru, positive=False), "MinGRUCell<State, false>")
MINGRU_POSITIVE = Cell("mingru_positive", functools.partial(_mingru, positive=True), "MinGRUCell<State, true>")
MINLSTM_VANILLA = Cell("minlstm_vanilla", functools.partial(_minlstm, positive=False), "MinLSTMCell<State, false>")
MINLSTM_POSITIVE = Cell("minlstm_positive", functools.partial(_minlstm, positive=True), "MinLSTMCell<State, true>")


# ---- GateLoop (arXiv 2311.01927) -------------------------------------------------------------------------------------


def _transition(kind: str, magnitude: str, phase: str, alpha: Tensor, beta: Tensor | None = None) -> Tensor:
    """a of `gateloop_scan`; `kind` is its transition, or "real" without beta."""
    size, angle = alpha, beta
    if kind == "cartesian":
        c = torch.complex(alpha, beta)
        size, angle = c.abs(), c.angle()
    size = MAGNITUDE_ACTIVATIONS[magnitude](size)
    if kind == "real":
        return size
    return polar(size, PHASE_ACTIVATIONS[phase](angle))


def _gateloop(kind: str, magnitude: str, phase: str, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, *given = _in_state_dtype(*inputs)
    a = _transition(kind, magnitude, phase, *given)
    return a, (k * v).to(a.dtype)


def _read_gateloop(q: Tensor, *others: Tensor) -> Tensor:
    """q Re h, h being the last."""
    h = others[-1]
    return q * (h.real if h.is_complex() else h)


def _gateloop_cell(kind: str, magnitude: str, phase: str) -> Cell:
    switches = [str(magnitude == "exponential").lower()]
    if kind == "polar":
        switches.append(str(phase == "tanh").lower())
    return Cell(
        f"gateloop_{kind}_{magnitude}" + ("_tanh" if phase == "tanh" else ""),
        functools.partial(_gateloop, kind, magnitude, phase),
        f"GateLoopCell<State, {kind.capitalize()}Transition<State, {', '.join(switches)}>>",
        has_complex_state=kind != "real",
        read=_read_gateloop,
    )


# By transition, magnitude and phase.
GATELOOP = {
    key: _gateloop_cell(*key)
    for magnitude in MAGNITUDE_ACTIVATIONS
    for key in [
        ("polar", magnitude, "identity"),
        ("polar", magnitude, "tanh"),
        ("real", magnitude, "identity"),
        ("cartesian", magnitude, "identity"),
    ]
}


# ---- S5 (arXiv 2208.04933) -------------------------------------------------------------------------------------------


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 numbers of half the digits, whose sum is x (Veltkamp 1968)."""
    high = 4097 * x
    high = high - (high - x)
    return high, x - high


def _rest_of_product(x: Tensor, y: Tensor) -> Tensor:
    """What rounding takes off x y, both float32 (Dekker 1971), since not every device has a wider type. At most 0.01,
    and no function of x and y to be differentiated."""
    x, y = x.detach(), y.detach()
    (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
    rest = ((x_high * y_high - x * y) + x_high * y_low + x_low * y_high) + x_low * y_low
    return rest.clamp(-0.01, 0.01)


def discretize(poles: Tensor, step: Tensor, bilinear: bool, rest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """
    Args:
        poles: Lambda, (P',) complex.
        step: Delta, (..., P') or (..., 1).
        bilinear: by the bilinear transform, else by zero-order hold.
        rest: what rounding takes off the angles Im(Lambda) Delta, for zero-order hold.

    Returns:
        Lambda-bar and the gain of B-bar = gain * B~, (..., P') complex.
    """
    z = poles * step
    if bilinear:
        inverse = 1 / (1 - z / 2)
        return inverse * (1 + z / 2), inverse * step
    # (e^z - 1) / Lambda, whose derivative cancels at small steps: there it is the series of (e^z - 1) / z, to double
    # precision, times the step. That product's derivative cancels at large steps.
    small = z.abs() < 0.25
    near, far = torch.where(small, z, 0), torch.where(small, 1, z)
    series = 1 + near / 13
    for n in range(12, 1, -1):
        series = 1 + near / n * series
    power, less_one = torch.exp(z), torch.expm1(far).detach()
    if rest is not None:  # e^(i rest) - 1 is missing
        turn = torch.complex(-2 * torch.sin(rest / 2).square(), torch.sin(rest))
        less_one = less_one + (power * turn).detach()
        power = power + power * turn
    # The derivative is e^z, which for what forgets is small. That of PyTorch's expm1 is the function itself, add one.
    less_one = less_one + (power - power.detach())
    return power, torch.where(small, series * step, less_one / torch.where(small, 1, poles))


def _s5(bilinear: bool, rate: Tensor, times: Tensor, driven: Tensor) -> tuple[Tensor, Tensor]:
    times = times[..., None]
    # Of long times an angle, rounded, is off by more than its sine is.
    rest = _rest_of_product(rate.imag, times) if rate.dtype == torch.complex64 else None
    a, gain = discretize(rate, times, bilinear, rest)
    return a, gain * driven


S5 = {  # by discretisation
    "zoh": Cell("s5_zoh", functools.partial(_s5, False), "S5Cell<State, ZeroOrderHold>", timed=True),
    "bilinear": Cell("s5_bilinear", functools.partial(_s5, True), "S5Cell<State, Bilinear>", timed=True),
}
STATE_CELLS = (LINEAR, MINGRU_VANILLA, MINGRU_POSITIVE, MINLSTM_VANILLA, MINLSTM_POSITIVE)
READING_CELLS = tuple(GATELOOP.values())
TIMED_CELLS = tuple(S5.values())
BY_NAME = {cell.name: cell for cell in (*STATE_CELLS, *READING_CELLS, *TIMED_CELLS)}
