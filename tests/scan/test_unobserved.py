"""Whatever has to see an operation sees it, and a kernel is called past PyTorch only where nothing does."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_recurrent.scan import linear_scan
from hf_recurrent.scan import unobserved as module
from hf_recurrent.scan.norm import rms_norm
from hf_recurrent.scan.unobserved import unobserved


class Subclass(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(str(operator))
        return operator(*args, **kwargs or {})


def test_tensors():
    x, w = torch.randn(2, 3, 4), torch.nn.Parameter(torch.randn(4))
    assert not unobserved(x)
    with torch.no_grad():
        assert unobserved(x, None, w)
        for other in (x.as_subclass(Subclass), x.to("meta"), [1.0], x.to(torch.complex64).conj(), torch._neg_view(x)):
            assert not unobserved(other)
        assert not unobserved(torch.nn.UninitializedParameter())
    with torch.inference_mode():
        assert unobserved(x, w, torch.randn(3))


@torch.no_grad()
def test_what_surrounds_a_call():
    x = torch.randn(2, 3, 4)
    seen = []

    def look(x):
        seen.append(unobserved(x))
        return x.sum()

    for transform in (torch.func.vmap(look), torch.func.grad(look), functionalize(look)):
        transform(x)
    torch.func.jvp(look, (x,), (x,))
    with forward_ad.dual_level():
        look(forward_ad.make_dual(x, x))
    torch.jit.trace(look, (x,), check_trace=False)
    for pre_dispatch in (False, True):
        make_fx(look, pre_dispatch=pre_dispatch)(x)
    for mode in (Functions(), Operators(), torch.device("cpu"), torch.autocast("cpu"), FakeTensorMode()):
        with mode:
            look(torch.empty(3))
    assert seen == [False] * len(seen) and len(seen) == 13
    assert unobserved(x)


@torch.no_grad()
def test_what_pytorch_may_not_have(monkeypatch):
    """Then nothing goes past it."""
    assert unobserved(torch.zeros(1)) and module.CAN_ASK
    monkeypatch.setattr(module, "forward_ad", None)
    assert not unobserved(torch.zeros(1))
    monkeypatch.undo()
    monkeypatch.setattr(module, "CAN_ASK", False)
    assert not unobserved(torch.zeros(1))


@torch.no_grad()
def test_compiled_and_exported():
    class Asks(torch.nn.Module):
        def forward(self, x):
            return x + unobserved(x)

    x = torch.zeros(2)
    assert torch.compile(Asks(), backend="eager", fullgraph=True)(x).sum() == 0
    for strict in (False, True):
        assert torch.export.export(Asks(), (x,), strict=strict).module()(x).sum() == 0
    torch._dynamo.reset()


@torch.no_grad()
def test_modes_see_the_operators():
    x, state = torch.randn(1, 1, 4), torch.zeros(1, 4)
    with Operators() as mode:
        linear_scan(x, x, state)
        rms_norm(x, torch.ones(4), 1e-5)
    assert "hf_recurrent.scan.default" in mode.seen and any("mean" in name or "norm" in name for name in mode.seen)


@torch.no_grad()
def test_transforms_go_on_as_before():
    x, weight = torch.randn(3, 2, 1, 4), torch.randn(4)
    torch.testing.assert_close(
        torch.func.vmap(lambda x: rms_norm(x, weight, 1e-5))(x), torch.stack([rms_norm(y, weight, 1e-5) for y in x])
    )
    x, tangent = torch.randn(2, 1, 4), torch.randn(2, 1, 4)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        dual = forward_ad.make_dual(x, tangent)
        linear_scan(dual, dual)
