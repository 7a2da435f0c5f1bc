"""Every backend, cell, dtype and gradient against the float64 loop."""

import itertools
import math

import pytest
import torch
from oracle import (
    CELLS,
    COMPLEX,
    REALS,
    SHAPES,
    coefficients,
    compare,
    linear,
    mask_and_reset,
    mingru_positive,
    mingru_vanilla,
    minlstm_positive,
    minlstm_vanilla,
    random,
    run,
)

from hf_recurrent.scan import (
    gateloop_heads_scan,
    gateloop_scan,
    linear_scan,
    longhorn_scan,
    mingru_scan,
    minlstm_scan,
    ops,
)
from hf_recurrent.scan.reference import STATE_DTYPES

BACKENDS = ["chunked", "cpu"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", REALS + COMPLEX, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear(backend, dtype, shape):
    inputs = coefficients(*shape, dtype=dtype), random(*shape, dtype=dtype)
    compare(linear, inputs, None, backend=backend)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("with_mask", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize("with_reset", [False, True], ids=["one", "reset"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_options(backend, dtype, with_reset, with_mask, reverse):
    for shape in [(1, 1, 1), (4, 37, 33), (3, 2, 64)]:
        mask, reset = mask_and_reset(*shape[:2])
        options = {"mask": mask if with_mask else None, "reset": reset if with_reset else None, "reverse": reverse}
        inputs = coefficients(*shape, dtype=dtype), random(*shape, dtype=dtype)
        state = random(shape[0], shape[2], dtype=torch.complex64 if dtype.is_complex else torch.float32)
        compare(linear, inputs, state, backend=backend, **options)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("cell", ["linear", *CELLS])
@pytest.mark.parametrize("channels", [768, 777], ids=["whole lines", "odd rows"])
def test_outputs_larger_than_caches(channels, cell, reverse):
    """Large outputs whose rows start on cache lines are written by other instructions than the rest."""
    shape = (8, 180, channels)
    dtype = torch.float32
    scan, count = CELLS.get(cell, (linear, 2))
    inputs = [random(*shape, dtype=dtype) for _ in range(count)]
    if cell == "linear":
        inputs[0] = coefficients(*shape, dtype=dtype)
    mask, reset = mask_and_reset(*shape[:2])
    state = random(shape[0], channels, dtype=dtype)
    compare(scan, inputs, state, backend="cpu", mask=mask, reset=reset, reverse=reverse)


@pytest.mark.parametrize("shape", [(5,), (1,), (33, 5), (33, 1), (4, 1, 5), (4, 33, 1), (1, 1, 5), (1, 33, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_broadcast_coefficients(backend, masked, dtype, shape):
    inputs = coefficients(*shape, dtype=dtype), random(4, 33, 5, dtype=dtype)
    mask, reset = mask_and_reset(4, 33) if masked else (None, None)
    state = random(4, 5, dtype=dtype).to(torch.promote_types(dtype, torch.float32))
    compare(linear, inputs, state, backend=backend, mask=mask, reset=reset)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_dtypes_are_promoted(backend):
    a, b = coefficients(6, dtype=torch.complex64), random(2, 9, 6, dtype=torch.float32)
    h, final = linear_scan(a, b, backend=backend)
    assert h.dtype == final.dtype == torch.complex64
    torch.testing.assert_close(h, linear_scan(a, b.to(torch.complex64), backend="reference")[0])
    a, b = a.requires_grad_(), b.requires_grad_()
    grads = torch.autograd.grad(linear_scan(a, b, backend=backend)[0].real.square().sum(), [a, b])
    wants = torch.autograd.grad(linear_scan(a, b, backend="reference")[0].real.square().sum(), [a, b])
    for x, y in zip(grads, wants, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y)
    h, final = linear_scan(b.detach()[0, 0].bfloat16(), b.detach(), backend=backend)
    assert h.dtype == final.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_contiguous_inputs(backend):
    packed = random(3, 20, 4 * 33, dtype=torch.float32)
    a, b = torch.sigmoid(packed[..., 33:66]), packed[..., 66:99]
    slices = {
        "rows of a projection": (packed[..., :33].sigmoid(), b),
        "channels strided": (a.new_empty(3, 20, 66)[..., ::2].copy_(a), packed[..., 1::4]),
        "time first": (a.transpose(0, 1).contiguous().transpose(0, 1), b.transpose(0, 1).contiguous().transpose(0, 1)),
        "channels first": (a.mT.contiguous().mT, b.mT.contiguous().mT),
        "time strided": (a.repeat_interleave(2, 1)[:, ::2], b),
        "flipped strides": (a.flip(2), b.flip(1)),
    }
    for a, b in slices.values():
        compare(linear, (a, b), random(3, 33, dtype=torch.float32), backend=backend)
        compare(mingru_vanilla, (b, a), None, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_conjugated_and_expanded_views(backend):
    a, b = coefficients(2, 12, 5, dtype=torch.complex64), random(2, 12, 5, dtype=torch.complex64)
    h, final = linear_scan(a.conj(), b.conj(), b[:, 0].conj(), backend=backend)
    want, want_final = linear_scan(a, b, b[:, 0], backend="reference")
    torch.testing.assert_close(h, want.conj().resolve_conj())
    torch.testing.assert_close(final, want_final.conj().resolve_conj())
    a, b = a.requires_grad_(), b.requires_grad_()
    for output in (lambda h: h.conj().imag.sum(), lambda h: h.sum().real):  # arrives conjugated, arrives expanded
        got = torch.autograd.grad(output(linear_scan(a, b, backend=backend)[0]), [a, b])
        want = torch.autograd.grad(output(linear_scan(a, b, backend="reference")[0]), [a, b])
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cells(backend, cell, dtype, shape):
    scan, count = CELLS[cell]
    inputs = [3 * random(*shape, dtype=dtype) for _ in range(count)]
    state = random(shape[0], shape[2], dtype=torch.promote_types(dtype, torch.float32))
    compare(scan, inputs, state, backend=backend)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cell_options(backend, cell, dtype, reverse):
    scan, count = CELLS[cell]
    mask, reset = mask_and_reset(4, 37)
    inputs = [random(4, 37, 33, dtype=dtype) for _ in range(count)]
    state = random(4, 33, dtype=torch.float32)
    compare(scan, inputs, state, backend=backend, mask=mask, reset=reset, reverse=reverse)


@pytest.mark.parametrize("positive", [False, True])
def test_mingru_at_extreme_gates(positive):
    """A shut gate keeps the state to the last bit, an open one replaces it; nothing overflows on the way."""
    gate = torch.tensor([-1e30, -200.0, -104.0, -88.0, -30.0, 0.0, 30.0, 88.0, 200.0, 1e30]).expand(1, 3, 10)
    hidden = torch.tensor([-1e4, -90.0, 1e4]).view(1, 3, 1).expand(1, 3, 10)
    state = torch.full((1, 10), 1.25)
    cell = mingru_positive if positive else mingru_vanilla
    compare(cell, (hidden.contiguous(), gate.contiguous()), state, backend="cpu")
    h, _ = mingru_scan(hidden, gate, state, positive=positive, backend="cpu")
    assert (h[:, :, :4] == 1.25).all()
    nan = mingru_scan(hidden, gate.clone().fill_(float("nan")), state, positive=positive, backend="cpu")[0]
    assert nan.isnan().all()


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_minlstm_at_extreme_gates(backend, positive):
    """Gates far beyond what their logistic functions can hold still stand in proportion."""
    extremes = torch.tensor([-300.0, -100.0, -90.0, -80.0, -1.0, 0.0, 80.0, 100.0, 300.0])
    forget, input = (
        x.flatten().expand(1, 3, -1).contiguous() for x in torch.meshgrid(extremes, extremes, indexing="ij")
    )
    hidden = random(*forget.shape, dtype=torch.float32)
    state = random(1, forget.shape[2], dtype=torch.float32)
    compare(minlstm_positive if positive else minlstm_vanilla, (hidden, forget, input), state, backend=backend)
    # A gate of -inf is shut, so that the other one decides.
    shut, open_ = torch.full((1, 1, 4), -math.inf), torch.full((1, 1, 4), -2.0)
    hidden, state = hidden[:, :1, :4], state[:, :4]
    candidate = torch.where(hidden >= 0, hidden + 0.5, hidden.sigmoid()) if positive else hidden
    for forget, input, want in ((open_, shut, state), (shut, open_, candidate[:, 0])):
        gates = [forget.clone().requires_grad_(), input.clone().requires_grad_()]
        h, _ = minlstm_scan(hidden, *gates, state, positive=positive, backend=backend)
        torch.testing.assert_close(h[:, 0], want)
        for grad in torch.autograd.grad(h.sum(), gates):
            torch.testing.assert_close(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend):
    mask, reset = mask_and_reset(3, 6)
    for dtype in (torch.float64, torch.complex128):
        a = coefficients(3, 6, 2, dtype=dtype).requires_grad_()
        b = random(3, 6, 2, dtype=dtype).requires_grad_()
        state = random(3, 2, dtype=dtype).requires_grad_()
        for options in ({}, {"mask": mask, "reset": reset}, {"mask": mask, "reset": reset, "reverse": True}):
            assert torch.autograd.gradcheck(
                lambda a, b, s, options=options: linear_scan(a, b, s, backend=backend, **options), (a, b, state)
            )
    state = random(3, 2, dtype=torch.float64).requires_grad_()
    for scan, count in CELLS.values():
        inputs = [random(3, 6, 2, dtype=torch.float64).requires_grad_() for _ in range(count)]
        assert torch.autograd.gradcheck(lambda *args, scan=scan: scan(*args, backend=backend), (*inputs, state))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("reverse", [False, True])
def test_split_anywhere(backend, reverse):
    """Two calls that hand the state on give what one call gives."""
    a, b = coefficients(2, 40, 17, dtype=torch.float64), random(2, 40, 17, dtype=torch.float64)
    mask, _ = mask_and_reset(2, 40)
    h, final = linear_scan(a, b, mask=mask, reverse=reverse, backend=backend)
    for split in (1, 13, 39):
        parts = [slice(0, split), slice(split, None)]
        state, outputs = None, []
        for part in reversed(parts) if reverse else parts:
            output, state = linear_scan(
                a[:, part], b[:, part], state, mask=mask[:, part], reverse=reverse, backend=backend
            )
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs[::-1] if reverse else outputs, 1), h, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(state, final, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_reset_is_a_new_sequence(backend):
    a, b = coefficients(1, 20, 3, dtype=torch.float64), random(1, 20, 3, dtype=torch.float64)
    reset = torch.zeros(1, 20, dtype=torch.bool)
    reset[0, [0, 8]] = True
    garbage = random(1, 3, dtype=torch.float64)
    for reverse in (False, True):
        h, final = linear_scan(a, b, None if reverse else garbage, reset=reset, reverse=reverse, backend=backend)
        first = linear_scan(a[:, :8], b[:, :8], reverse=reverse, backend=backend)
        second = linear_scan(a[:, 8:], b[:, 8:], reverse=reverse, backend=backend)
        torch.testing.assert_close(h, torch.cat([first[0], second[0]], 1))
        torch.testing.assert_close(final, first[1] if reverse else second[1])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("cell", ["linear", *CELLS])
def test_padding_holds_anything(backend, cell):
    """What is not finite at padding reaches neither a state nor a gradient, which is zero there."""
    scan, count = CELLS.get(cell, (linear, 2))
    mask, reset = mask_and_reset(3, 37)
    state = random(3, 7, dtype=torch.float32).requires_grad_()
    for bad in (float("nan"), float("inf"), -float("inf")):
        inputs = [random(3, 37, 7, dtype=torch.float32) for _ in range(count)]
        for x in inputs:
            x[~mask] = bad
        leaves = [x.requires_grad_() for x in inputs]
        for options in ({}, {"reverse": True}, {"reset": reset}, {"reset": reset, "reset_state": state[0]}):
            h, final = scan(*leaves, state, mask=mask, backend=backend, **options)
            grads = torch.autograd.grad(h.sum() + final.sum(), [*leaves, state])
            assert all(x.isfinite().all() for x in (h, final, *grads)), options
            assert not any(grad[~mask].any() for grad in grads[:-1]), options


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_reset_stops_what_is_not_finite(backend, reverse, bad):
    """A document that overflowed spoils neither the outputs nor the gradients of the others in its row."""
    a, b = coefficients(1, 30, 3, dtype=torch.float64), random(1, 30, 3, dtype=torch.float64)
    b[0, 12] = bad
    a.requires_grad_()
    reset = torch.zeros(1, 30, dtype=torch.bool)
    reset[0, [10, 17]] = True
    state = random(1, 3, dtype=torch.float64)
    h, final = linear_scan(a, b, state, reset=reset, reverse=reverse, backend=backend)
    parts = [slice(0, 10), slice(17, 30)]
    given = [None, state] if reverse else [state, None]
    want = [
        linear_scan(a[:, p], b[:, p], s, reverse=reverse, backend=backend) for p, s in zip(parts, given, strict=True)
    ]
    for part, (h_part, _) in zip(parts, want, strict=True):
        torch.testing.assert_close(h[:, part], h_part)
    torch.testing.assert_close(final, want[0 if reverse else 1][1])
    weights = random(1, 30, 3, dtype=torch.float64)
    grad = torch.autograd.grad((h * weights).sum(), a)[0]
    for part, (h_part, _) in zip(parts, want, strict=True):
        grad_part = torch.autograd.grad((h_part * weights[:, part]).sum(), a)[0]
        torch.testing.assert_close(grad[:, part], grad_part[:, part])


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (2, 4, 0)], ids=str)
def test_empty(backend, shape):
    a, b = torch.rand(shape, requires_grad=True), torch.rand(shape, requires_grad=True)
    state = torch.rand(shape[0], shape[2], requires_grad=True)
    h, final = linear_scan(a, b, state, backend=backend)
    assert h.shape == shape
    torch.testing.assert_close(final, state)
    (h.sum() + final.sum()).backward()
    if shape[1] == 0:
        torch.testing.assert_close(state.grad, torch.ones_like(state))
    assert a.grad is None or a.grad.shape == shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_says_no(backend):
    """Instead of tangents of zero."""
    x = torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    with pytest.raises(NotImplementedError, match="work with backend='reference'"):
        torch.func.jvp(lambda *x: linear_scan(*x, backend=backend)[0], x, x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        linear_scan(*x, torch.autograd.forward_ad.make_dual(torch.rand(1, 2), torch.ones(1, 2)), backend=backend)
    assert torch.func.jvp(lambda *x: linear_scan(*x, backend="reference")[0], x, x)[1].all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_transforms_of_torch_func(backend):
    """They go through no operator of ours: without a backend the loop is taken, and that is said."""
    a, b = torch.rand(3, 4, 2, dtype=torch.float64), torch.randn(3, 4, 2, dtype=torch.float64)

    def last(a, b, backend=None):
        return linear_scan(a[None], b[None], backend=backend)[1].square().sum()

    with pytest.warns(UserWarning, match="torch.func's transforms .* as a loop"):
        ops._warn_once.cache_clear()
        each = torch.func.vmap(torch.func.grad(last))(a, b)
    for i in range(3):
        one = a[i].clone().requires_grad_()
        last(one, b[i], backend).backward()
        torch.testing.assert_close(each[i], one.grad)
    with pytest.raises(NotImplementedError, match=f"backend='reference', not with '{backend}'"):
        torch.func.grad(last)(a[0], b[0], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeats_bitwise(backend):
    a, b = coefficients(3, 500, 70, dtype=torch.float32), random(3, 500, 70, dtype=torch.float32)
    runs = []
    for _ in range(2):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        h, final = linear_scan(x, y, backend=backend)
        runs.append((h, final, *torch.autograd.grad(h.square().sum() + final.sum(), [x, y])))
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_threads_and_blocks_change_nothing():
    """However channels are dealt out to threads, each channel's arithmetic is the same."""
    before = torch.get_num_threads()
    try:
        for shape in [(1, 300, 777), (3, 300, 200), (2, 50, 5000)]:
            a, b = coefficients(*shape, dtype=torch.float32), random(*shape, dtype=torch.float32)
            outputs = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                outputs.append(linear_scan(a, b, backend="cpu")[0])
            assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def three_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


LONG = (1, 1600, 40)  # one row of few channels: three threads can only share out its time


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("flags", ["none", "mask", "mask and reset"])
@pytest.mark.parametrize("cell", ["linear", *CELLS])
def test_segments_of_time(three_threads, cell, flags, reverse):
    scan, count = CELLS.get(cell, (linear, 2))
    for dtype in (torch.float32, *([torch.bfloat16, torch.complex64] if cell == "linear" else [])):
        inputs = [random(*LONG, dtype=dtype) for _ in range(count)]
        if cell == "linear":
            inputs[0] = coefficients(*LONG, dtype=dtype)
        mask, reset = mask_and_reset(*LONG[:2])
        mask[0, 500:1100] = False  # a whole segment and more
        options = {"mask": None if flags == "none" else mask, "reset": reset if "reset" in flags else None}
        state = random(1, LONG[2], dtype=STATE_DTYPES[dtype])
        compare(scan, inputs, state, backend="cpu", reverse=reverse, **options)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [LONG, (1, 1, 40)], ids=["over time", "constant"])
def test_segments_of_time_that_forget_nothing(three_threads, shape, dtype, reverse):
    """The state at the start is still there, by a tenth and more, at the end."""
    magnitude = 1 - 1e-3 * torch.rand(shape, dtype=torch.float64)
    a = torch.polar(magnitude, 6 * torch.rand(shape, dtype=torch.float64)) if dtype.is_complex else magnitude
    state = 1000 * random(1, LONG[2], dtype=dtype)
    compare(linear, (a, random(*LONG, dtype=dtype)), state, backend="cpu", reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize(
    "cell, dtype", [("linear", torch.complex64), *((c, torch.float32) for c in ("linear", *CELLS))]
)
def test_segments_of_time_that_are_not_finite(three_threads, cell, dtype, reverse):
    """What is not finite lasts as long as in the loop: to the end or to a reset, however fast the gates forget."""
    scan, count = CELLS.get(cell, (linear, 2))
    for reset_at, places in [(None, [30, 700]), (700, [30, None]), (300, [700]), (1100, [1580])]:
        inputs = [random(*LONG, dtype=dtype) for _ in range(count)]
        if cell == "linear":
            inputs[0] = coefficients(*LONG, dtype=dtype)
        weights = random(*LONG, dtype=dtype), random(1, LONG[2], dtype=dtype)
        state = random(1, LONG[2], dtype=dtype)
        # In channels of their own, which know nothing of each other.
        for i, (where, bad) in enumerate(itertools.product(places, [float("inf"), float("nan")])):
            if where is None:
                state[0, 7 * i + 3] = weights[1][0, 7 * i + 4] = bad
            else:
                inputs[cell == "linear"][0, where, 7 * i + 3] = weights[0][0, where, 7 * i + 4] = bad
        reset = None
        if reset_at:
            reset = torch.zeros(LONG[:2], dtype=torch.bool)
            reset[0, reset_at] = True
        results = [
            run(scan, inputs, state, weights, reset=reset, reverse=reverse, backend=backend)
            for backend in ("cpu", "reference")
        ]
        for got, want in zip(*results, strict=True):
            assert torch.equal(got.isfinite(), want.isfinite())


def test_segments_of_time_whose_summaries_overflow(three_threads):
    """Coefficients above one over steps whose states stay zero: their product is infinite, the scan is not."""
    b = random(*LONG, dtype=torch.float32)
    b[:, :1000] = 0
    a = torch.full(LONG, 2.0)
    a[:, 1000:] = 0.5
    h, want = (linear_scan(a, b, backend=backend)[0] for backend in ("cpu", "reference"))
    torch.testing.assert_close(h, want)


def test_broadcast_coefficients_are_not_copied():
    """A (D,) coefficient reaches the kernel with zero strides: a forward pass allocates its output and little else."""
    a, b = torch.rand(64), torch.rand(2, 1000, 64)
    linear_scan(a, b, backend="cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        linear_scan(a, b, backend="cpu")
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert b.nbytes <= allocated < 1.05 * b.nbytes


def test_double_backward_says_no():
    a, b = torch.rand(1, 5, 2, requires_grad=True), torch.rand(1, 5, 2, requires_grad=True)
    grad = torch.autograd.grad(linear_scan(a, b, backend="cpu")[0].square().sum(), a, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grad.sum().backward()
    # The loop can.
    grad = torch.autograd.grad(linear_scan(a, b, backend="reference")[0].square().sum(), a, create_graph=True)[0]
    grad.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_without_a_break(backend):
    torch.use_deterministic_algorithms(False)
    mask, reset = mask_and_reset(3, 40)

    def function(a, b, hidden, gate, state):
        h, final = linear_scan(torch.sigmoid(a), b * 2, state, mask=mask, reset=reset, backend=backend)
        y, last = mingru_scan(hidden, gate, final, positive=True, reverse=True, backend=backend)
        return h + y, last

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    leaves = [random(3, 40, 9, dtype=torch.float32).requires_grad_() for _ in range(4)]
    leaves.append(random(3, 9, dtype=torch.float32).requires_grad_())
    results = []
    for call in (function, compiled):
        y, last = call(*leaves)
        results.append((y, last, *torch.autograd.grad(y.square().sum() + last.sum(), leaves)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_operators_pass_pytorchs_own_checks():
    torch.use_deterministic_algorithms(False)
    a, b = torch.rand(2, 9, 5, requires_grad=True), torch.rand(2, 9, 5, requires_grad=True)
    state = torch.rand(2, 5, requires_grad=True)
    for backend in BACKENDS:
        for args in ((None, None), (state, torch.zeros(2, 9, dtype=torch.uint8))):
            torch.library.opcheck(torch.ops.hf_recurrent.scan, ("linear", [a, b], *args, False, backend))
            torch.library.opcheck(torch.ops.hf_recurrent.scan, ("linear", [a[:1, :1], b], *args, True, backend))
    torch.library.opcheck(torch.ops.hf_recurrent.scan, ("mingru_positive", [a, b], state, None, False, "cpu"))


def _call(**changes):
    arguments = {"a": torch.rand(2, 5, 3), "b": torch.rand(2, 5, 3), **changes}
    return linear_scan(arguments.pop("a"), arguments.pop("b"), arguments.pop("initial_state", None), **arguments)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"b": torch.rand(5, 3)}, ValueError, r"b must have the shape \(batch, length, channels\), got \(5, 3\)"),
        (
            {"a": torch.rand(2, 4, 3)},
            ValueError,
            r"a has the shape \(2, 4, 3\), which does not broadcast to \(2, 5, 3\)",
        ),
        ({"a": torch.rand(1, 2, 5, 3)}, ValueError, r"a has the shape \(1, 2, 5, 3\)"),
        ({"a": 0.5}, TypeError, "a must be a tensor, got float"),
        ({"a": torch.ones(2, 5, 3, dtype=torch.int64)}, TypeError, "a must be one of bfloat16, .* got torch.int64"),
        ({"a": torch.rand(3, device="meta")}, ValueError, "a is on meta, expected cpu"),
        ({"initial_state": torch.rand(3)}, ValueError, r"initial_state must have .* \(2, 3\), got \(3,\)"),
        ({"initial_state": torch.rand(2, 3).to(torch.complex64)}, TypeError, "initial_state is torch.complex64, but"),
        ({"mask": torch.ones(2, 5)}, TypeError, "mask must be a bool tensor, got torch.float32"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, r"mask must have .* \(2, 5\), got \(2, 4\)"),
        ({"reset": [True]}, TypeError, "reset must be a bool tensor, got list"),
        ({"reset": torch.ones(5, dtype=torch.bool)}, ValueError, r"reset must have .* \(2, 5\), got \(5,\)"),
        (
            {"backend": "triton"},
            ValueError,
            "backend must be one of 'reference', .* 'cuda' or None, got 'triton'",
        ),
    ],
)
def test_bad_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        _call(**changes)


def test_bad_mingru_arguments():
    x = torch.rand(2, 5, 3)
    with pytest.raises(ValueError, match=r"hidden and gate must have one shape, got \(2, 5, 3\), \(2, 5, 1\)"):
        mingru_scan(x, x[..., :1])
    with pytest.raises(TypeError, match="gate must be real, got torch.complex64"):
        mingru_scan(x, x.to(torch.complex64))
    with pytest.raises(ValueError, match="hidden, forget and input must have one shape"):
        minlstm_scan(x, x, x[:, :1])
    with pytest.raises(TypeError, match="hidden must be a tensor, got NoneType"):
        mingru_scan(None, x)
    with pytest.raises(TypeError, match="gate must be a tensor, got float"):
        mingru_scan(x, 1.0)
    with pytest.raises(TypeError, match="input must be a tensor, got list"):
        minlstm_scan(x, x, [1])


# Each scan, how many inputs it has, and their shape, which is the same for all here.
EVERY_SCAN = [(linear_scan, 2), (mingru_scan, 2), (minlstm_scan, 3), (gateloop_scan, 5), (longhorn_scan, 4)]
EVERY_SCAN = [(*scan, (2, 5, 3)) for scan in EVERY_SCAN] + [(gateloop_heads_scan, 4, (2, 5, 3, 3))]


@pytest.mark.parametrize("scan, count, shape", EVERY_SCAN)
def test_what_is_not_dense(scan, count, shape):
    """Also where a kernel would be called past the operator, without gradients."""
    x = torch.rand(shape)
    mask = torch.ones(2, 5, dtype=torch.bool)
    for sparse in (x.to_sparse(), x.to_mkldnn()):
        for with_gradients in (False, True):
            with torch.set_grad_enabled(with_gradients):
                with pytest.raises(TypeError, match=rf"must be a dense .* got layout {sparse.layout}"):
                    scan(*[x] * (count - 1), sparse)
                with pytest.raises(TypeError, match=r"must be a dense .* got layout"):
                    scan(*[sparse] * count)
    with pytest.raises(TypeError, match=r"mask must be a dense \(strided\) tensor, got layout torch.sparse_coo"):
        scan(*[x] * count, mask=mask.to_sparse())


@pytest.mark.parametrize("scan, count, shape", EVERY_SCAN)
def test_reverse_is_a_bool(scan, count, shape):
    x = torch.rand(shape)
    for backend in (None, "reference", "chunked"):
        with torch.no_grad(), pytest.raises(TypeError, match="reverse must be True or False, got 'no'"):
            scan(*[x] * count, reverse="no", backend=backend)
    torch.compile(lambda x: scan(*[x] * count, reverse=True), fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize("b", [None, [1.0], 3])
def test_what_is_no_tensor(b):
    with pytest.raises(TypeError, match="b must be a tensor, got"):
        linear_scan(torch.ones(1, 1, 1), b)
