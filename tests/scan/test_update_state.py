"""`update_state`: the final state takes the place of the initial one, at its address."""

import numpy as np
import pytest
import torch
from cuda_host import Host
from oracle import coefficients, random

from hf_recurrent.scan import gateloop_scan, linear_scan, longhorn_scan, mingru_scan, minlstm_scan


def calls(batch: int, length: int) -> dict:
    x, y, z = (random(batch, length, 6, dtype=torch.float32) for _ in "xyz")
    k = random(batch, length, 3, dtype=torch.float32)
    a = coefficients(batch, length, 6, dtype=torch.complex64)
    return {
        "linear": (lambda *s, **o: linear_scan(x, y, *s, **o), random(batch, 6, dtype=torch.float32)),
        "complex": (lambda *s, **o: linear_scan(a, a, *s, **o), random(batch, 6, dtype=torch.complex64)),
        "mingru": (lambda *s, **o: mingru_scan(x, y, *s, positive=True, **o), random(batch, 6, dtype=torch.float32)),
        "minlstm": (lambda *s, **o: minlstm_scan(x, y, z, *s, **o), random(batch, 6, dtype=torch.float32)),
        "gateloop": (
            lambda *s, **o: gateloop_scan(x, y, z, y, x, *s, **o),
            random(batch, 6, dtype=torch.complex64),
        ),
        "longhorn": (lambda *s, **o: longhorn_scan(x, y, k, k, *s, **o), random(batch, 6, 3, dtype=torch.float32)),
    }


@pytest.fixture(params=["reference", "chunked", "cpu", "cuda's source"])
def backend(request, monkeypatch, tmp_path_factory):
    torch.manual_seed(0)
    if request.param != "cuda's source":
        return request.param
    host = Host(tmp_path_factory.mktemp("shim"), flags=["-O0"])
    host.multiprocessors = 4
    host.install(monkeypatch.setattr)
    for module in ("ops", "reading"):
        monkeypatch.setattr(f"hf_recurrent.scan.{module}.choose_backend", lambda backend, device: "cuda")
    return "cuda"


@pytest.mark.parametrize("length", [1, 1030])
def test_in_place(backend, length):
    mask, reset = torch.rand(2, length) < 0.7, torch.rand(2, length) < 0.3
    for name, (scan, state) in calls(2, length).items():
        if length > 1 and (backend == "reference" or name not in ("mingru", "longhorn")):
            continue
        for options in ({}, {"mask": mask, "reset": reset}):
            h, final = scan(state, backend=backend, **options)
            kept, address = state.clone(), state.data_ptr()
            got, updated = scan(kept, backend=backend, update_state=True, **options)
            assert updated is kept and torch.equal(kept, final) and torch.equal(got, h), name
            assert state.data_ptr() == address


def test_decoding_in_place_is_one_scan(backend):
    for name, (scan, state) in calls(2, 1).items():
        want = state
        for _ in range(3):
            h, want = scan(want, backend=backend)
            got, _ = scan(state, backend=backend, update_state=True)
            assert torch.equal(got, h) and torch.equal(state, want), name


def test_what_cannot_be_updated():
    x, state = torch.rand(2, 1, 6), torch.rand(2, 6)
    for scan in (linear_scan, mingru_scan):
        with pytest.raises(ValueError, match="update_state needs an initial_state"):
            scan(x, x, update_state=True)
        with pytest.raises(TypeError, match="must be torch.float32 to be updated in place, got torch.float64"):
            scan(x, x, state.double(), update_state=True)
        with pytest.raises(ValueError, match="must be contiguous"):
            scan(x, x, torch.rand(6, 2).T, update_state=True)
        odd = np.ndarray((2, 6), dtype=np.float32, buffer=bytearray(49), offset=1)
        with pytest.raises(ValueError, match="starts at no multiple of its elements' size"):
            scan(x, x, torch.from_numpy(odd), update_state=True)
        with pytest.raises(ValueError, match="under torch.no_grad"):
            scan(x.clone().requires_grad_(), x, state, update_state=True)
        with pytest.raises(ValueError, match="shares memory with an input"):
            scan(x, x, x[:, 0], update_state=True)
    k = torch.rand(2, 1, 3)
    with pytest.raises(ValueError, match="update_state needs"):
        longhorn_scan(x, x, k, k, update_state=True)


def test_compiled():
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    x = torch.rand(2, 1, 6)
    state = torch.rand(2, 6)
    other = state.clone()

    def step(state):
        return mingru_scan(x, x, state, update_state=True)[0]

    torch.testing.assert_close(torch.compile(step, fullgraph=True)(other), step(state))
    torch.testing.assert_close(other, state)
