"""Other people's GPU scans, each behind one call of the same form; one that is absent is said, not failed."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hf_recurrent.versions import version_of

PACKAGES = ("flash-linear-attention", "accelerated-scan", "mamba-ssm", "triton")


def absent() -> dict[str, str]:
    return {package: "not installed" for package in PACKAGES if version_of(package) is None}


def _combine(first, second):
    (a, h), (next_a, next_h) = first, second
    return next_a * a, next_a * h + next_h


def _chunk_hgrn() -> Callable:
    from fla.ops.hgrn import chunk_hgrn

    return lambda g, b: chunk_hgrn(b, g)[0]


def _fused_recurrent_hgrn() -> Callable:
    from fla.ops.hgrn import fused_recurrent_hgrn

    return lambda g, b: fused_recurrent_hgrn(b, g)[0]


def _warp_scan() -> Callable:
    from accelerated_scan.warp import scan

    return scan


@functools.cache
def _associative_scan() -> Callable:
    from torch._higher_order_ops.associative_scan import associative_scan

    return torch.compile(
        lambda a, b: associative_scan(_combine, (a, b), dim=1, combine_mode="pointwise")[1], dynamic=False
    )


def scans() -> dict[str, tuple[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]]]:
    """name -> (layout, what makes the function) of the scans h_t = a_t h_{t-1} + b_t that are installed. Making one may
    take a minute, in which a package compiles its extension.

    Layout "time": (a, b), (B, L, D). "logs": (log a, b). "channels": (a, b), (B, D, L), L a power of two.
    """
    found: dict[str, tuple[str, Callable]] = {}
    if version_of("flash-linear-attention"):
        found["fla chunk_hgrn"] = ("logs", _chunk_hgrn)
        found["fla fused_recurrent_hgrn"] = ("logs", _fused_recurrent_hgrn)
    if version_of("accelerated-scan"):
        found["accelerated-scan warp"] = ("channels", _warp_scan)
    if version_of("triton") and torch.cuda.is_available():
        found["torch associative_scan, compiled"] = ("time", _associative_scan)
    return found


def heads_scans() -> dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]:
    """name -> f(q, k, v, log a) -> y of the scans of heads with d_k x d_v real states that are installed."""
    if version_of("flash-linear-attention") is None:
        return {}
    from fla.ops.gla import chunk_gla, fused_recurrent_gla

    return {
        "fla chunk_gla": lambda q, k, v, g: chunk_gla(q, k, v, g, scale=1.0)[0],
        "fla fused_recurrent_gla": lambda q, k, v, g: fused_recurrent_gla(q, k, v, g, scale=1.0)[0],
    }


def selective_scan() -> Callable | None:
    """mamba_ssm's, as f(u, delta, A, B, C): (B, D, L), (B, D, L), (D, m), (B, m, L), (B, m, L) -> (B, D, L)."""
    if version_of("mamba-ssm") is None:
        return None
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return lambda u, delta, A, B, C: selective_scan_fn(u, delta, A, B, C, delta_softplus=True)
