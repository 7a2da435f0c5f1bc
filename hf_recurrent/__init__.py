"""Linear-recurrent sequence models for Hugging Face Transformers."""

from .modeling import (
    FAMILIES,
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
)
from .scan import available_backends, backend_report, linear_scan, mingru_scan, minlstm_scan

__version__ = "0.1.0"  # a literal: pyproject.toml reads it from the source text

__all__ = [
    "FAMILIES",
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
    "available_backends",
    "backend_report",
    "linear_scan",
    "mingru_scan",
    "minlstm_scan",
]
