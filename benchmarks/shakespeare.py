"""Language models of Shakespeare's characters, in the setting of "Were RNNs All We Needed?" (arXiv 2410.01201).

Every family's recipe of examples/recipes, several seeds each, beside a Transformer of the same width and size
(GPT-NeoX of Transformers), on the same rows with the same optimiser. The text's last tenth tests; the best test loss of
a run is what the paper reports. Runs go on where they were interrupted, and those that the result file holds already
are kept: seeds can be added one after the other.
"""

import argparse
import hashlib
import json
import statistics
from pathlib import Path

from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from hf_recurrent.files import replacing, write_whole
from hf_recurrent.measure import machine, make_folder, positive
from hf_recurrent.training.arguments import parse
from hf_recurrent.training.folder import RunFolder
from hf_recurrent.training.loop import Run

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
PAPER = {"mingru": 1.548, "minlstm": 1.555}  # best test loss, table 3
MODELS = ("mingru", "minlstm", "longhorn", "gateloop", "s5", "transformer")
ALL_ROWS = 1_000_000  # more than the test split has: every validation reads all of it
# Of a 3-layer Transformer 384 wide, for the 6.4 million parameters of the minGRU of the recipe.
TRANSFORMER_MLP = 1960


def _heads(width: int) -> int:
    """Of the Transformer's attention."""
    return width // 64 or 1


class Transformer(GPTNeoXForCausalLM):
    def parameter_groups(self, lr: float, weight_decay: float, recurrence_lr: float | None = None) -> list[dict]:
        """Matrices decay, vectors do not, as in the recurrent models."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


class TransformerRun(Run):
    def _model(self) -> Transformer:
        arguments = self.arguments[0]
        width, dropout = arguments.hidden_size, arguments.hidden_dropout
        return Transformer(
            GPTNeoXConfig(
                vocab_size=len(self.tokenizer),
                hidden_size=width,
                num_hidden_layers=arguments.num_hidden_layers,
                num_attention_heads=_heads(width),
                intermediate_size=TRANSFORMER_MLP * width // 384,
                hidden_dropout=dropout,
                attention_dropout=dropout,
                max_position_embeddings=self.arguments[1].sequence_length,
                tie_word_embeddings=True,
                bos_token_id=self.tokenizer.bos_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
            )
        )


def run(model: str, seed: int, folder: Path, args: argparse.Namespace) -> dict:
    """
    Train one model, or go on with it, and say how it went.

    Raises:
        SystemExit: after SIGINT or SIGTERM, where a checkpoint has been saved, from which the next call goes on.
    """
    recipe = RECIPES / f"shakespeare_char_{'mingru' if model == 'transformer' else model}.yaml"
    settings = {
        "data_files": args.data, "max_steps": args.steps, "eval_steps": args.eval_steps, "eval_rows": ALL_ROWS,
        "seed": seed, "mixed_precision": args.mixed_precision, "save_steps": args.eval_steps, "keep_checkpoints": 1,
        "learning_rate": args.learning_rate, "output_dir": folder, "resume": "auto",
    }  # fmt: skip
    if model == "transformer":
        settings["health_steps"] = 0  # it has no recurrences to look at
    if args.hidden_size is not None:
        settings["hidden_size"] = args.hidden_size
    argv = [str(recipe)]
    for name, value in settings.items():
        argv += ["--" + name.replace("_", "-"), str(value)]
    training = (TransformerRun if model == "transformer" else Run)(*parse(argv))
    if stopped := training.train()["interrupted"]:  # half of a run is no result
        raise SystemExit(128 + stopped)
    lines = RunFolder(str(folder)).metrics()
    curve = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    best = min(curve, key=curve.get)
    return {
        "model": model,
        "seed": seed,
        "mixed_precision": args.mixed_precision,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "best": {"step": best, "test_loss": curve[best]},
        "seconds": training.state.seconds,
        "curve": sorted(curve.items()),
        "machine": machine(("hf-recurrent", "torch", "transformers")),
    }


def summary(runs: list[dict]) -> dict[str, dict]:
    """By model: how many seeds, parameters, mean and spread of the best test loss, and the paper's."""
    found = {}
    for model in MODELS:
        of_model = [run for run in runs if run["model"] == model]
        if of_model:
            losses = [run["best"]["test_loss"] for run in of_model]
            found[model] = {
                "seeds": len(losses),
                "parameters": of_model[0]["parameters"],
                "test_loss": statistics.mean(losses),
                "spread": statistics.stdev(losses) if len(losses) > 1 else None,
                "steps": [run["best"]["step"] for run in of_model],
                "mixed_precision": [run["mixed_precision"] for run in of_model],
                "paper": PAPER.get(model),
            }
    return found


def table(document: dict) -> str:
    columns = ("model", "parameters", "best test loss", "at steps", "mixed precision", "paper")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for model, one in document["summary"].items():
        spread = "" if one["spread"] is None else f" ± {one['spread']:.3f}"
        loss, steps = f"{one['test_loss']:.3f}{spread}", ", ".join(map(str, one["steps"]))
        precision = ", ".join(one["mixed_precision"])
        paper = "" if one["paper"] is None else f"{one['paper']:.3f}"
        lines.append(f"| {model} | {one['parameters']:,} | {loss} | {steps} | {precision} | {paper} |")
    return "\n".join(lines)


def draw(document: dict, path: Path) -> None:
    """Test loss over steps, a line for each run, a colour for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, model in enumerate(document["summary"]):
        label = model
        for one in document["runs"]:
            if one["model"] == model:
                steps, losses = zip(*((step, loss) for step, loss in one["curve"] if step > 0), strict=True)
                style = "--" if model == "transformer" else "-"
                axes.plot(steps, losses, style, color=f"C{number}", label=label, linewidth=1.3)
                axes.plot(one["best"]["step"], one["best"]["test_loss"], "o", color=f"C{number}", markersize=4)
                label = None
    axes.axhline(PAPER["mingru"], color="0.4", linestyle=":", linewidth=1)
    axes.text(0.01, PAPER["mingru"], "the paper's minGRU", va="bottom", transform=axes.get_yaxis_transform())
    highest = max(loss for one in document["runs"] for step, loss in one["curve"] if step > 0)
    axes.set(xlabel="step", ylabel="test loss (nats per character)", ylim=(None, min(highest, 2.6)))
    axes.set_title("Shakespeare's characters: test loss, the best of each run marked")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130, format="png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  python benchmarks/shakespeare.py --data tinyshakespeare.txt\n"
        "  python benchmarks/shakespeare.py --data tinyshakespeare.txt --models mingru transformer --seeds 0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="the text (see the recipes)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--steps", type=positive, default=600, help="of a run (default %(default)s; the paper: 5000)")
    parser.add_argument("--eval-steps", type=positive, default=50, help="between tests (default %(default)s)")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no", help="(default %(default)s)")
    parser.add_argument(
        "--learning-rate", type=float, default=5e-3, help="the cosine's highest (default %(default)s; the paper: 1e-3)"
    )
    parser.add_argument("--hidden-size", type=positive, help="another than the recipes', for a trial")
    parser.add_argument("--runs", type=Path, default=Path("runs/shakespeare"), help="folder of the runs")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of shakespeare.json, .png")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(argv)
    make_folder(parser, args.output)
    if not args.data.is_file():
        parser.error(f"--data: there is no file {args.data}")
    width = args.hidden_size
    if width and "transformer" in args.models and width % (8 * _heads(width)):  # a quarter of a head turns, in pairs
        parser.error(
            f"--hidden-size {width}: the transformer's {_heads(width)} heads need a multiple of {8 * _heads(width)}"
        )
    # Not the mixed precision, which each run tells: a machine is fast in one or the other, and the losses are close.
    names = ("steps", "eval_steps", "learning_rate", "hidden_size")
    settings = {name: getattr(args, name) for name in names}
    settings["text_sha256"] = hashlib.sha256(args.data.read_bytes()).hexdigest()
    file = args.output / "shakespeare.json"
    document = {"settings": settings, "runs": []}
    if file.is_file():
        document = json.loads(file.read_text())
        if document["settings"] != settings:
            parser.error(f"--output: {file} holds runs with other settings: {document['settings']}")
    runs = {(one["model"], one["seed"]): one for one in document["runs"]}
    for seed in args.seeds:
        for model in args.models:
            if (model, seed) not in runs:
                runs[model, seed] = run(model, seed, args.runs / f"{model}_{seed}", args)
                ordered = sorted(runs.values(), key=lambda one: (MODELS.index(one["model"]), one["seed"]))
                document = {"settings": settings, "summary": summary(ordered), "runs": ordered}
                write_whole(file, json.dumps(document, indent=1) + "\n")  # after each, for they take long
    with replacing(args.output / "shakespeare.png") as path:
        draw(document, path)
    print(table(document))
    print(f"Written: {file} and shakespeare.png")


if __name__ == "__main__":
    main()
