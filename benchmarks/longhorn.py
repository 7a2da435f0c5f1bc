"""Longhorn's cell and layer beside those of Transformers' Mamba with mambapy's parallel scan, forward and backward, at
the same sizes: m = 16 states to a channel, twice as many channels as the layer is wide, a convolution over four
positions."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer, mamba_selective_scan
from transformers.utils import logging

from hf_recurrent import LonghornConfig, LonghornForCausalLM
from hf_recurrent.files import write_whole
from hf_recurrent.malloc import keep_freed_memory
from hf_recurrent.measure import machine, make_folder, paired, positive
from hf_recurrent.scan import longhorn_scan
from hf_recurrent.versions import version_of

STATES, EXPANSION, KERNEL = 16, 2, 4
Step = Callable[[int], object]


def _both_passes(function: Callable[..., Tensor], inputs: list[Tensor], parameters: list[Tensor] = ()) -> Step:
    wanted = [x.requires_grad_() for x in (*inputs, *parameters)]
    grad = torch.randn_like(function(*inputs))
    return lambda _: torch.autograd.grad(function(*inputs), wanted, grad)


def cells(batch: int, length: int, width: int) -> tuple[Step, Step]:
    """Ours, (B, L, D), and theirs, (B, D, L), on tensors that lie in memory as their layers put them there."""
    channels = EXPANSION * width
    x, dt = (torch.randn(batch, length, channels) for _ in "xd")
    k, q = (torch.randn(batch, length, STATES) for _ in "kq")
    rates = -torch.arange(1.0, STATES + 1).expand(channels, STATES).contiguous()

    def mamba(x: Tensor, dt: Tensor, k: Tensor, q: Tensor) -> Tensor:
        k, q = k.transpose(1, 2), q.transpose(1, 2)
        return mamba_selective_scan(x, dt, rates, k, q, delta_softplus=True, use_mambapy=True)

    ours = _both_passes(lambda *inputs: longhorn_scan(*inputs)[0], [x, dt, k, q])
    transposed = [t.transpose(1, 2).contiguous() for t in (x.detach(), dt.detach())]
    return ours, _both_passes(mamba, [*transposed, *(t.detach().clone() for t in (k, q))])


def layers(batch: int, length: int, width: int) -> tuple[Step, Step]:
    """The mixers: projections, convolution, cell and gate."""
    x = torch.randn(batch, length, width)
    options = {"hidden_size": width, "num_hidden_layers": 1, "state_size": STATES, "conv_kernel": KERNEL}
    longhorn = LonghornForCausalLM(LonghornConfig(vocab_size=2, expansion=EXPANSION, **options)).model.layers[0].mixer
    mamba: nn.Module = MambaMixer(MambaConfig(expand=EXPANSION, use_mambapy=True, **options), 0)
    ours = _both_passes(lambda x: longhorn(x, {}, None, None)[0], [x], list(longhorn.parameters()))
    return ours, _both_passes(mamba, [x.clone()], list(mamba.parameters()))


def measure(shape: tuple[int, int, int], rounds: int) -> Iterator[dict]:
    for name, make in (("cell", cells), ("layer", layers)):
        ours, theirs = make(*shape)
        timing = paired(ours, {"mamba": theirs, "longhorn": ours}, rounds, title=name)
        yield {"what": name, **{model: one.summary() for model, one in timing.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="example: python benchmarks/longhorn.py --threads 2")
    parser.add_argument("--shape", type=positive, nargs=3, metavar=("B", "L", "W"), help="(default: 8 1024 384)")
    parser.add_argument("--rounds", type=positive, default=5, help="pairs of which the median (default 5)")
    parser.add_argument("--threads", type=positive, help="threads (default: PyTorch's)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of longhorn.json")
    arguments = parser.parse_args()
    if version_of("mambapy") is None:
        parser.error("mambapy is not installed: pip install mambapy")
    make_folder(parser, arguments.output)
    logging.set_verbosity_error()  # mamba_ssm is absent: its scan is not what is measured
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    shape = tuple(arguments.shape or (8, 1024, 384))
    found = []
    for row in measure(shape, arguments.rounds):
        found.append(row)
        ours, theirs = row["longhorn"]["milliseconds"], row["mamba"]["milliseconds"]
        print(f"{row['what']:<8}Longhorn {ours:>9.1f} ms   Mamba {theirs:>9.1f} ms   {row['mamba']['ratio']:>6.1f} x")
    about = {"shape": shape, "states": STATES, "machine": machine(("hf-recurrent", "torch", "transformers", "mambapy"))}
    path = arguments.output / "longhorn.json"
    write_whole(path, json.dumps({**about, "results": found}, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
