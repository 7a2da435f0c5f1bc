"""Training on a generated task: fresh examples at every step, and how good the answers are on others."""

import dataclasses
import inspect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    MambaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    get_cosine_schedule_with_warmup,
)

from ..files import write_whole
from ..hub.code import write_code
from ..measure import machine
from ..messages import nearest
from ..training.model import families
from . import TASKS, generate
from .listops import VOCABULARY
from .symbols import IGNORED

TOKEN_TASKS = ("selective_copying", "associative_recall", "memory_horizon", "induction_heads")
PREDEFINED = {field.name for field in dataclasses.fields(PreTrainedConfig)}  # of no family's own
PEERS = {"mamba": MambaConfig}  # Transformers' own models, to compare with on tasks of tokens
SIGNAL_TASKS = ("pendulum", "tones", "pathfinder")  # are read as numbers, which S5 alone takes
TRAINABLE = (*TOKEN_TASKS, "listops", *SIGNAL_TASKS)


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
        eval_examples: of the validation split, on which `metric` is measured, `evaluations` times in equal steps.
        seed: of the weights and the examples.
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

    def __post_init__(self):
        if self.task not in TRAINABLE:
            raise ValueError(f"--task {self.task}: cannot be trained on here{nearest(self.task, TRAINABLE)}")
        signal = self.task in SIGNAL_TASKS
        self.model_type = self.model_type or ("s5" if signal else "mingru")
        configs = families() | (PEERS if self.task in TOKEN_TASKS else {})
        if signal and self.model_type != "s5":
            raise ValueError(f"--model-type {self.model_type}: {self.task} is read as numbers, which s5 alone takes")
        if self.model_type not in configs:
            raise ValueError(f"--model-type {self.model_type}: no such family{nearest(self.model_type, configs)}")
        generate(self.task, 1, **self.sizes)  # what does not fit is refused before any work
        if self.task == "tones":
            generate(self.task, 1, **half_rate(self.sizes))

    def create_model(self) -> PreTrainedModel:
        """A new model for the task.

        Raises:
            ValueError: a field that the family does not have, or a value that does not fit.
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
        return auto.from_config(config)

    @property
    def metric(self) -> str:
        """What is measured: "accuracy", the share of labels that are predicted, or "mse", the mean squared error."""
        return "mse" if self.task == "pendulum" else "accuracy"

    def _head(self) -> tuple[type, dict]:
        """The Auto class, and what the task says of the configuration: the sizes of inputs and outputs."""
        sizes = {name: p.default for name, p in inspect.signature(TASKS[self.task]).parameters.items()} | self.sizes
        if self.task == "pendulum":
            # A unit of time is the grid's interval, so that S5's steps suit it as they suit samples of a signal.
            numbers = {"num_labels": 2, "problem_type": "regression", "step_rescale": sizes["grid"] / sizes["duration"]}
            return AutoModelForTokenClassification, {"input_size": sizes["size"] ** 2, **numbers}
        if self.task == "tones":
            return AutoModelForSequenceClassification, {"input_size": 1, "num_labels": sizes["classes"]}
        if self.task == "pathfinder":
            return AutoModelForSequenceClassification, {"input_size": 1, "num_labels": 2}
        if self.task == "listops":
            fields = {"vocab_size": len(VOCABULARY), "num_labels": 10, "pad_token_id": 0}
            return AutoModelForSequenceClassification, fields
        if self.task == "memory_horizon":
            return AutoModelForCausalLM, {"vocab_size": max(sizes["numbers"] + 1, sizes["modulo"])}
        return AutoModelForCausalLM, {"vocab_size": sizes["vocab_size"]}


def answers(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and of the places with a label: the tokens, classes or numbers predicted, and the labels."""
    labels = batch["labels"]
    if labels.ndim == 1 or labels.is_floating_point():
        outputs = model(**batch, use_cache=False)
        return outputs.loss, outputs.logits if labels.is_floating_point() else outputs.logits.argmax(-1), labels
    wanted = labels != IGNORED
    hidden_states = model.base_model(batch["input_ids"], use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden_states[wanted])  # of these alone: most places have no label
    return torch.nn.functional.cross_entropy(logits.float(), labels[wanted]), logits.argmax(-1), labels[wanted]


def _tensors(arrays: dict[str, np.ndarray], rows: slice, device: torch.device) -> dict[str, Tensor]:
    # The pendulum's times are for pictures of it: the model is told the intervals.
    return {name: torch.from_numpy(array[rows]).to(device) for name, array in arrays.items() if name != "times"}


@torch.no_grad()
def measure(model: PreTrainedModel, examples: dict[str, np.ndarray], batch_size: int, **inputs) -> float:
    """The share of labels that the model predicts; of labels that are not whole numbers, the mean squared error.

    Args:
        inputs: are given to the model with each batch: `step_rescale`.
    """
    model.eval()
    total = number = 0
    for first in range(0, len(examples["labels"]), batch_size):
        batch = _tensors(examples, slice(first, first + batch_size), model.device)
        _, predicted, labels = answers(model, batch | inputs)
        right = (predicted - labels).square() if labels.is_floating_point() else predicted == labels
        total, number = total + right.sum().item(), number + labels.numel()
    model.train()
    return total / number


def half_rate(sizes: dict) -> dict:
    """The arguments of `tones` for half the sampling rate."""
    return sizes | {"decimation": 2 * sizes.get("decimation", 1)}


def at_half_rate(model: PreTrainedModel, training: TaskTraining) -> dict[str, float]:
    """Of a model that was trained on tones: its accuracy on the same examples at half the sampling rate, with
    `step_rescale` doubled and without."""
    sizes = half_rate(training.sizes)
    examples = generate(training.task, training.eval_examples, training.seed, "validation", **sizes)
    rescale = 2 * model.config.step_rescale
    return {
        "accuracy": measure(model, examples, training.batch_size, step_rescale=rescale),
        "accuracy_without_rescaling": measure(model, examples, training.batch_size),
    }


def _groups(model: PreTrainedModel, training: TaskTraining) -> list[dict]:
    if hasattr(model, "parameter_groups"):
        return model.parameter_groups(training.learning_rate, training.weight_decay)
    parameters = list(model.parameters())  # a peer's: matrices decay, as ours do
    return [
        {"params": [p for p in parameters if (p.ndim >= 2) is matrices], "lr": training.learning_rate, **decay}
        for matrices, decay in ((True, {"weight_decay": training.weight_decay}), (False, {"weight_decay": 0.0}))
    ]


def train_task(
    training: TaskTraining,
    output: Path | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, float, float | None], None] = lambda step, loss, accuracy: None,
) -> dict:
    """
    Trains a new model.

    Args:
        output: a folder that exists, for the model and task.json (what is returned).
        progress: is told each step's number and loss, and the metric where it was measured.

    Returns:
        The training's arguments, "parameters", "metric": its name, under which the last one is, "curve": for each
        measurement step, loss (the mean since the one before) and metric; of tones also "half_rate", as `at_half_rate`
        says; "seconds", of all of it, "device" and "machine".

    Raises:
        ValueError: what `TaskTraining.create_model` raises.
        FloatingPointError: the loss is not finite.
    """
    started = time.perf_counter()
    model = training.create_model().to(device).train()
    optimizer = torch.optim.AdamW(_groups(model, training))
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, training.max_steps // 10), training.max_steps)
    held_out = generate(training.task, training.eval_examples, training.seed, "validation", **training.sizes)
    every, curve, losses = max(1, training.max_steps // training.evaluations), [], []
    rng = np.random.default_rng([training.seed, 0])
    for step in range(1, training.max_steps + 1):
        arrays = TASKS[training.task](rng, training.batch_size, **training.sizes)
        loss, _, _ = answers(model, _tensors(arrays, slice(None), model.device))
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}: try a smaller --learning-rate")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        measured = None
        if step % every == 0 or step == training.max_steps:
            measured = measure(model, held_out, training.batch_size)
            curve.append({"step": step, "loss": float(np.mean(losses)), training.metric: measured})
            losses = []
        progress(step, loss.item(), measured)
    result = {
        **vars(training),
        "parameters": model.num_parameters(),
        "metric": training.metric,
        training.metric: curve[-1][training.metric],
        "curve": curve,
        **({"half_rate": at_half_rate(model, training)} if training.task == "tones" else {}),
        "seconds": round(time.perf_counter() - started, 3),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "machine": machine(("torch", "transformers")),
    }
    if output is not None:
        model.eval().save_pretrained(output)
        if training.model_type not in PEERS:
            write_code(output, type(model.config))
        write_whole(output / "task.json", json.dumps(result, indent=2) + "\n")
    return result
