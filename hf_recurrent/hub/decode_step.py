"""One step of decoding as a program of its own: a token and the states in, logits and the new states out."""

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..modeling import RecurrentCache
from ..modeling.model import RecurrentForCausalLM
from ..scan.cells import BY_NAME
from ..scan.convolution import _short_convolution
from ..scan.gateloop_heads import _by_linear_scan
from ..scan.longhorn_plain import loop
from ..scan.reference import linear_scan_loop


class DecodeStep(nn.Module):
    """
    Reads one token per row. `names` are (layer, state) of the tensors that hold the states, in their order, and
    `initial_states` those before the first token.

    Args:
        model: a language model.
        batch_size: rows.
    """

    def __init__(self, model: RecurrentForCausalLM, batch_size: int = 1):
        super().__init__()
        self.model = model.eval()
        with torch.no_grad():
            token = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
            # A token that is masked leaves the states as they are before the first one.
            layers = model(token, attention_mask=token, use_cache=True).past_key_values.layers
        self.names = [(index, name) for index, layer in enumerate(layers) for name in sorted(layer.states)]
        self.initial_states = [layers[index].states[name] for index, name in self.names]

    def forward(self, input_ids: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """input_ids, (B, 1), and the states -> logits of the next token, (B, vocab_size), and the states after it."""
        cache = RecurrentCache(self.model.config)
        for (index, name), state in zip(self.names, states, strict=True):
            cache.layers[index].states[name] = state
        cache.seen_tokens = 1  # whatever the number: it is not 0, so there are states
        out = self.model(input_ids, past_key_values=cache, use_cache=True)
        layers = out.past_key_values.layers
        return out.logits[:, -1], [layers[index].states[name] for index, name in self.names]


# The operators, at one position without padding, by the loop that defines them: unlike the chunked form it writes
# into nothing, which a program may not.


def _scan(cell, inputs, initial_state, flags, reverse, backend):
    a, b = BY_NAME[cell].coefficients(*inputs)
    h, state = linear_scan_loop(a, b, initial_state, None, None, reverse)
    return h.to(inputs[-1].dtype), state


def _read_scan(cell, inputs, initial_state, flags, reverse, keeps_states, backend):
    a, b = BY_NAME[cell].coefficients(*inputs)
    h, state = linear_scan_loop(a, b, initial_state, None, None, reverse)
    y = BY_NAME[cell].read(*inputs, h).to(inputs[0].dtype)
    return y, y.new_empty(0), state


def _longhorn(x, dt, k, q, initial_state, flags, reverse, backend):
    o, state = loop(x, dt, k, q, initial_state, None, None, reverse)
    return o.to(x.dtype), state


def _gateloop_heads(q, k, v, a, initial_state, start, flags, reverse, backend):
    def scan(a, b, initial_state, **_):
        return linear_scan_loop(a, b.to(a.dtype), initial_state, None, None, reverse)  # transitions may be complex

    return _by_linear_scan(scan, q, k, v, a, initial_state)


def _convolution(x, weight, state, bias, flags, silu, backend):
    return _short_convolution(x, weight, bias, state, silu=silu)


def export_decode_step(model: RecurrentForCausalLM, batch_size: int = 1) -> ExportedProgram:
    """
    `DecodeStep` by torch.export, in PyTorch's own operators alone: `torch.export.save` writes it to a file that runs
    where this package is not installed. The number of rows is fixed.

    Returns:
        The program; `program.module()(input_ids, states)` is what `DecodeStep` computes, but for rounding.

    Raises:
        ValueError: the model calls an operator that has no form in plain PyTorch.
    """
    step = DecodeStep(model, batch_size)
    token = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        program = torch.export.export(step, (token, step.initial_states))
        ours = torch.ops.hf_recurrent
        own = {
            ours.scan.default: _scan,
            ours.read_scan.default: _read_scan,
            ours.gateloop_heads.default: _gateloop_heads,
            ours.longhorn.default: _longhorn,
            ours.short_convolution.default: _convolution,
        }
        program = program.run_decompositions(own)
    left = {str(node.target) for node in program.graph.nodes if str(node.target).startswith("hf_recurrent")}
    if left:
        raise ValueError(f"the model calls {', '.join(sorted(left))}, which has no form in plain PyTorch")
    return program
