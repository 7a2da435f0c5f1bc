"""Truncated backpropagation through time: rows are read in chunks, each of which starts from the state before it."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from ..modeling import RecurrentCache
from ..modeling.model import IGNORED
from . import distributed


def chunks(batch: dict[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """The columns of a batch of rows, `size` at a time, with labels that are shifted already: the last token of a chunk
    predicts the first of the next."""
    columns = {name: tensor for name, tensor in batch.items() if name != "labels"}
    columns["shift_labels"] = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    for start in range(0, batch["labels"].shape[1], size):
        yield {name: tensor[:, start : start + size] for name, tensor in columns.items()}


def backward_in_chunks(
    accelerator: Accelerator,
    model: nn.Module,
    batch: dict[str, Tensor],
    targets: Tensor,
    size: int,
    carry_gradients: bool = False,
    synchronise: bool = True,
    loss_options: Mapping[str, bool] = MappingProxyType({}),
) -> Tensor:
    """
    Adds the gradients of a batch of rows, read in chunks of `size` tokens, to the model's. A document that starts
    inside a chunk drops the state there, as in one call.

    Args:
        model: as `accelerator.prepare` returned it.
        batch: `input_ids`, `position_ids` and `labels`, each (B, L).
        targets: what the sum of the losses is divided by.
        size: tokens in a chunk. With L or more, the gradients are those of one call.
        carry_gradients: whether they flow through the state into the chunks before. They are then those of one call
            whatever the size, and all chunks stay in memory; otherwise one at a time does.
        synchronise: whether the last chunk sends the gradients to the other processes.
        loss_options: what else each call of the model is given.

    Returns:
        The loss, 0-dim, without a graph.
    """
    cache, parts = RecurrentCache(accelerator.unwrap_model(model).config), list(chunks(batch, size))
    total = pending = 0
    for number, part in enumerate(parts, start=1):
        last = number == len(parts)
        with contextlib.nullcontext() if last and synchronise else distributed.accumulating(accelerator, model):
            options = {"num_items_in_batch": targets, **loss_options}
            loss = model(**part, **options, past_key_values=cache, use_cache=True).loss
            total, pending = total + loss.detach(), pending + loss
            if last or not carry_gradients:
                # Gradients are averaged over processes, and the sum is wanted.
                accelerator.backward((pending + _nothing(model)) * accelerator.num_processes)
                pending, cache = 0, cache.detach()
    return total


def _nothing(model: nn.Module) -> Tensor | int:
    """0, with a gradient of 0 for the learned initial states: a chunk without the start of a text does not use them,
    and data parallelism waits for every parameter."""
    if not distributed.waits_for_every_gradient(model):
        return 0
    return sum(0 * parameter.sum() for name, parameter in model.named_parameters() if name.endswith("initial_state"))
