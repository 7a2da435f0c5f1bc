"""The language-model head, and a loss that never has the logits of all positions.

Logits of 50,000 tokens are often the largest tensor of a training step. A loss of tokens is a sum over positions, and
can be taken piece by piece, the logits of one piece at a time. What backward will want of a piece is computed either
while its logits are there (`_SumWithGradients`: no logits are computed twice), or in backward from its logits anew.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_tracing

from ..scan.linear import linear

Loss = Callable[[Tensor, Tensor], Tensor]  # of a piece's logits (positions, vocab_size) and labels (positions,)
ALIGNED = 8  # numbers of 16 bits: where rows start at no multiples of so many, a GPU's fast products cannot be used
MANY = 512  # positions for which they are worth a copy of the weights


class LanguageModelHead(nn.Linear):
    """The projection to logits, or to a loss that is a sum over their positions."""

    def forward(self, x: Tensor, labels: Tensor | None = None, loss: Loss | None = None, chunks: int = 1) -> Tensor:
        """
        Args:
            x: (..., hidden_size).
            labels, loss, chunks: for `loss` of so many pieces in place of the logits; see `sum_in_chunks`. All is done
                in one call of this module, around which FSDP and ZeRO gather the weights, and send their gradients,
                once.
        """
        weight, bias = self.weight, self.bias
        if missing := _rows_to_alignment(x, weight):
            weight, bias = F.pad(weight, (0, 0, 0, missing)), bias if bias is None else F.pad(bias, (0, missing))

        def project(x: Tensor) -> Tensor:
            logits = linear(x, weight, bias)
            return logits[..., : self.out_features] if missing else logits

        if loss is None:
            return project(x)
        known = self.bias is None and not is_parametrized(self)
        return sum_in_chunks(project, x, labels, loss, chunks, weight if known else None)


def _rows_to_alignment(x: Tensor, weight: Tensor) -> int:
    """How many rows of zeros under `weight` a GPU's product of 16 bits with it needs to be a fast one: GPT-2's
    vocabulary is odd, rows of logits and of their gradients would begin anywhere. (Inductor pads products itself.)"""
    missing = -weight.shape[0] % ALIGNED
    if not missing or not _in_16_bits_on_a_gpu(weight) or torch.compiler.is_compiling() or is_tracing(x):
        return 0
    return missing if x.numel() >= MANY * x.shape[-1] else 0


def _in_16_bits_on_a_gpu(weight: Tensor) -> bool:
    plain = type(weight) in (Tensor, nn.Parameter)  # what is distributed or quantised has ways of its own
    return plain and weight.is_cuda and _computed_in(weight).itemsize == 2


def number_of_chunks(vocab_size: int, hidden_size: int) -> int:
    """In how many pieces a loss is taken, such that one piece's logits are as many numbers as 8 times the hidden states
    of all positions, about what a block computes on its way. It depends on nothing that may differ between processes:
    where the head is gathered for each piece, they must all make as many calls."""
    return math.ceil(vocab_size / (8 * hidden_size))


def sum_in_chunks(
    project: Callable[[Tensor], Tensor],
    hidden_states: Tensor,
    labels: Tensor,
    loss: Loss,
    chunks: int,
    weight: Tensor | None = None,
) -> Tensor:
    """The sum of `loss(project(x), y)` over so many pieces x of the positions in `hidden_states` (..., D), and y in
    `labels` (...).

    Args:
        weight: the one parameter of `project` and `loss`, if that is known.
    """

    def of_piece(x: Tensor, y: Tensor) -> Tensor:
        return loss(project(x), y)

    pieces = _pieces(hidden_states, labels, chunks)
    trained = weight is None or weight.requires_grad or hidden_states.requires_grad
    if chunks == 1 or not trained or not torch.is_grad_enabled():
        return sum(of_piece(x, y) for x, y in pieces)
    # Gradients in float16 are in its range only after backward's loss scale.
    if weight is None or torch.compiler.is_compiling() or _computed_in(weight) is torch.float16:
        return sum(checkpoint(of_piece, x, y, use_reentrant=False) for x, y in pieces)
    return _SumWithGradients.apply(of_piece, hidden_states, labels, chunks, weight)


def _pieces(hidden_states: Tensor, labels: Tensor, chunks: int) -> list[tuple[Tensor, Tensor]]:
    parts = hidden_states.flatten(0, -2).tensor_split(chunks), labels.flatten().tensor_split(chunks)
    return list(zip(*parts, strict=True))


def _computed_in(weight: Tensor) -> torch.dtype:
    """What products with it are computed in."""
    device = weight.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else weight.dtype


class _SumWithGradients(torch.autograd.Function):
    """The sum of `of_piece(x, y)` over the pieces. Its gradients are taken at once, and kept for backward."""

    @staticmethod
    def forward(ctx, of_piece, hidden_states: Tensor, labels: Tensor, chunks: int, weight: Tensor) -> Tensor:
        of_hidden, of_weight = ctx.needs_input_grad[1], ctx.needs_input_grad[4]
        hidden_grads, weight_grad, total = [], None, 0
        for x, y in _pieces(hidden_states, labels, chunks):
            with torch.enable_grad():
                x = x.detach().requires_grad_(of_hidden)
                part = of_piece(x, y)
            grads = list(torch.autograd.grad(part, [x] * of_hidden + [weight] * of_weight))
            if of_weight:
                grad = grads.pop()
                weight_grad = grad if weight_grad is None else weight_grad.add_(grad)
            hidden_grads += grads
            total = total + part.detach()
        hidden_grad = torch.cat(hidden_grads).view_as(hidden_states) if of_hidden else None
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        if torch.is_grad_enabled():  # create_graph=True: what is kept are numbers to autograd
            raise NotImplementedError("the loss of skip_logits=True is differentiable once")
        hidden_grad, weight_grad = (kept if kept is None else kept * grad for kept in ctx.saved_tensors)
        return None, hidden_grad, None, None, weight_grad
