"""`hf-recurrent info`: versions, devices, scan backends, a model's size."""

import json
import os
import platform

from ..messages import nearest
from ..versions import versions_of
from .parser import CommandLineError, Parser, no_bars_for_files

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers")


def _parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent info",
        usage="hf-recurrent info [--model DIR | --preset NAME] [--json]",
        description="Show versions, devices, which scan backends run here and why others don't, and a model's size.",
        epilog="""\
examples:
  hf-recurrent info
  hf-recurrent info --model runs/mingru
  hf-recurrent info --model runs/mingru --json
  hf-recurrent info --preset longhorn-125m
""",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="DIR", help="folder of a model, or its name on the Hub")
    which.add_argument("--preset", help="one of the papers' sizes; a wrong name lists them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)
    facts = {"versions": versions_of(*PACKAGES), "devices": _devices(), "backends": _backends(), "cache": _cache()}
    if args.model is not None:
        facts["model"] = _model_facts(args.model)
    if args.preset is not None:
        facts["model"] = _preset_facts(args.preset)
    print(json.dumps(facts, indent=2) if args.json else _show(facts))
    return 0


def _devices() -> dict[str, str]:
    import torch

    cores, threads = os.cpu_count(), torch.get_num_threads()
    devices = {"cpu": f"{platform.machine()}, {cores} logical cores, of which torch uses {threads}"}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices[f"cuda:{number}"] = f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    return devices


def _backends() -> dict[str, dict[str, str]]:
    """Each backend's state, and which one each kind of device gets unless told otherwise."""
    from ..scan import available_backends, backend_report

    available = available_backends()
    return {
        "report": backend_report(),
        "used": {
            "cpu tensors": "cpu" if "cpu" in available else "chunked",
            "cuda tensors": "cuda" if "cuda" in available else "chunked",
            "other tensors": "chunked",
        },
    }


def _cache() -> dict[str, str | int]:
    from ..scan.kernel_cache import cache_folder
    from ..training.token_cache import entries

    sizes = entries().values()
    return {"folder": str(cache_folder()), "token streams": len(sizes), "token bytes": sum(sizes)}


def _model_facts(name: str) -> dict[str, object]:
    from transformers import AutoModelForCausalLM

    from ..hub.staging import architecture, model_classes
    from ..training.model import check_folder, load_model

    no_bars_for_files()
    kind = model_classes().get(architecture(check_folder(name)), AutoModelForCausalLM)
    return {"folder": name, **_size_facts(load_model(name, model_class=kind).eval())}


def _preset_facts(name: str) -> dict[str, object]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSequenceClassification

    from ..modeling import FAMILIES

    presets = {preset: config_class for config_class in FAMILIES for preset in config_class.presets}
    if name not in presets:
        raise CommandLineError(
            f"--preset {name}: no such preset{nearest(name, presets, listed=False)}; known: {', '.join(presets)}"
        )
    config = presets[name].from_preset(name)
    if getattr(config, "image_size", None) is not None:
        auto_class = AutoModelForImageClassification
    elif getattr(config, "bidirectional", False) or getattr(config, "input_size", None) is not None:
        auto_class = AutoModelForSequenceClassification
    else:
        auto_class = AutoModelForCausalLM
    with torch.device("meta"):  # sizes without memory
        model = auto_class.from_config(config).eval()
    return {"preset": name, "class": type(model).__name__, **_size_facts(model)}


def _size_facts(model) -> dict[str, object]:
    from ..hub.card import state_bytes

    # The embedding and the head, counted once where they are tied.
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings = {module.weight for module in modules if hasattr(module, "weight")}
    inputs = {"input features": "input_size", "image size": "image_size"}
    inputs = {name: size for name, field in inputs.items() if (size := getattr(model.config, field, None)) is not None}
    facts = {
        "family": model.config.model_type,
        "layers": model.config.num_hidden_layers,
        "hidden size": model.config.hidden_size,
        **(inputs or {"vocabulary": model.config.vocab_size}),
        "parameters": model.num_parameters(),
        "parameters in embeddings": sum(weight.numel() for weight in embeddings),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    size = state_bytes(model)
    if size is not None:
        facts["state bytes per sequence"] = size
    return facts


def _show(facts: dict) -> str:
    sections = {
        "versions": facts["versions"],
        "devices": facts["devices"],
        "scan backends": facts["backends"]["report"],
        "backend used for": facts["backends"]["used"],
        "cache": facts["cache"],
    }
    if "model" in facts:
        sections["model"] = facts["model"]
    width = max(len(name) for section in sections.values() for name in section)
    lines = []
    for title, section in sections.items():
        lines.append(title)
        lines += [f"  {name:<{width}}  {_text(value)}" for name, value in section.items()]
    return "\n".join(lines)


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
