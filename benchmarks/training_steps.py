"""The families at one width and depth, each also with a product in place of its recurrence; their matrix products."""

from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hf_recurrent
import peers
from hf_recurrent import scan
from hf_recurrent.modeling import gateloop, longhorn, s5
from hf_recurrent.modeling.mingru import MinGRUMixer
from hf_recurrent.modeling.minlstm import MinLSTMMixer
from hf_recurrent.versions import version_of

SIZES = {"vocab_size": peers.VOCABULARY, "hidden_size": peers.WIDTH, "num_hidden_layers": peers.LAYERS}
MINIMAL = {
    "expansion": peers.EXPANSION,
    "conv_kernel": peers.CONV_KERNEL,
    "mlp_ratio": peers.MLP_RATIO,
    "hidden_dropout": peers.DROPOUT,
}


class LanguageModel(nn.Module):
    """Token ids -> loss, as the peers' models have it."""

    def __init__(self, family: str, **options):
        super().__init__()
        config = getattr(hf_recurrent, f"{family}Config")(**SIZES, **options)
        self.model = getattr(hf_recurrent, f"{family}ForCausalLM")(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def minimal(family: str) -> Callable[[], nn.Module]:
    """The model of the minimal RNNs' Shakespeare experiment: a function that builds it."""
    return lambda: LanguageModel(family, **MINIMAL)


# The other fields have the families' own defaults: Longhorn with m = 16, GateLoop with d_h = 1.
OURS: dict[str, Callable[[], nn.Module]] = {
    "minLSTM": minimal("MinLSTM"),
    "GateLoop, polar": lambda: LanguageModel("GateLoop"),
    "GateLoop, cartesian": lambda: LanguageModel("GateLoop", transition="cartesian"),
    "Longhorn": lambda: LanguageModel("Longhorn"),
    "S5": lambda: LanguageModel("S5", state_size=peers.WIDTH),
}


def models(slow_ones: bool) -> dict[str, Callable[[], nn.Module]]:
    """name -> a function that builds the model; with the peer, where that is asked for and installed."""
    return OURS | ({"Transformers Mamba (mambapy)": peers.HFMamba} if slow_ones and version_of("mambapy") else {})


# ---- what they are compared with -------------------------------------------------------------------------------------


def _last(h: Tensor) -> Tensor:
    return h[:, -1].to(torch.promote_types(h.dtype, torch.float32))


def _product(*inputs: Tensor | None, **_) -> tuple[Tensor, Tensor]:
    """Stands in for a scan: the cheapest thing that still uses all of its inputs, forward and backward."""
    h = inputs[0]
    for x in inputs[1:]:
        h = h if x is None else h * x
    return h, _last(h)


def _longhorn_product(x: Tensor, dt: Tensor, k: Tensor, q: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
    h = x * dt * (k * q).sum(-1, keepdim=True)
    return h, _last(h)[..., None].expand(-1, -1, k.shape[-1])


def _heads_product(q: Tensor, k: Tensor, v: Tensor, a: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
    h = a * k
    return (h.real * q).sum(-1, keepdim=True) * v, h[:, -1, ..., None].expand(-1, -1, -1, v.shape[-1])


def with_product(step: Callable[[int], None]) -> Callable[[int], None]:
    """`step` with products in place of all recurrences."""

    def run(index: int) -> None:
        with (
            mock.patch.object(MinGRUMixer, "scan", staticmethod(_product)),
            mock.patch.object(MinLSTMMixer, "scan", staticmethod(_product)),
            mock.patch.object(gateloop, "gateloop_heads_scan", _heads_product),
            mock.patch.object(gateloop, "gateloop_scan", _product),
            mock.patch.object(scan.gateloop, "gateloop_scan", _product),
            mock.patch.object(s5, "linear_scan", _product),
            mock.patch.object(longhorn, "longhorn_scan", _longhorn_product),
            mock.patch.object(scan.longhorn, "longhorn_scan", _longhorn_product),
        ):
            step(index)

    return run


def matrices(model: nn.Module) -> list[Tensor]:
    """A weight (outputs, inputs) of each product with a matrix that the model computes for every token."""
    shapes = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            shapes.append(module.weight.shape)
        elif isinstance(module, s5.S5SSM):  # real and imaginary parts
            states, width = 2 * module.states, len(module.D)
            shapes += [(states, width), *[(width, states)] * (2 if module.config.bidirectional else 1)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def matrix_products(model: nn.Module, tokens: int) -> Callable[[int], None]:
    """Forward and backward of these products on random inputs, and nothing else."""
    weights = matrices(model)
    inputs = [torch.randn(tokens, weight.shape[1], requires_grad=True) for weight in weights]
    grads = [torch.randn(tokens, len(weight)) for weight in weights]

    def run(_):
        for weight, x, grad in zip(weights, inputs, grads, strict=True):
            torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

    return run
