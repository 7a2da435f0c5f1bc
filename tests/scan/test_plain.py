"""The scans that exported models carry compute what the backend "chunked" computes, to the bit."""

import inspect

import pytest
import torch

from hf_recurrent import scan
from hf_recurrent.scan import convolution, elementwise, gateloop, longhorn, norm, plain, s5, split

INPUTS = {
    "linear_scan": {"a": 5, "b": 5},
    "mingru_scan": {"hidden": 5, "gate": 5},
    "minlstm_scan": {"hidden": 5, "forget": 5, "input": 5},
    "gateloop_scan": {"q": 5, "k": 5, "v": 5, "alpha": 5, "beta": 5},
    "longhorn_scan": {"x": 5, "dt": 5, "k": 3, "q": 3},
    "gateloop_heads_scan": {"q": 3, "k": 3, "v": 2, "a": 3},
}
OURS = {"backend", "update_state", "reverse"}  # what no exported model passes to all of them


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("started", [False, True])
def test_the_same_to_the_bit(name, dtype, started):
    torch.manual_seed(0)
    inputs = {key: torch.randn(2, 19, width, dtype=dtype) for key, width in INPUTS[name].items()}
    state_dtype = dtype
    if name.startswith("gateloop"):
        state_dtype = torch.promote_types(dtype, torch.float32).to_complex()
    shape = (5, 3) if name == "longhorn_scan" else (5,)
    if name == "gateloop_heads_scan":
        inputs = {key: x.unsqueeze(2).repeat(1, 1, 4, 1) for key, x in inputs.items()}
        inputs["a"] = inputs["a"].to(state_dtype)
        shape = (4, 3, 2)
    options = {
        "initial_state": torch.randn(2, *shape, dtype=state_dtype),
        "mask": torch.rand(2, 19) > 0.3,
        "reset": torch.rand(2, 19) > 0.7,
        "reset_state": torch.randn(shape, dtype=state_dtype) if started else None,
    }
    ours = getattr(scan, name)(**inputs, **options, backend="chunked")
    for mine, theirs in zip(ours, getattr(plain, name)(**inputs, **options), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@pytest.mark.parametrize("started", [False, True])
def test_irregular_times_to_the_bit(discretization, started):
    torch.manual_seed(0)
    driven, rate = torch.randn(2, 19, 5, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64)
    options = {
        "initial_state": torch.randn(2, 5, dtype=torch.complex64),
        "discretization": discretization,
        "mask": torch.rand(2, 19) > 0.3,
        "reset": torch.rand(2, 19) > 0.7,
        "reset_state": torch.randn(5, dtype=torch.complex64) if started else None,
    }
    inputs = driven, rate, torch.rand(2, 19)
    ours = scan.s5_scan(*inputs, **options, backend="chunked")
    for mine, theirs in zip(ours, plain.s5_scan(*inputs, **options), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.parametrize("name", [*INPUTS, "s5_scan"])
def test_every_argument_is_there(name):
    ours, theirs = (inspect.signature(getattr(module, name)).parameters.keys() for module in (scan, plain))
    assert ours - OURS <= theirs


@pytest.mark.parametrize("module", [convolution, elementwise, gateloop, longhorn, norm, s5, split])
def test_every_function_of_a_layer_has_the_same_arguments(module):
    for name in plain.__all__:
        if inspect.isfunction(ours := getattr(module, name, None)) and name not in INPUTS:
            theirs = getattr(plain, name)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
