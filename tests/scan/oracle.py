"""The float64 loop as oracle, the inputs it is fed, and how close to it a dtype has to come."""

import torch

from hf_recurrent.scan import gateloop_scan, linear_scan, mingru_scan, minlstm_scan
from hf_recurrent.scan.cells import GATELOOP

# Largest error of an element, as a fraction of the largest element of the tensor, against the float64 loop on the same
# inputs. For 16-bit types this is one rounding of the result (2^-9, 2^-12) and, in gradients, that of the saved
# outputs.
TOLERANCE = {
    torch.float64: 1e-14,
    torch.complex128: 1e-14,
    torch.float32: 2e-6,
    torch.complex64: 2e-6,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}
REALS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]

# (batch, length, channels): every odd length and width once, and the corners.
SHAPES = [(1, 1, 1), (3, 2, 33), (2, 7, 64), (5, 33, 1), (2, 1000, 33), (1, 4097, 64), (2, 33, 768), (1, 7, 2500)]


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=wide(dtype)).to(dtype)


def coefficients(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Long and short memories, a few exact zeros and ones; phases and both signs."""
    magnitude = torch.sigmoid(3 * torch.randn(*shape, dtype=torch.float64) + 1)
    magnitude[torch.rand(*shape) < 0.05] = 0
    magnitude[torch.rand(*shape) < 0.05] = 1
    if dtype.is_complex:
        return torch.polar(magnitude, 6 * torch.rand(*shape, dtype=torch.float64)).to(dtype)
    return (magnitude * torch.where(torch.rand(*shape) < 0.1, -1, 1)).to(dtype)


def mask_and_reset(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padding on the left, on the right and inside, a whole row of it, and documents that start on padding too."""
    mask = torch.rand(batch, length) < 0.8
    mask[0, : length // 3] = False
    mask[-1, length - length // 4 :] = False
    if batch > 2:
        mask[1] = False
    return mask, torch.rand(batch, length) < 0.15


def run(scan, inputs, initial_state, weights, **options):
    """Outputs, final state and the gradients of all inputs and of the initial state, under fixed output weights."""
    leaves = [x.detach().clone().requires_grad_() if x.is_contiguous() else x.detach().requires_grad_() for x in inputs]
    state = None if initial_state is None else initial_state.detach().clone().requires_grad_()
    h, final = scan(*leaves, state, **options)
    weight = weights[1]
    if final.is_complex() and not weight.is_complex():  # of a cell whose inputs are real
        weight = torch.complex(weight, weight.flip(-1))
    loss = (h.to(wide(h.dtype)) * weights[0]).sum() + (final.to(wide(final.dtype)) * weight).sum()
    wanted = leaves if state is None else [*leaves, state]
    grads = torch.autograd.grad(loss.real if loss.is_complex() else loss, wanted)
    return h, final, *grads


def alike(results):
    """The first of these, which must all be the same bit for bit."""
    first, *others = results
    # NaNs fail later; torch.equal compares values, and no output is a negative zero in one run only.
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True)), "two runs differ"
    return first


def repeated(runs: int, call):
    """What `call` gives, which must be the same bit for bit in so many runs."""
    return alike(call() for _ in range(runs))


def compare(scan, inputs, initial_state, *, backend, device="cpu", runs=1, **options):
    """Runs `scan` on `backend` and `device`, and the float64 loop on the same values; asserts on every output and
    gradient.

    An element is a sum of terms, and its rounding error is a fraction of the terms, not of what is left when they
    cancel: the scale of an output includes the initial state, that of a broadcast input's gradient the sum of the
    absolute gradients that it collects, that of the initial state's the sum of what each output adds to it.
    """
    dtype = inputs[-1].dtype
    shape = inputs[-1].shape
    # The output weights are the gradients that arrive: exact in the tested dtype, so both sides see the same.
    weights = random(*shape, dtype=dtype).to(wide(dtype)), random(shape[0], shape[2], dtype=wide(dtype))
    at = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    moved = [None if x is None else x.to(device) for x in (*inputs, initial_state, *weights)]
    got = repeated(runs, lambda: run(scan, moved[: len(inputs)], moved[-3], moved[-2:], backend=backend, **at))
    oracle_state = None if initial_state is None else initial_state.to(wide(initial_state.dtype))
    oracle_inputs = [x.to(wide(dtype)).expand(shape).contiguous() for x in inputs]
    want = list(run(scan, oracle_inputs, oracle_state, weights, backend="reference", **options))
    scales = [y.abs().max().item() for y in want]
    if initial_state is not None:
        scales[:2] = [max(scale, initial_state.abs().max().item()) for scale in scales[:2]]
    for i, x in enumerate(inputs, start=2):
        scales[i] = want[i].abs().sum_to_size(x.shape).max().item()
        want[i] = want[i].sum_to_size(x.shape)
    names = ["h", "final_state", *(f"grad of input {i}" for i in range(len(inputs)))]
    names += [] if initial_state is None else ["grad of initial_state"]
    for name, x, y, scale in zip(names, got, want, scales, strict=True):
        assert x.shape == y.shape, name
        assert not x.isnan().any(), f"{name}: NaN"
        error = (x.to(y) - y).abs().max().item()
        if name == "grad of initial_state" and error > TOLERANCE[dtype] * scale:
            scale = max(scale, _collected(scan, oracle_inputs, oracle_state, weights, **options))
        assert error <= TOLERANCE[dtype] * scale + 1e-30, f"{name}: error {error:.3g}, {error / scale:.3g} relative"


def _collected(scan, inputs, state, weights, **options):
    """The largest sum, over the outputs that a state reaches, of the absolute gradients that each gives it: outputs are
    affine in the state, so that their slopes are what a state larger by one adds to them."""
    slopes = [
        more - less
        for more, less in zip(
            scan(*inputs, state + 1, backend="reference", **options),
            scan(*inputs, state, backend="reference", **options),
            strict=True,
        )
    ]
    given, final = ((slope * weight).abs() for slope, weight in zip(slopes, weights, strict=True))
    return (given.sum(1) + final).max().item()


def linear(a, b, initial_state=None, **options):
    return linear_scan(a, b, initial_state, **options)


def mingru_vanilla(hidden, gate, initial_state=None, **options):
    return mingru_scan(hidden, gate, initial_state, positive=False, **options)


def mingru_positive(hidden, gate, initial_state=None, **options):
    return mingru_scan(hidden, gate, initial_state, positive=True, **options)


def minlstm_vanilla(hidden, forget, input, initial_state=None, **options):
    return minlstm_scan(hidden, forget, input, initial_state, positive=False, **options)


def minlstm_positive(hidden, forget, input, initial_state=None, **options):
    return minlstm_scan(hidden, forget, input, initial_state, positive=True, **options)


# Each fused cell: its name in the kernels, its scan, the number of its inputs.
CELLS = {
    "mingru_vanilla": (mingru_vanilla, 2),
    "mingru_positive": (mingru_positive, 2),
    "minlstm_vanilla": (minlstm_vanilla, 3),
    "minlstm_positive": (minlstm_positive, 3),
}


def _gateloop(transition: str, magnitude: str, phase: str):
    """(a scan of q, k, v, alpha, beta or without it, and an initial state; the number of its inputs)."""
    kind = {"transition": "polar" if transition == "real" else transition, "magnitude": magnitude, "phase": phase}
    count = 4 if transition == "real" else 5

    def scan(*inputs_and_state, **options):
        inputs, state = inputs_and_state[:count], inputs_and_state[count:]
        return gateloop_scan(*inputs, *([None] * (5 - count)), *state, **kind, **options)

    return scan, count


GATELOOP_CELLS = {cell.name: _gateloop(*kind) for kind, cell in GATELOOP.items()}
