"""How good a model's answers to a generated task are."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import generate
from .settings import TaskTraining, half_rate
from .symbols import IGNORED


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


def tensors(arrays: dict[str, np.ndarray], rows: slice, device: torch.device) -> dict[str, Tensor]:
    """Some rows of a task's arrays, as a model takes them."""
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
        batch = tensors(examples, slice(first, first + batch_size), model.device)
        _, predicted, labels = answers(model, batch | inputs)
        right = (predicted - labels).square() if labels.is_floating_point() else predicted == labels
        total, number = total + right.sum().item(), number + labels.numel()
    model.train()
    return total / number


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
