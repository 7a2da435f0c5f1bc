"""What converting and loading a checkpoint cost, in seconds and in memory.

    python benchmarks/conversion.py                     the 125M Longhorn, 1.9 GB in shards, loading; 9 GB of disk
    python benchmarks/conversion.py --quick             tiny sizes, to see that it works
    python benchmarks/conversion.py --only loading

Memory is the peak of the process's resident size while it converts, less its size before: pages of the checkpoint that
are mapped count too. Linux only.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SECTIONS = ("single", "sharded", "loading")
# (layers, width, vocabulary): the paper's 125M, and one of 1.9 GB in float32.
SIZES = {"single": (24, 768, 50280), "sharded": (40, 1280, 50280), "loading": (24, 768, 50280)}
QUICK = {name: (2, 64, 1000) for name in SIZES}
SHARDS = 8


def longhorn_tensors(layers: int, width: int, vocab: int) -> dict[str, torch.Tensor]:
    """Random weights under the names of the authors' code."""
    d, m, rank = 2 * width, 16, -(-width // 16)
    block = {
        "mixer.D": (d,), "mixer.in_proj.weight": (2 * d, width), "mixer.conv1d.weight": (d, 1, 4),
        "mixer.conv1d.bias": (d,), "mixer.x_proj.weight": (rank + 2 * m, d), "mixer.dt_head.weight": (d, rank),
        "mixer.dt_head.bias": (d,), "mixer.out_proj.weight": (width, d), "norm.weight": (width,),
    }  # fmt: skip
    shapes = {"backbone.embedding.weight": (-(-vocab // 8) * 8, width), "backbone.norm_f.weight": (width,)}
    shapes |= {f"backbone.layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    tensors = {name: torch.randn(shape) / 30 for name, shape in shapes.items()}
    return tensors | {"lm_head.weight": tensors["backbone.embedding.weight"]}


def write_checkpoint(folder: Path, layers: int, width: int, vocab: int, shards: int) -> int:
    """The original's files; returns their bytes."""
    folder.mkdir()
    tensors = longhorn_tensors(layers, width, vocab)
    config = {"d_model": width, "n_layer": layers, "vocab_size": vocab, "ssm_cfg": {"d_state": 16}}
    (folder / "config.json").write_text(json.dumps(config | {"tie_embeddings": True, "rms_norm": True}))
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        weight_map, names = {}, sorted(name for name in tensors if name != "lm_head.weight")
        names.sort(key=lambda name: -tensors[name].numel())
        for i in range(shards):
            part = {name: tensors[name] for name in names[i::shards]}
            if "backbone.embedding.weight" in part:
                part["lm_head.weight"] = tensors["lm_head.weight"]
            torch.save(part, folder / f"part-{i}.bin")
            weight_map |= dict.fromkeys(part, f"part-{i}.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("*.bin"))


def resident(field: str) -> int:
    """Bytes of this process by /proc/self/status: VmRSS, or VmHWM, its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def convert_once(source: str, dest: str, max_shard_size: str) -> dict:
    """In a process of its own: one conversion, after the imports."""
    import hf_recurrent.conversion.to_ours  # noqa: F401
    from hf_recurrent.conversion import convert

    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    start = time.perf_counter()
    convert(source, dest, max_shard_size=max_shard_size)
    return {"seconds": time.perf_counter() - start, "bytes": resident("VmHWM") - before}


def in_process(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_conversion(section: str, sizes: tuple[int, int, int], folder: Path, repeats: int) -> dict:
    source, dest = folder / "original", folder / "ours"
    shards = SHARDS if section == "sharded" else 1
    size = write_checkpoint(source, *sizes, shards)
    largest = max(file.stat().st_size for file in source.glob("*.bin"))
    runs = []
    for number in range(repeats):
        # The shards of the result are as large as those of the original.
        limit = f"{max(largest // 2**20, 1)}MiB" if shards > 1 else "5GB"
        runs.append(in_process("--convert", str(source), f"{dest}-{number}", limit.replace("MiB", "MB")))
    row = {"section": section, "checkpoint_bytes": size, "largest_shard_bytes": largest}
    row["seconds"] = statistics.median(run["seconds"] for run in runs)
    row["peak_bytes"] = max(run["bytes"] for run in runs)
    row["peak_over_size"] = row["peak_bytes"] / size
    row["peak_over_size_and_shard"] = row["peak_bytes"] / (size + largest)
    return row


def measure_loading(sizes: tuple[int, int, int], folder: Path, repeats: int) -> dict:
    """Our Longhorn and Transformers' Mamba, whose parameters differ by a thousandth or so, in turn."""
    from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM
    from transformers.utils import logging

    import hf_recurrent
    from hf_recurrent.training.model import load_model

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    layers, width, vocab = sizes
    options = {"vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers}
    models = {
        "ours": hf_recurrent.LonghornForCausalLM(hf_recurrent.LonghornConfig(**options)),
        "theirs": MambaForCausalLM(MambaConfig(**options)),
    }
    parameters = {name: model.num_parameters() for name, model in models.items()}
    for name in list(models):
        models.pop(name).save_pretrained(folder / name)
    loaders = {
        "ours": lambda: AutoModelForCausalLM.from_pretrained(folder / "ours"),
        "theirs": lambda: AutoModelForCausalLM.from_pretrained(folder / "theirs"),
        "load_model": lambda: load_model(str(folder / "ours")),
    }
    seconds = {name: [] for name in loaders}
    for _ in range(repeats + 1):
        for name, load in loaders.items():
            start = time.perf_counter()
            model = load()
            sum(x.flatten()[::1024].sum() for x in model.parameters())  # what is mapped is read
            seconds[name].append(time.perf_counter() - start)
            del model
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first fills caches
    ratios = [ours / theirs for ours, theirs in zip(seconds["ours"][1:], seconds["theirs"][1:], strict=True)]
    return {
        "section": "loading",
        "parameters": parameters,
        "seconds": medians,
        "ours_over_theirs": statistics.median(ratios),
    }


def text(row: dict) -> str:
    if row["section"] == "loading":
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in row["seconds"].items())
        return f"loading {row['parameters']['ours']:,} parameters: {seconds}; ratio {row['ours_over_theirs']:.2f}"
    return (
        f"{row['section']}: {row['checkpoint_bytes'] / 2**20:,.0f} MiB in {row['seconds']:.2f} s, peak "
        f"{row['peak_bytes'] / 2**20:,.0f} MiB = {row['peak_over_size']:.2f} x its size, "
        f"{row['peak_over_size_and_shard']:.2f} x its size and its largest file"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="some sections")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="for the files, which are removed (default: the system's temporary one)")
    parser.add_argument("--output", help="also write the figures as JSON")
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        print(json.dumps(convert_once(*arguments.convert)))
        return
    rows = []
    for section in arguments.only:
        sizes = (QUICK if arguments.quick else SIZES)[section]
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            if section == "loading":
                rows.append(measure_loading(sizes, Path(folder), arguments.repeats))
            else:
                rows.append(measure_conversion(section, sizes, Path(folder), arguments.repeats))
        print(text(rows[-1]), flush=True)
    if arguments.output:
        threads = torch.get_num_threads()
        Path(arguments.output).write_text(json.dumps({"threads": threads, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
