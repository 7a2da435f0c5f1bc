"""Context parallelism at a size that no machine here has: 1024 ranks and 16 million tokens.

    python benchmarks/context_parallel.py

Runs the exchange itself (`scan.split.entering`) with a thread for each rank and compares what enters each part with
one scan of the whole sequence in float64, as it does the same scan in float32; then counts bytes per layer, of each
family and of ring attention.
"""

import argparse
import json
import math
import queue
import threading
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModel

import hf_recurrent
from hf_recurrent.files import write_whole
from hf_recurrent.measure import machine, make_folder, positive
from hf_recurrent.scan import linear_scan, split

STATE_BYTES, ACTIVATION_BYTES = 4, 2  # float32 states, bfloat16 activations
# One layer, as wide as those of a model of about 1.3 billion parameters.
SIZE = {"hidden_size": 2048, "num_hidden_layers": 1}


class Ranks:
    """Ranks as threads: `shift` puts tensors into each other's queues. Counts what each rank sends."""

    def __init__(self, size: int):
        self.size, self.sent, self.messages = size, Counter(), Counter()
        self._rank, self._boxes, self._lock = threading.local(), {}, threading.Lock()

    def shift(self, x: torch.Tensor, distance: int, group) -> torch.Tensor | None:
        rank = self._rank.number
        if 0 <= rank + distance < self.size:
            with self._lock:
                self.sent[rank] += x.numel() * x.element_size()
                self.messages[rank] += 1
            self._box(rank, rank + distance).put(x)
        return self._box(rank - distance, rank).get() if 0 <= rank - distance < self.size else None

    def _box(self, sender: int, receiver: int) -> queue.Queue:
        with self._lock:
            return self._boxes.setdefault((sender, receiver), queue.Queue())

    def entering(self, factors: torch.Tensor, addends: torch.Tensor, back: bool) -> torch.Tensor:
        """What enters each part, (ranks, D), by the library's own code in each thread."""
        results = [None] * self.size

        def rank(number: int) -> None:
            self._rank.number = number
            results[number] = split.entering(factors[number], addends[number], None, back)

        with (
            mock.patch.object(split, "shift", self.shift),
            mock.patch.object(split.dist, "get_world_size", lambda group: self.size),
        ):
            threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return torch.stack(results)


def simulate(ranks: int, tokens: int, channels: int) -> dict[str, float]:
    """Exchange the states of one layer; the largest error of what enters a part, and the busiest rank's traffic."""
    torch.manual_seed(0)
    length = tokens // ranks
    a = torch.exp(-torch.rand(channels) * torch.logspace(-6, 0, channels)).expand(1, tokens, channels)
    b = torch.randn(1, tokens, channels)
    parts = b.view(ranks, length, channels)
    _, own = linear_scan(a[:, :length], parts)
    factors = a[:, :length].prod(dim=1).expand(ranks, -1)
    network = Ranks(ranks)
    entered = network.entering(factors, own, back=False)
    whole, _ = linear_scan(a.double(), b.double())
    expected = whole[0, length - 1 :: length][:-1]
    in_one_process = linear_scan(a, b)[0][0, length - 1 :: length][:-1]

    def error(found: torch.Tensor) -> float:
        return ((found - expected).abs().amax(0) / expected.abs().amax(0)).max().item()

    # What comes back in the backward pass: lambda_{r-1} = g_r + a_r lambda_r, by a loop.
    returned = network.entering(factors, own, back=True).double()
    following, worst = torch.zeros(channels, dtype=torch.float64), 0.0
    for rank in range(ranks - 1, -1, -1):
        worst = max(worst, (returned[rank] - following).abs().max().item())
        following = own[rank].double() + factors[rank].double() * following
    return {
        "error": error(entered[1:]),
        "error_of_one_process": error(in_one_process),
        "error_back": worst / returned.abs().max().item(),
        "messages": max(network.messages.values()),
        "states": max(network.sent.values()) / (channels * STATE_BYTES),
    }


def layer_bytes(model: torch.nn.Module, ranks: int) -> float:
    """What one rank sends for one layer and one row, forward and backward: two states in each of the exchanges, and
    the last inputs of the convolution once each way."""
    mixer = model.layers[0].mixer
    state = math.prod(mixer.state_shapes["recurrent"]) * (2 if mixer.complex_state else 1)
    exchanges = 1 + math.ceil(math.log2(ranks))
    halo = math.prod(mixer.state_shapes.get("conv", (0,))) * ACTIVATION_BYTES
    return 2 * (exchanges * 2 * state * STATE_BYTES + halo)


def ring_attention_bytes(hidden_size: int, ranks: int, tokens: int) -> float:
    """What one rank sends in ring attention (arXiv 2310.01889): its keys and values go round, ranks - 1 times, and in
    the backward pass with their gradients beside them."""
    block = 2 * (tokens // ranks) * hidden_size * ACTIVATION_BYTES
    return 3 * (ranks - 1) * block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=positive, default=1024)
    parser.add_argument("--tokens", type=positive, default=1 << 24)
    parser.add_argument("--channels", type=positive, default=4, help="of the simulated layer")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of context_parallel.json")
    args = parser.parse_args()
    if args.tokens % args.ranks:
        parser.error(f"--tokens must be a multiple of --ranks {args.ranks}, got {args.tokens}")
    make_folder(parser, args.output)
    result = simulate(args.ranks, args.tokens, args.channels)
    print(f"{args.ranks:,} ranks, {args.tokens:,} tokens")
    print(f"simulated: relative error {result['error']:.1e} forward, {result['error_back']:.1e} back")
    print(f"one process in float32: relative error {result['error_of_one_process']:.1e} forward")
    print(f"the busiest rank sent {result['messages']} messages, {result['states']:.0f} states, both ways together\n")
    print(f"{'':<24}{'MB per layer':>14}{'attention / this':>18}")
    ring = ring_attention_bytes(SIZE["hidden_size"], args.ranks, args.tokens)
    counted = {"ring attention": ring}
    for config_class in hf_recurrent.FAMILIES:
        with torch.device("meta"):
            model = AutoModel.from_config(config_class(**SIZE, vocab_size=8))
        counted[config_class.model_type] = sent = layer_bytes(model, args.ranks)
        print(f"{config_class.model_type:<24}{sent / 1e6:>14.2f}{ring / sent:>18,.0f}")
    print(f"{'ring attention':<24}{ring / 1e6:>14,.0f}{1:>18}")
    size = {name: getattr(args, name) for name in ("ranks", "tokens", "channels")}
    document = {
        "command": " ".join(["python benchmarks/context_parallel.py", *(f"--{name} {n}" for name, n in size.items())]),
        "machine": machine(("hf-recurrent", "torch")),
        "simulated": result,
        "counted_bytes_per_layer": counted,
    }
    write_whole(args.output / "context_parallel.json", json.dumps(document, indent=1) + "\n")
    print(f"Written: {args.output / 'context_parallel.json'}")


if __name__ == "__main__":
    main()
