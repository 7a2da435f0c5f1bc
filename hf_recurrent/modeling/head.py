"""The language-model head, and a loss that never has the logits of all positions.

Logits of 50,000 tokens are often the largest tensor of a training step. A loss of tokens is a sum over positions, and
can be taken piece by piece: each piece's logits are computed, summed up, and forgotten until backward computes them
again.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .layers import Linear

Project = Callable[[Tensor], Tensor]  # (positions, hidden_size) -> (positions, vocab_size)


class LanguageModelHead(Linear):
    """The projection to logits, for one use or for several of a single call."""

    def forward(self, x: Tensor, use: Callable[[Project, Tensor], Tensor] | None = None) -> Tensor:
        """
        Args:
            x: (..., hidden_size).
            use: what to return in place of the logits, `use(project, x)`. All that it projects happens in one call of
                this module, around which FSDP and ZeRO gather the weights, and send their gradients, once.
        """
        return super().forward(x) if use is None else use(super().forward, x)


def number_of_chunks(vocab_size: int, hidden_size: int) -> int:
    """In how many pieces a loss is taken, such that one piece's logits are as many numbers as an MLP of the usual 4
    times hidden_size has for all positions. It depends on nothing that may differ between processes: where the head is
    gathered for each piece, they must all make as many calls."""
    return math.ceil(vocab_size / (4 * hidden_size))


def sum_in_chunks(
    loss: Callable[[Tensor, Tensor], Tensor], hidden_states: Tensor, labels: Tensor, chunks: int
) -> Tensor:
    """The sum of `loss(x, y)` over so many pieces x of the positions in `hidden_states` (..., D), and y in `labels`
    (...), each of which keeps nothing but x for backward."""
    keeps = chunks == 1 or not torch.is_grad_enabled()
    pieces = zip(hidden_states.flatten(0, -2).tensor_split(chunks), labels.flatten().tensor_split(chunks), strict=True)
    return sum(loss(x, y) if keeps else checkpoint(loss, x, y, use_reentrant=False) for x, y in pieces)
