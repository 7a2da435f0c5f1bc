"""The recurrence h_t = a_t h_{t-1} + b_t, alone and fused with what surrounds it; nothing here knows of models."""

from .gateloop_heads import gateloop_heads_scan
from .irregular import s5_scan
from .kernel_cache import BackendUnavailable
from .longhorn import longhorn_scan
from .ops import available_backends, backend_report, linear_scan, mingru_scan, minlstm_scan
from .reading import gateloop_scan

__all__ = [
    "BackendUnavailable",
    "available_backends",
    "backend_report",
    "gateloop_heads_scan",
    "gateloop_scan",
    "linear_scan",
    "longhorn_scan",
    "mingru_scan",
    "minlstm_scan",
    "s5_scan",
]
