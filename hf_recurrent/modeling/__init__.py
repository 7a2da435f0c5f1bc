"""The models: one file per family, and what they share."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

# From its module: `transformers.AutoImageProcessor` of 5.17 is a placeholder where there is no torchvision.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from .batching import ContinuousBatcher
from .cache import RecurrentCache, StaticRecurrentCache
from .configuration import RecurrentConfig
from .gateloop import GateLoopConfig, GateLoopForCausalLM, GateLoopForSequenceClassification, GateLoopModel
from .image_processing_longhorn import LonghornImageProcessor
from .longhorn import (
    LonghornConfig,
    LonghornForCausalLM,
    LonghornForImageClassification,
    LonghornForSequenceClassification,
    LonghornModel,
)
from .mingru import MinGRUConfig, MinGRUForCausalLM, MinGRUForSequenceClassification, MinGRUModel
from .minlstm import MinLSTMConfig, MinLSTMForCausalLM, MinLSTMForSequenceClassification, MinLSTMModel
from .s5 import (
    S5Config,
    S5ForCausalLM,
    S5ForDocumentMatching,
    S5ForSequenceClassification,
    S5ForTokenClassification,
    S5Model,
)
from .streaming import stream

# Every family: its configuration, and the class that each Auto class makes of it.
FAMILIES = {
    GateLoopConfig: {
        AutoModel: GateLoopModel,
        AutoModelForCausalLM: GateLoopForCausalLM,
        AutoModelForSequenceClassification: GateLoopForSequenceClassification,
    },
    LonghornConfig: {
        AutoModel: LonghornModel,
        AutoModelForCausalLM: LonghornForCausalLM,
        AutoModelForImageClassification: LonghornForImageClassification,
        AutoModelForSequenceClassification: LonghornForSequenceClassification,
    },
    MinGRUConfig: {
        AutoModel: MinGRUModel,
        AutoModelForCausalLM: MinGRUForCausalLM,
        AutoModelForSequenceClassification: MinGRUForSequenceClassification,
    },
    MinLSTMConfig: {
        AutoModel: MinLSTMModel,
        AutoModelForCausalLM: MinLSTMForCausalLM,
        AutoModelForSequenceClassification: MinLSTMForSequenceClassification,
    },
    S5Config: {
        AutoModel: S5Model,
        AutoModelForCausalLM: S5ForCausalLM,
        AutoModelForSequenceClassification: S5ForSequenceClassification,
        AutoModelForTokenClassification: S5ForTokenClassification,
    },
}

for config_class, model_classes in FAMILIES.items():
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for auto_class, model_class in model_classes.items():
        auto_class.register(config_class, model_class, exist_ok=True)
        # The class names in this table decide on more, which `register` leaves out: whether Trainer shifts the labels
        # under label smoothing, and what a model card says that the model is for.
        auto_class._model_mapping._model_mapping[config_class.model_type] = model_class.__name__
AutoImageProcessor.register(LonghornConfig, image_processor_classes={"pil": LonghornImageProcessor}, exist_ok=True)

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
    "stream",
]
