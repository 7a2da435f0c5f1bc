"""How signals and gradients fare in a fresh deep model of each family: one pass forward and back over real text.

The text is the source of Python's standard library, a byte a token. Each family's language model, with its default
options at the given size, records for every layer the root mean square of

- the residual stream after the layer, and what the layer's mixer returned;
- the gradient of the loss (the mean cross-entropy of the next byte) with respect to the layer's input, and with respect
  to all of its parameters.

benchmarks/README.md says how to read them.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from hf_recurrent import FAMILIES, RecurrentConfig
from hf_recurrent.files import replacing, write_whole
from hf_recurrent.measure import machine, make_folder, positive
from hf_recurrent.training.sources import stdlib_documents

PANELS = {
    "residual": "Residual stream after each layer",
    "mixer": "Output of each mixer",
    "input_gradient": "Gradient of the loss with respect to each layer's input",
    "parameter_gradient": "Gradient of the loss with respect to each layer's parameters",
}
# Told apart without colour too.
STYLES = [("#1f5f8b", "o"), ("#b5651d", "s"), ("#3a7d44", "^"), ("#8b3a8b", "D"), ("#555555", "v")]


def text_bytes(rows: int, length: int) -> Tensor:
    """(rows, length) bytes of the standard library, each row from another place in it."""
    text = "".join(stdlib_documents().texts()).encode()
    stride = len(text) // rows
    if stride < length:
        raise ValueError(f"{rows} rows of {length} bytes are more than the standard library's {len(text)}")
    return torch.stack(
        [torch.frombuffer(bytearray(text), dtype=torch.uint8)[i * stride :][:length] for i in range(rows)]
    )


def rms(*tensors: Tensor) -> float:
    """The root mean square over all elements of all tensors."""
    total = sum(x.detach().double().square().sum().item() for x in tensors)
    return math.sqrt(total / sum(x.numel() for x in tensors))


def measure(config: RecurrentConfig, ids: Tensor) -> dict[str, list[float] | float]:
    """The loss of a fresh model of `config` and, for each of PANELS, one figure per layer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    found: dict[str, list[float]] = {panel: [] for panel in PANELS}
    inputs: list[Tensor] = []

    def before_layer(module, arguments):
        arguments[0].retain_grad()
        inputs.append(arguments[0])

    for layer in model.model.layers:
        layer.register_forward_pre_hook(before_layer)
        layer.register_forward_hook(lambda module, arguments, output: found["residual"].append(rms(output[0])))
        layer.mixer.register_forward_hook(lambda module, arguments, output: found["mixer"].append(rms(output[0])))
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    found["input_gradient"] = [rms(x.grad) for x in inputs]
    found["parameter_gradient"] = [rms(*(p.grad for p in layer.parameters())) for layer in model.model.layers]
    return {"loss": loss.item(), "loss of a uniform guess": math.log(config.vocab_size), **found}


def draw(document: dict, path: Path) -> None:
    """One panel for each of PANELS, one line for each family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    for axis, (panel, title) in zip(axes.flat, PANELS.items(), strict=True):
        for (family, found), (colour, marker) in zip(document["families"].items(), STYLES, strict=False):
            layers = range(1, len(found[panel]) + 1)
            axis.plot(layers, found[panel], color=colour, marker=marker, markersize=3.5, linewidth=1.2, label=family)
        axis.set(title=title, xlabel="layer", ylabel="root mean square", yscale="log")
        axis.grid(alpha=0.3, which="both", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False)
    size = document["size"]
    what = "layers, width {width}, on {batch} × {length} bytes of Python".format(**size)
    figure.suptitle(f"Fresh models of {size['layers']} {what}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(document: dict) -> str:
    """Per family: the loss, and for each of PANELS the smallest and the largest figure over the layers."""
    lines = [f"{'':<10}{'loss':>8}" + "".join(f"{panel:>26}" for panel in PANELS)]
    for family, found in document["families"].items():
        ranges = "".join(f"{f'{min(found[panel]):.2g} to {max(found[panel]):.2g}':>26}" for panel in PANELS)
        lines.append(f"{family:<10}{found['loss']:>8.3f}" + ranges)
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="examples:\n  python benchmarks/initialisation.py\n"
        "  python benchmarks/initialisation.py --layers 4 --length 64 --families s5 longhorn",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [config_class.model_type for config_class in FAMILIES]
    parser.add_argument("--layers", type=positive, default=48, metavar="N", help="(default 48)")
    parser.add_argument("--width", type=positive, default=128, metavar="N", help="hidden_size (default 128)")
    parser.add_argument("--length", type=positive, default=4096, metavar="N", help="bytes in a row (default 4096)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="rows (default 1)")
    parser.add_argument("--families", nargs="+", choices=names, default=names, help="the families to measure")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of initialisation.json and .png"
    )
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    arguments = parser.parse_args(argv)
    make_folder(parser, arguments.output)
    try:
        ids = text_bytes(arguments.batch, arguments.length).long()
    except ValueError as error:
        parser.error(str(error))
    size = {name: getattr(arguments, name) for name in ("layers", "width", "length", "batch")}
    flags = [f"--{name} {value}" for name, value in size.items() if value != parser.get_default(name)]
    if arguments.families != parser.get_default("families"):
        flags.append(f"--families {' '.join(arguments.families)}")
    families = {}
    with tqdm(arguments.families, unit="family", disable=None) as bar:
        for family in bar:
            bar.set_postfix_str(family)
            config_class = next(c for c in FAMILIES if c.model_type == family)
            config = config_class(vocab_size=256, hidden_size=arguments.width, num_hidden_layers=arguments.layers)
            families[family] = measure(config, ids)
    document = {
        "command": " ".join(["python benchmarks/initialisation.py", *flags]),
        "machine": machine(("hf-recurrent", "torch", "transformers")),
        "size": size,
        "families": families,
    }
    write_whole(arguments.output / "initialisation.json", json.dumps(document, indent=1) + "\n")
    with replacing(arguments.output / "initialisation.png") as path:
        draw(document, path)
    print(table(document))
    print(f"Written: {arguments.output / 'initialisation.json'} and initialisation.png")


if __name__ == "__main__":
    main()
