"""Operators of the scans whose backward pass recomputes the states: nothing is kept for it but what forward was given.

`define` makes three of them: hf_recurrent::<name>, `<name>_`, which writes the final state over the initial one, and
`<name>_backward`. They have fake kernels and autograd, so torch.compile keeps each call as one node.
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
) -> None:
    """
    Args:
        name: of the operators.
        inputs: the names of the inputs, which are tensors.
        states: of what is differentiated too, but may be None: the initial state first.
        forward: (inputs, states, flags, reverse, backend) -> output and final state; where it gets `final=`, a tensor
            that is the initial state too, it may write into that, and return it.
        backward: (inputs, states, flags, grad_output, grad_final, reverse, backend) -> the gradients of the inputs, the
            initial state and the other states, each contiguous; that of a state that is None is of no element.
        empty: the inputs -> an output and a final state that nothing was written into.
    """
    count, wanted = len(inputs), len(inputs) + len(states)
    tensors = "".join(f"Tensor {x}, " for x in inputs)
    others = "".join(f"Tensor? {x}, " for x in states[1:]) + "Tensor? flags, "
    given, options = f"{tensors}Tensor? {states[0]}, {others}", "bool reverse, str backend"
    qualified = f"hf_recurrent::{name}"
    torch.library.define(qualified, f"({given}{options}) -> (Tensor, Tensor)")
    torch.library.define(f"{qualified}_", f"({tensors}Tensor(a!) state, {others}{options}) -> Tensor")
    torch.library.define(
        f"{qualified}_backward",
        f"({given}Tensor grad_output, Tensor grad_final, {options}) -> ({', '.join(['Tensor'] * wanted)})",
    )

    @torch.library.impl(qualified, "default")
    def _(*arguments):
        *tensors, flags, reverse, backend = arguments
        return forward(tensors[:count], tensors[count:], flags, reverse, backend)

    @torch.library.impl(f"{qualified}_", "default")
    def _(*arguments):
        *tensors, flags, reverse, backend = arguments
        state = tensors[count]
        output, final = forward(tensors[:count], tensors[count:], flags, reverse, backend, final=state)
        if final is not state:
            state.copy_(final)
        return output

    @torch.library.impl(f"{qualified}_backward", "default")
    def _(*arguments):
        *tensors, flags, grad_output, grad_final, reverse, backend = arguments
        return tuple(backward(tensors[:count], tensors[count:], flags, grad_output, grad_final, reverse, backend))

    @torch.library.register_fake(qualified)
    def _(*arguments):
        return empty(*arguments[:count])

    @torch.library.register_fake(f"{qualified}_")
    def _(*arguments):
        return empty(*arguments[:count])[0]

    @torch.library.register_fake(f"{qualified}_backward")
    def _(*arguments):
        *tensors, _, _, grad_final, _, _ = arguments
        like = [*tensors[:count], grad_final, *tensors[count + 1 :]]
        return tuple(
            grad_final.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in like
        )

    def setup_context(ctx, inputs, output):
        *tensors, ctx.reverse, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    def run_backward(ctx, grad_output, grad_final):
        saved = ctx.saved_tensors  # once: where activations are checkpointed, a second look is an error
        grads = getattr(torch.ops.hf_recurrent, f"{name}_backward")(
            *saved, grad_output.resolve_neg(), grad_final.resolve_conj().resolve_neg(), ctx.reverse, ctx.backend
        )
        return *(None if x is None else grad for x, grad in zip(saved, grads, strict=False)), None, None, None

    def no_double_backward(ctx, *grads):
        raise NotImplementedError(
            f"the scan {name} is differentiable once; backend='reference' can be differentiated any number of times"
        )

    torch.library.register_autograd(qualified, run_backward, setup_context=setup_context)
    torch.library.register_autograd(f"{qualified}_backward", no_double_backward)
