"""Linear-recurrent sequence models for Hugging Face Transformers."""

from typing import TYPE_CHECKING

from .startup import is_command_line, quiet_interrupt

if TYPE_CHECKING or not is_command_line():
    with quiet_interrupt():
        from .modeling import (
            FAMILIES,
            ContinuousBatcher,
            GateLoopConfig,
            GateLoopForCausalLM,
            GateLoopForSequenceClassification,
            GateLoopModel,
            LonghornConfig,
            LonghornForCausalLM,
            LonghornForImageClassification,
            LonghornForSequenceClassification,
            LonghornImageProcessor,
            LonghornModel,
            MinGRUConfig,
            MinGRUForCausalLM,
            MinGRUForSequenceClassification,
            MinGRUModel,
            MinLSTMConfig,
            MinLSTMForCausalLM,
            MinLSTMForSequenceClassification,
            MinLSTMModel,
            RecurrentCache,
            RecurrentConfig,
            S5Config,
            S5ForCausalLM,
            S5ForDocumentMatching,
            S5ForSequenceClassification,
            S5ForTokenClassification,
            S5Model,
            StaticRecurrentCache,
            stream,
        )
        from .scan import available_backends, backend_report, linear_scan, longhorn_scan, mingru_scan, minlstm_scan

__version__ = "0.1.0"  # a literal: pyproject.toml reads it from the source text

__all__ = [
    "ContinuousBatcher",
    "FAMILIES",
    "GateLoopConfig",
    "GateLoopForCausalLM",
    "GateLoopForSequenceClassification",
    "GateLoopModel",
    "LonghornConfig",
    "LonghornForCausalLM",
    "LonghornForImageClassification",
    "LonghornForSequenceClassification",
    "LonghornImageProcessor",
    "LonghornModel",
    "MinGRUConfig",
    "MinGRUForCausalLM",
    "MinGRUForSequenceClassification",
    "MinGRUModel",
    "MinLSTMConfig",
    "MinLSTMForCausalLM",
    "MinLSTMForSequenceClassification",
    "MinLSTMModel",
    "RecurrentCache",
    "RecurrentConfig",
    "S5Config",
    "S5ForCausalLM",
    "S5ForDocumentMatching",
    "S5ForSequenceClassification",
    "S5ForTokenClassification",
    "S5Model",
    "StaticRecurrentCache",
    "available_backends",
    "backend_report",
    "linear_scan",
    "longhorn_scan",
    "mingru_scan",
    "minlstm_scan",
    "stream",
]


def __getattr__(name: str):
    """The names above in the command line too, which reads its flags before it imports torch and Transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import modeling, scan

    return getattr(modeling if hasattr(modeling, name) else scan, name)
