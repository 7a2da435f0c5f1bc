"""How much each layer remembers, of every family: |a_t| of h_t = a_t h_{t-1} + b_t, measured on real rows.

    gates_closed   share of the |a| below 0.01: what came before is forgotten at that token
    gates_open     share of the |a| above 0.99
    memory_W       mean over channels and places of |a_{t+1} ... a_{t+W}|: what is left of a state W tokens later, for
                   W = 1, 16, 256 ... as far as the rows reach

each as the mean over all layers and, as `memory_16/layer_3`, of each. Channels are a state's numbers: Longhorn has
`state_size` for each channel of the recurrence. That states are dropped where documents begin is left out.

They are taken in a forward pass of their own, without dropout or gradients, by hooks that are removed after it: nothing
of the training changes, neither its speed at other steps nor its random numbers.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modeling.gateloop import GateLoopMixer
from ..modeling.layers import RecurrentBlock
from ..modeling.longhorn import LonghornMixer
from ..modeling.mingru import MinGRUMixer
from ..modeling.minlstm import MinLSTMMixer
from ..modeling.s5 import S5Mixer
from . import distributed

CLOSED, OPEN = 0.01, 0.99
WINDOW_BASE = 16  # windows are its powers
TOKENS = 2048  # of a row that are looked at

Seen = dict[str, tuple[Tensor, Tensor]]  # of some modules in a mixer, by name: their input and output


def _mingru(mixer: MinGRUMixer, seen: Seen) -> Iterator[Tensor]:
    _, gate = seen["in_proj"][1].float().chunk(2, dim=-1)
    yield torch.sigmoid(-gate)  # 1 - z


def _minlstm(mixer: MinLSTMMixer, seen: Seen) -> Iterator[Tensor]:
    _, forget, taken = seen["in_proj"][1].float().chunk(3, dim=-1)
    yield torch.sigmoid(F.logsigmoid(forget) - F.logsigmoid(taken))  # f / (f + i)


def _gateloop(mixer: GateLoopMixer, seen: Seen) -> Iterator[Tensor]:
    yield mixer.transitions(mixer.transition_inputs(seen["in_proj"][0]), torch.float32).abs().flatten(2)


def _longhorn(mixer: LonghornMixer, seen: Seen) -> Iterator[Tensor]:
    beta = torch.sigmoid(seen["dt_head"][1].float())
    k = seen["x_proj"][1].float().split(mixer.widths, dim=-1)[1].square()
    step = beta / (1 + beta * k.sum(-1, keepdim=True))
    for one in k.unbind(-1):  # one by one: together they are state_size times as large as all else
        yield 1 - step * one[..., None]


def _s5(mixer: S5Mixer, seen: Seen) -> Iterator[Tensor]:
    ssm = mixer.ssm
    a, _ = ssm.discretize(ssm.config.step_rescale * ssm.log_step[:, 0].float().exp())
    yield a.abs()[None, None]


# For each family's mixer: the modules in it to look at, and what gives |a| of them, (1, L or 1, channels) each time.
FAMILIES: dict[type[nn.Module], tuple[tuple[str, ...], Callable[[nn.Module, Seen], Iterator[Tensor]]]] = {
    MinGRUMixer: (("in_proj",), _mingru),
    MinLSTMMixer: (("in_proj",), _minlstm),
    GateLoopMixer: (("in_proj",), _gateloop),
    LonghornMixer: (("x_proj", "dt_head"), _longhorn),
    S5Mixer: ((), _s5),
}


def windows(length: int) -> list[int]:
    """1, 16, 256 ... up to `length`."""
    found = [1]
    while found[-1] * WINDOW_BASE <= length:
        found.append(found[-1] * WINDOW_BASE)
    return found


def summarise(coefficients: Iterator[Tensor], length: int) -> dict[str, Tensor]:
    """gates_closed, gates_open, memory_1 ... memory_`length` of |a|, tensors (1, places or 1, channels); each 0-dim."""
    sums: dict[str, list[Tensor]] = {}
    for a in coefficients:
        wide = distributed.widest(a.device)
        values = {"gates_closed": (a < CLOSED).to(wide), "gates_open": (a > OPEN).to(wide)}
        total = F.pad(a.to(wide).clamp(min=1.2e-38).log().cumsum(1), (0, 0, 1, 0))  # above float32's subnormal numbers
        for window in windows(length):
            # A single place stands for all of them. Of windows longer than the row the mean is that of nothing, nan.
            ends = a.to(wide) ** window if a.shape[1] == 1 else (total[:, window:] - total[:, :-window]).exp()
            values[f"memory_{window}"] = ends
        for name, value in values.items():
            sums.setdefault(name, []).append(value.mean())
    return {name: torch.stack(values).mean() for name, values in sums.items()}


@contextlib.contextmanager
def watching(model: nn.Module, length: int) -> Iterator[list[dict[str, Tensor]]]:
    """Yields a list that a forward pass fills with what `summarise` says of each layer, in their order."""
    found: list[dict[str, Tensor]] = []
    handles = []
    for block in model.modules():
        if not isinstance(block, RecurrentBlock):
            continue
        names, coefficients = FAMILIES[type(block.mixer)]
        seen: Seen = {}
        for name in names:
            module = block.mixer.get_submodule(name)
            handles.append(module.register_forward_hook(_note(seen, name)))
        # While the block's parameters are together, where they are sharded over processes.
        handles.append(block.mixer.register_forward_hook(_summary(seen, coefficients, found, length)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _note(seen: Seen, name: str) -> Callable:
    def hook(module, inputs, output):
        seen[name] = (inputs[0], output)

    return hook


def _summary(seen: Seen, coefficients: Callable, found: list, length: int) -> Callable:
    def hook(mixer, inputs, output):
        found.append(summarise(coefficients(mixer, seen), length))
        seen.clear()

    return hook


@torch.no_grad()
def health(model: nn.Module, batch: dict[str, Tensor], add: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """The health of a model on the longest row of a batch, by the names above.

    Args:
        model: as training calls it.
        batch: `input_ids` (B, L), and what else the model takes.
        add: the sum over processes, each of which has a batch of its own.
    """
    row, real = longest_row(batch)
    training = model.training
    model.eval()
    try:
        most = min(batch["input_ids"].shape[1], TOKENS)  # the same in all processes, and so the windows
        with watching(model, most) as layers, torch.compiler.set_stance("force_eager"):
            model(**row, use_cache=False, logits_to_keep=1)  # of all positions they could take more memory than a step
    finally:
        model.train(training)
    names = list(layers[0])
    values = torch.stack([torch.stack([layer[name] for name in names]) for layer in layers]).float()
    known = ~values.isnan() & real
    sums, counts = add(torch.stack([values.nan_to_num(), known.float()])).unbind()
    result = {}
    for column, name in enumerate(names):
        if not counts[:, column].all():
            continue  # no row is as long as that
        of_layers = (sums[:, column] / counts[:, column]).tolist()
        result[name] = sum(of_layers) / len(of_layers)
        result |= {f"{name}/layer_{number}": value for number, value in enumerate(of_layers)}
    return result


def longest_row(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """The row with the most tokens that are no padding, without its padding, (1, at most TOKENS); and whether it has
    any, for else it is one of padding: the last part of a row that is split may have nothing else."""
    inputs = {name: values for name, values in batch.items() if name != "labels"}
    real = inputs.pop("attention_mask", torch.ones_like(inputs["input_ids"])).sum(1)  # padding comes last
    place = int(real.argmax())
    length = min(max(int(real[place]), 1), TOKENS)
    return {name: values[place : place + 1, :length] for name, values in inputs.items()}, bool(real[place])
