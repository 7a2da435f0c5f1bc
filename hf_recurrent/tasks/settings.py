"""What is trained on a generated task: the task's sizes, the model that suits it, the optimiser's settings."""

import dataclasses
from dataclasses import dataclass, field

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..messages import nearest
from ..modeling.cache import RecurrentCache
from ..training.model import families, load_model
from . import defaults, generate
from .digits import count, division
from .listops import VOCABULARY

TOKEN_TASKS = ("selective_copying", "associative_recall", "memory_horizon", "induction_heads")
PREDEFINED = {field.name for field in dataclasses.fields(PreTrainedConfig)}  # of no family's own
PEERS = {"mamba": MambaConfig}  # Transformers' own models, to compare with on tasks of tokens
# Fields that say how weights begin and learn, or which kernel takes them, not what they mean.
NO_MEANING = ("dt_min", "dt_max", "c_init", "batch_norm_momentum", "time_step_min", "time_step_max", "time_step_floor")
NO_MEANING += ("time_step_scale", "time_step_init_scheme", "rescale_prenorm_residual")
NO_MEANING += ("use_mambapy", "use_associative_scan")
SIGNAL_TASKS = ("pendulum", "tones", "pathfinder", "digits")  # are read as numbers, which S5 alone takes
TRAINABLE = (*TOKEN_TASKS, "listops", *SIGNAL_TASKS)


def metric_of(task: str) -> str:
    """What is measured on a task: "accuracy", the share of labels that are predicted, or "mse", the mean squared
    error."""
    return "mse" if task == "pendulum" else "accuracy"


def half_rate(sizes: dict) -> dict:
    """The arguments of `tones` for half the sampling rate."""
    return sizes | {"decimation": 2 * sizes.get("decimation", 1)}


@dataclass
class TaskTraining:
    """
    Args:
        task: one of TRAINABLE.
        sizes: arguments of the task's function.
        model_type: a family, by default minGRU, and S5 for SIGNAL_TASKS, which is the only one for these; on tasks of
            tokens also one of PEERS.
        config: fields of its configuration; the sizes of inputs and outputs are the task's.
        max_steps, batch_size, learning_rate, weight_decay: of AdamW, with a warm-up over a tenth of the steps, then
            half a cosine; gradients are clipped to the norm 1.
        eval_examples: of the validation split, on which `metric` is measured, `evaluations` times in steps as equal as
            whole numbers allow, or after each where there are fewer.
        seed: of the weights and the examples.
        start_from: a folder with the model of an earlier run, of the same family and configuration, whose weights this
            one starts from, with a new optimiser: for a curriculum, from short examples to long ones. With that run's
            seed and sizes it would see that run's examples again.
    """

    task: str
    sizes: dict = field(default_factory=dict)
    model_type: str | None = None
    config: dict = field(default_factory=dict)
    max_steps: int = 1000
    batch_size: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.0
    eval_examples: int = 1000
    evaluations: int = 10
    seed: int = 0
    start_from: str | None = None

    def __post_init__(self):
        for name in ("max_steps", "batch_size", "eval_examples", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.task not in TRAINABLE:
            raise ValueError(f"--task {self.task}: cannot be trained on here{nearest(self.task, TRAINABLE)}")
        signal = self.task in SIGNAL_TASKS
        self.model_type = self.model_type or ("s5" if signal else "mingru")
        configs = families() | (PEERS if self.task in TOKEN_TASKS else {})
        if signal and self.model_type != "s5":
            raise ValueError(f"--model-type {self.model_type}: {self.task} is read as numbers, which s5 alone takes")
        if self.model_type in PEERS.keys() - configs.keys():
            only = f"is compared on {', '.join(TOKEN_TASKS)} only, got {self.task}"
            raise ValueError(f"--model-type {self.model_type}: {only}")
        if self.model_type not in configs:
            raise ValueError(f"--model-type {self.model_type}: no such family{nearest(self.model_type, configs)}")
        generate(self.task, 1, **self.sizes)  # what does not fit is refused before any work
        if self.task == "tones":
            try:
                generate(self.task, 1, **half_rate(self.sizes))
            except ValueError as error:
                raise ValueError(f"{error}, at half the rate, at which the trained model is measured too") from None
        if self.task == "digits":
            for flag, got, split in (
                ("--batch-size", self.batch_size, "train"),
                ("--eval-examples", self.eval_examples, "validation"),
            ):
                if got > (most := count(self.sizes["folder"], split)):
                    raise ValueError(f"{flag} must be at most {most}, the digits of the {split} split, got {got}")

    def create_model(self) -> PreTrainedModel:
        """A new model for the task.

        Raises:
            ValueError: a field that the family does not have, or a value that does not fit; no model in `start_from`,
                or another one: of another class, with weights of other shapes or for another configuration.
        """
        auto, sizes_of_task = self._head()
        config_class = (families() | PEERS)[self.model_type]
        valid = {field.name for field in dataclasses.fields(config_class)} - {*sizes_of_task, *PREDEFINED}
        for name in self.config:
            if name not in valid:
                raise ValueError(f"{name} is not a field of {config_class.__name__} to set{nearest(name, valid)}")
        torch.manual_seed(self.seed)
        try:
            config = config_class(**{"hidden_size": 64, "num_hidden_layers": 2, **self.config}, **sizes_of_task)
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise ValueError(f"{config_class.__name__}: {' '.join(str(error).split())}") from None
        model = auto.from_config(config)
        if self.start_from is not None:
            self._start(model, load_model(self.start_from, "--start-from", auto, PEERS), sizes_of_task)
        return model

    def _start(self, model: PreTrainedModel, earlier: PreTrainedModel, sizes_of_task: dict) -> None:
        """Give `model` the weights of another, which mean the same there but for the sizes of the task."""
        if type(earlier) is not type(model):
            kinds = f"a {type(earlier).__name__}, expected a {type(model).__name__}"
            raise ValueError(f"--start-from {self.start_from}: holds {kinds}")
        weights, own = earlier.state_dict(), model.state_dict()
        for name in {**own, **weights}:
            then, now = (tuple(each[name].shape) if name in each else None for each in (weights, own))
            if then != now:
                raise ValueError(f"--start-from {self.start_from}: {name} has the shape {then}, here it is {now}")
        # A state means the same where the weights do.
        field = RecurrentCache(earlier.config).differing_field(model.config, ignoring=(*sizes_of_task, *NO_MEANING))
        if field is not None:
            then, now = (getattr(each.config, field) for each in (earlier, model))
            raise ValueError(f"--start-from {self.start_from}: was trained with {field} {then}, here it is {now}")
        model.load_state_dict(weights)

    @property
    def metric(self) -> str:
        """As `metric_of` says."""
        return metric_of(self.task)

    @property
    def division(self) -> str | None:
        """Of digits, as `digits.division` says; else None."""
        return division(self.sizes["folder"]) if self.task == "digits" else None

    def _head(self) -> tuple[type, dict]:
        """The Auto class, and what the task says of the configuration: the sizes of inputs and outputs."""
        sizes = defaults(self.task) | self.sizes
        if self.task == "pendulum":
            # A unit of time is the grid's interval, so that S5's steps suit it as they suit samples of a signal.
            numbers = {"num_labels": 2, "problem_type": "regression", "step_rescale": sizes["grid"] / sizes["duration"]}
            return AutoModelForTokenClassification, {"input_size": sizes["size"] ** 2, **numbers}
        if self.task == "tones":
            return AutoModelForSequenceClassification, {"input_size": 1, "num_labels": sizes["classes"]}
        if self.task == "pathfinder":
            return AutoModelForSequenceClassification, {"input_size": 1, "num_labels": 2}
        if self.task == "digits":
            return AutoModelForSequenceClassification, {"input_size": 1, "num_labels": 10}
        if self.task == "listops":
            fields = {"vocab_size": len(VOCABULARY), "num_labels": 10, "pad_token_id": 0}
            return AutoModelForSequenceClassification, fields
        if self.task == "memory_horizon":
            return AutoModelForCausalLM, {"vocab_size": max(sizes["numbers"] + 1, sizes["modulo"])}
        return AutoModelForCausalLM, {"vocab_size": sizes["vocab_size"]}
