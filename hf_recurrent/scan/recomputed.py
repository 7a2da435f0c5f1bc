"""Operators whose backward pass recomputes what it needs, the states of scans: nothing is kept for it but what forward
was given.

`define` makes hf_recurrent::<name> and `<name>_backward`, and `define_update` `<name>_`, which writes the final state
over the initial one. They have fake kernels and autograd, so torch.compile keeps each call as one node.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def define(
    name: str,
    inputs: Sequence[str],
    states: Sequence[str],
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., Sequence[Tensor]],
    empty: Callable[..., tuple[Tensor, Tensor]],
    option: str = "reverse",
) -> None:
    """
    Args:
        name: of the operators.
        inputs: the names of the inputs, which are tensors.
        states: of what is differentiated too, but may be None: the initial state first.
        forward: (inputs, states, flags, option, backend) -> output and final state.
        backward: (inputs, states, flags, grad_output, grad_final, option, backend) -> the gradients of the inputs, the
            initial state and the other states, each contiguous; that of a state that is None is of no element.
        empty: the inputs -> an output and a final state that nothing was written into.
        option: the name of the one that they take, a bool.
    """
    count, wanted = len(inputs), len(inputs) + len(states)
    given, options = _arguments(inputs, states, f"Tensor? {states[0]}"), f"bool {option}, str backend"
    qualified = f"hf_recurrent::{name}"
    torch.library.define(qualified, f"({given}{options}) -> (Tensor, Tensor)")
    torch.library.define(
        f"{qualified}_backward",
        f"({given}Tensor grad_output, Tensor grad_final, {options}) -> ({', '.join(['Tensor'] * wanted)})",
    )

    @torch.library.impl(qualified, "default")
    def _(*arguments):
        *tensors, flags, chosen, backend = arguments
        return forward(tensors[:count], tensors[count:], flags, chosen, backend)

    @torch.library.impl(f"{qualified}_backward", "default")
    def _(*arguments):
        *tensors, flags, grad_output, grad_final, chosen, backend = arguments
        return tuple(backward(tensors[:count], tensors[count:], flags, grad_output, grad_final, chosen, backend))

    @torch.library.register_fake(qualified)
    def _(*arguments):
        return empty(*arguments[:count])

    @torch.library.register_fake(f"{qualified}_backward")
    def _(*arguments):
        *tensors, _, _, grad_final, _, _ = arguments
        like = [*tensors[:count], grad_final, *tensors[count + 1 :]]
        return tuple(
            grad_final.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in like
        )

    def setup_context(ctx, inputs, output):
        *tensors, ctx.chosen, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    def run_backward(ctx, grad_output, grad_final):
        saved = ctx.saved_tensors  # once: where activations are checkpointed, a second look is an error
        grads = getattr(torch.ops.hf_recurrent, f"{name}_backward")(
            *saved, grad_output.resolve_neg(), grad_final.resolve_conj().resolve_neg(), ctx.chosen, ctx.backend
        )
        return *(None if x is None else grad for x, grad in zip(saved, grads, strict=False)), None, None, None

    def no_double_backward(ctx, *grads):
        raise NotImplementedError(
            f"{name} is differentiable once; a scan with backend='reference' can be differentiated any number of times"
        )

    torch.library.register_autograd(qualified, run_backward, setup_context=setup_context)
    torch.library.register_autograd(f"{qualified}_backward", no_double_backward)


def define_update(
    name: str,
    inputs: Sequence[str],
    states: Sequence[str],
    forward: Callable[..., tuple[Tensor, Tensor]],
    empty: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """
    Args:
        forward: as for `define`; besides gets `final=`, a tensor that is the initial state too, which it may write the
            final state into, and return.
    """
    count, qualified = len(inputs), f"hf_recurrent::{name}_"
    given = _arguments(inputs, states, "Tensor(a!) state")
    torch.library.define(qualified, f"({given}bool reverse, str backend) -> Tensor")

    @torch.library.impl(qualified, "default")
    def _(*arguments):
        *tensors, flags, reverse, backend = arguments
        state = tensors[count]
        output, final = forward(tensors[:count], tensors[count:], flags, reverse, backend, final=state)
        if final is not state:
            state.copy_(final)
        return output

    @torch.library.register_fake(qualified)
    def _(*arguments):
        return empty(*arguments[:count])[0]


def _arguments(inputs: Sequence[str], states: Sequence[str], state: str) -> str:
    """Of an operator's schema, those up to the flags; `state` is that of the initial one."""
    others = [f"Tensor? {x}" for x in (*states[1:], "flags")]
    return "".join(f"{x}, " for x in (*(f"Tensor {x}" for x in inputs), state, *others))
