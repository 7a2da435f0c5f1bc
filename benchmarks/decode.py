"""What a decoded token costs beside the model's bare linear layers, and that neither its time nor memory grows.

A figure is a ratio of paired runs where it can be: a candidate's time divided by that of its limit measured just before
it. benchmarks/README.md says what each section measures and why. Sections that are not measured again stay as they are
in the output's decode.json.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import decode_report
import hf_recurrent
from hf_recurrent.measure import can_measure_peaks, machine, make_folder, paired, peak_bytes, positive, seconds_of
from hf_recurrent.modeling.s5 import S5SSM

VOCABULARY = 50257
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 768, "num_hidden_layers": 12}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHUNK = 1024
SMALL = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2}
FAMILIES = ("minGRU", "minLSTM", "Longhorn", "GateLoop", "S5")


class Measurement:
    """The settings of one run of this script and what it has found so far."""

    def __init__(self, quick: bool, repeats: int, threads: int | None):
        self.quick, self.repeats, self.threads = quick, repeats, threads
        self.sizes = SMALL if quick else SIZES
        self.contexts = [8, 16, 32] if quick else [64, 256, 1024, 4096, 8192, 16384, 32768]
        self.stream_tokens = 20_000 if quick else 1_000_000
        self.prefill_tokens = 16_384 if quick else 65_536
        self.not_measured: dict[str, str] = {}


# ---- models ----------------------------------------------------------------------------------------------------------


def config(family: str, sizes: dict, preset: bool = False):
    """The family's configuration at these sizes; with `preset` the paper's own 125M model where there is one."""
    if preset and family == "Longhorn":
        return hf_recurrent.LonghornConfig.from_preset("longhorn-125m")
    if preset and family == "GateLoop":
        return hf_recurrent.GateLoopConfig.from_preset("gateloop-wikitext103-125m")
    # As many states as channels, and MLPs as the other families have: without them S5's layers are a tenth of 125M.
    own = {"state_size": sizes["hidden_size"], "mlp_ratio": 4} if family == "S5" else {}
    name = {"minGRU": "MinGRU", "minLSTM": "MinLSTM"}.get(family, family)
    return getattr(hf_recurrent, f"{name}Config")(**sizes, **own)


def build(settings, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(settings).to(dtype).eval()


def llama(sizes: dict, **options) -> nn.Module:
    heads = sizes["hidden_size"] // 64
    settings = LlamaConfig(**{**sizes, "num_attention_heads": heads, "max_position_embeddings": 2**20, **options})
    torch.manual_seed(0)
    return LlamaForCausalLM(settings).eval()


def linear_layers(model: nn.Module) -> Callable[[int], None]:
    """PyTorch's products of the model's Linear modules on one token, and nothing else. S5's B and C, matrices that are
    in no Linear, are read as Linear modules of real numbers would be."""
    calls = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            calls.append(module)
        elif isinstance(module, S5SSM):
            width, states, dtype = len(module.D), 2 * module.states, module.D.dtype
            calls += [nn.Linear(*shape, bias=False, dtype=dtype) for shape in ((width, states), (states, width))]
    inputs = [torch.randn(1, 1, layer.in_features, dtype=layer.weight.dtype) for layer in calls]

    @torch.no_grad()
    def run(_):
        for layer, x in zip(calls, inputs, strict=True):
            F.linear(x, layer.weight, layer.bias)

    run.weight_bytes = sum(layer.weight.nbytes for layer in calls)
    return run


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def decoding(model: nn.Module, name: str = "past_key_values", cache=None) -> Callable[[int], None]:
    """One token after another onto `cache`, or one that has read eight tokens."""
    if cache is None:
        cache = getattr(model(torch.arange(1, 9)[None], use_cache=True), name)
    ids = torch.tensor([[5]])

    @torch.no_grad()
    def run(_):
        return model(ids, **{name: cache}, use_cache=True).logits

    return run


@torch.no_grad()
def filled(model: nn.Module, tokens: int) -> DynamicCache:
    """The key-value cache of an attention model after `tokens`, with random contents."""
    settings, cache = model.config, DynamicCache(config=model.config)
    shape = (1, settings.num_key_value_heads, tokens, settings.hidden_size // settings.num_attention_heads)
    for layer in range(settings.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype), layer)
    return cache


# ---- sections --------------------------------------------------------------------------------------------------------


def _row(name: str, dtype: str, model: nn.Module, limit: Callable, timing, **more) -> dict:
    milliseconds = timing.summary()["milliseconds"] / timing.summary()["ratio"]
    return {
        "name": name,
        "dtype": dtype,
        "parameters": parameters_of(model),
        "linear_milliseconds": round(milliseconds, 3),
        "linear_gigabytes_per_second": round(limit.weight_bytes / milliseconds / 1e6, 2),
        **timing.summary(),
        **more,
    }


def measure_token(m: Measurement) -> Iterator[dict]:
    """A decoded token of each family, and of the peers, against the model's own bare linear layers."""
    for family, (dtype_name, dtype) in itertools.product(FAMILIES, DTYPES.items()):
        model = build(config(family, m.sizes, preset=not m.quick), dtype)
        limit = linear_layers(model)
        timing = paired(limit, {family: decoding(model)}, m.repeats, title=f"{family} {dtype_name}")[family]
        yield _row(family, dtype_name, model, limit, timing, ours=True)
    for dtype_name, dtype in DTYPES.items():
        layers = m.sizes["num_hidden_layers"]
        torch.manual_seed(0)
        mamba = MambaForCausalLM(MambaConfig(**{**m.sizes, "num_hidden_layers": 2 * layers})).to(dtype).eval()
        limit, name = linear_layers(mamba), "Transformers' Mamba"
        timing = paired(limit, {name: decoding(mamba, "cache_params")}, m.repeats, title=f"{name} {dtype_name}")[name]
        yield _row(name, dtype_name, mamba, limit, timing, ours=False)
        model = llama({**m.sizes, "vocab_size": min(32000, m.sizes["vocab_size"])}, intermediate_size=2048).to(dtype)
        limit = linear_layers(model)
        for context in (m.contexts[0], 8192 if not m.quick else m.contexts[-1]):
            name = f"Transformers' Llama at {context}"
            candidate = decoding(model, cache=filled(model, context))
            timing = paired(limit, {name: candidate}, m.repeats, title=f"{name} {dtype_name}")[name]
            yield _row(name, dtype_name, model, limit, timing, ours=False)


def measure_generate(m: Measurement) -> Iterator[dict]:
    """What `generate` itself adds to the calls of the model that it makes, greedy, per token; it knows no families."""
    tokens, prompt, name = 8 if m.quick else 16, torch.arange(1, 9)[None], "minGRU"
    for dtype_name, dtype in DTYPES.items():
        model = build(config(name, m.sizes), dtype)

        @torch.no_grad()
        def calls(_, model=model):
            outputs = model(prompt, use_cache=True, logits_to_keep=1)
            for _ in range(tokens - 1):
                ids = outputs.logits[:, -1].argmax(-1)[:, None]
                outputs = model(ids, past_key_values=outputs.past_key_values, use_cache=True)

        def generate(_, model=model):
            model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

        summary = paired(calls, {name: generate}, m.repeats, title=f"generate, {dtype_name}")[name].summary()
        per_token = summary["milliseconds"] / tokens
        yield {
            "name": name,
            "dtype": dtype_name,
            "tokens": tokens,
            "milliseconds_per_token": round(per_token, 3),
            "ratio": summary["ratio"],
            "ratio_quartiles": summary["ratio_quartiles"],
            "added_milliseconds_per_token": round(per_token * (1 - 1 / summary["ratio"]), 3),
        }


def measure_position(m: Measurement) -> Iterator[dict]:
    """A decoded token of the 125M-size model with a cache that has counted a million tokens, against position 100."""
    for family in FAMILIES:
        model = build(config(family, m.sizes, preset=not m.quick))
        with torch.no_grad():
            early = model(torch.randint(m.sizes["vocab_size"], (1, 100)), use_cache=True).past_key_values
        late = early.clone()
        late.seen_tokens = 1_000_000
        candidates = {family: decoding(model, cache=late)}
        timing = paired(decoding(model, cache=early), candidates, m.repeats, title=f"position, {family}")[family]
        yield {"name": family, "model": "125M", "from": 100, "to": 1_000_000, **timing.summary()}


def measure_stream(m: Measurement) -> Iterator[dict]:
    """Each family reads a stream of a million tokens, in a process of its own; an attention model keeps its cache."""
    for name in (*FAMILIES, "attention"):
        yield from _in_a_process(m, "stream", name)


def stream(m: Measurement, name: str) -> list[dict]:
    """What `measure_stream` runs in the process of `name`."""
    process, total = psutil.Process(), m.stream_tokens
    if name == "attention":
        return [_attention_memory(total)]
    model = build(config(name, SMALL))
    ids = torch.randint(SMALL["vocab_size"], (total,))
    cache, checkpoints = hf_recurrent.RecurrentCache(model.config), [10, 10_000, total]
    cache_bytes, caches, tokens, memory = {}, {}, [], []
    position = 0
    start = process.memory_info().rss
    with tqdm(total=total, desc=f"stream, {name}", leave=False, unit="tokens", disable=None) as bar:
        for until in sorted({100, *checkpoints}):
            for _ in hf_recurrent.stream(model, ids[position:until], cache, CHUNK):
                if cache.seen_tokens - (tokens[-1] if tokens else 0) >= total // 400:
                    tokens.append(cache.seen_tokens)
                    memory.append(process.memory_info().rss - start)
                bar.update(cache.seen_tokens - bar.n)
            position = until
            caches[until] = cache.clone()
            if until in checkpoints:
                cache_bytes[until] = cache.nbytes
    early, late = decoding(model, cache=caches[100]), decoding(model, cache=caches[total])
    timing = paired(early, {name: late}, 20 * m.repeats)[name]
    settled = [rss for count, rss in zip(tokens, memory, strict=True) if count >= 10 * CHUNK]
    return [
        {
            "name": name,
            "parameters": parameters_of(model),
            "tokens": tokens,
            "resident_bytes": memory,
            "growth_bytes_per_token": round((settled[-1] - settled[0]) / total, 4),
            "cache_bytes": cache_bytes,
            "to": total,
            **timing.summary(),
        }
    ]


def _attention_memory(total: int) -> dict:
    """Bytes of the key-value cache of a Llama of the small size, and the resident memory while it grows."""
    model = llama(SMALL, intermediate_size=512)
    heads, layers = model.config.num_key_value_heads, SMALL["num_hidden_layers"]
    cache, process = DynamicCache(config=model.config), psutil.Process()
    step = max(1, total // 16)
    tokens, memory, held = [], [], []
    start = process.memory_info().rss
    for count in tqdm(range(step, total + 1, step), desc="attention", leave=False, disable=None):
        for layer in range(layers):
            piece = torch.zeros(1, heads, step, 64).normal_()
            keys, values = cache.update(piece, piece.clone(), layer)
        tokens.append(count)
        memory.append(process.memory_info().rss - start)
        held.append(sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values)))
    computed = 2 * layers * SMALL["hidden_size"] * 4
    return {
        "name": "attention", "parameters": parameters_of(model), "tokens": tokens, "resident_bytes": memory,
        "cache_bytes": dict(zip(tokens, held, strict=True)), "computed_bytes_per_token": computed,
    }  # fmt: skip


def measure_crossing(m: Measurement) -> Iterator[dict]:
    """A token of minGRU and of a Llama of Transformers' with as many parameters in its layers, over the context."""
    for dtype_name, dtype in DTYPES.items():
        ours = build(config("minGRU", m.sizes), dtype)
        # Three matrices of an MLP in place of two, no second width: 3.33 widths make the layers of one size.
        theirs = llama(m.sizes, intermediate_size=m.sizes["hidden_size"] * 10 // 3).to(dtype)
        ours_parameters, theirs_parameters = (parameters_of(model) for model in (ours, theirs))
        for context in m.contexts:
            cache = filled(theirs, context)
            timing = paired(
                decoding(ours), {"llama": decoding(theirs, cache=cache)}, max(3, m.repeats // 3),
                title=f"Llama at {context}, {dtype_name}",
            )["llama"]  # fmt: skip
            summary = timing.summary()
            yield {
                "name": f"Llama at {context}", "dtype": dtype_name, "context": context, **summary,
                "ours_milliseconds": round(summary["milliseconds"] / summary["ratio"], 3),
                "parameters": [ours_parameters, theirs_parameters],
                "cache_bytes": sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values)),
            }  # fmt: skip
            del cache


def measure_prefill(m: Measurement) -> Iterator[dict]:
    """A prompt in chunks against one call: time, and peak memory in a process for each."""
    if not can_measure_peaks():
        m.not_measured["prefill"] = "its memory needs the /proc of Linux"
        return
    for family in FAMILIES:
        parts = {kind: next(_in_a_process(m, f"prefill-{kind}", family)) for kind in ("whole", "chunks")}
        whole, chunks = parts["whole"], parts["chunks"]
        yield {
            "name": family,
            "tokens": m.prefill_tokens,
            "chunk": CHUNK,
            "whole_seconds": whole["seconds"],
            "chunks_seconds": chunks["seconds"],
            "ratio": round(chunks["seconds"] / whole["seconds"], 4),
            "whole_mebibytes": whole["mebibytes"],
            "chunks_mebibytes": chunks["mebibytes"],
            "memory_ratio": round(chunks["mebibytes"] / whole["mebibytes"], 4),
        }


def prefill(m: Measurement, family: str, chunk: int) -> list[dict]:
    """What `measure_prefill` runs in a process."""
    model = build(config(family, SMALL))
    ids = torch.randint(SMALL["vocab_size"], (1, m.prefill_tokens))

    @torch.no_grad()
    def run(ids: Tensor) -> None:
        cache = hf_recurrent.RecurrentCache(model.config)
        for piece in ids.split(chunk, dim=1):
            model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)

    run(ids[:, : min(chunk, 4 * CHUNK)])
    seconds: list[float] = []
    peak = peak_bytes(lambda: seconds.append(seconds_of(lambda _: run(ids), 0)))
    seconds += [seconds_of(lambda _: run(ids), 0) for _ in range(2)]
    return [{"seconds": round(min(seconds), 4), "mebibytes": round(peak / 2**20, 2)}]


PARTS = {
    "stream": stream,
    "prefill-whole": lambda m, name: prefill(m, name, m.prefill_tokens),
    "prefill-chunks": lambda m, name: prefill(m, name, CHUNK),
}


def _in_a_process(m: Measurement, part: str, name: str) -> Iterator[dict]:
    """The rows of a part, measured where nothing before it has taken memory."""
    command = [sys.executable, __file__, "--part", part, name, "--repeats", str(m.repeats)]
    command += ["--quick"] if m.quick else []
    command += ["--threads", str(m.threads)] if m.threads else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    yield from json.loads(done.stdout)


# ---- command line ----------------------------------------------------------------------------------------------------

MEASURES = {
    "token": measure_token,
    "generate": measure_generate,
    "position": measure_position,
    "stream": measure_stream,
    "crossing": measure_crossing,
    "prefill": measure_prefill,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="examples:\n  python benchmarks/decode.py --quick\n  python benchmarks/decode.py --only token prefill",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds, to see that it works")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="the sections to measure")
    parser.add_argument("--repeats", type=positive, help="rounds of paired runs (default 31; 3 with --quick)")
    parser.add_argument("--threads", type=positive, help="threads of PyTorch and of the kernels (default: PyTorch's)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of decode.json, .md and .png"
    )
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    return parser


def _before(folder: Path, quick: bool) -> dict[str, dict]:
    """The sections in the folder's decode.json, if it is of the same kind of run."""
    try:
        document = json.loads((folder / "decode.json").read_text())
    except (OSError, ValueError):
        return {}
    sections = document.get("sections", {})
    return {name: section for name, section in sections.items() if section.get("quick") is quick}


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    m = Measurement(arguments.quick, arguments.repeats or (3 if arguments.quick else 31), arguments.threads)
    if arguments.part:
        part, name = arguments.part
        print(json.dumps(PARTS[part](m, name)))
        return
    make_folder(parser, arguments.output)
    sections = _before(arguments.output, m.quick)
    for name in arguments.only:
        start = time.perf_counter()
        rows = list(MEASURES[name](m))
        sections[name] = {
            "quick": m.quick,
            "command": " ".join(
                ["python benchmarks/decode.py", *(["--quick"] if m.quick else []), f"--only {name}"]
                + [f"--repeats {m.repeats}"]
            ),
            "seconds": round(time.perf_counter() - start, 1),
            "machine": machine(("hf-recurrent", "torch", "transformers", "numpy")),
            "results": rows,
        }
        ordered = {name: sections[name] for name in MEASURES if name in sections}
        decode_report.save({"sections": ordered, "not_measured": m.not_measured}, arguments.output)
    print((arguments.output / "decode.md").read_text())
    print(f"Written: {arguments.output / 'decode.json'}, decode.md and decode.png")


if __name__ == "__main__":
    main()
