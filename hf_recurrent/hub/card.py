"""The model card: what is known of a model, and nothing else."""

import json
import re
from pathlib import Path

import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..evaluation.tables import task_results
from ..messages import counted
from ..training.arguments import DataArguments, ModelArguments, TrainArguments
from ..training.folder import ARGUMENTS, RunFolder
from .secrets import is_secret_name, redacted

MARK = "<!-- written by hf-recurrent push -->"  # a card without it is somebody's own, and is left alone
PAPERS = {
    "gateloop": ("GateLoop: Fully Data-Controlled Linear Recurrence for Sequence Modeling", "2311.01927"),
    "longhorn": ("Longhorn: State Space Models are Amortized Online Learners", "2407.14207"),
    "mingru": ("Were RNNs All We Needed?", "2410.01201"),
    "minlstm": ("Were RNNs All We Needed?", "2410.01201"),
    "s5": ("Simplified State Space Layers for Sequence Modeling", "2208.04933"),
}
NAMES = {"gateloop": "GateLoop", "longhorn": "Longhorn", "mingru": "minGRU", "minlstm": "minLSTM", "s5": "S5"}
TASKS = {  # by the end of the model class's name: the Hub's name of the task, and the Auto class that loads it
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "ForTokenClassification": ("token-classification", "AutoModelForTokenClassification"),
    "ForImageClassification": ("image-classification", "AutoModelForImageClassification"),
    "Model": (None, "AutoModel"),
}
# Settings that say where a run lay and how it was watched, not how the model was made.
UNSAID = {"output_dir", "overwrite", "resume", "log_steps", "eval_rows", "save_steps", "keep_checkpoints", "cpu"}
UNSAID |= {"license", "language", "token_cache", "token_cache_gb", "health_steps", "log_with"}
METRICS = {
    "validation_loss": ("loss", "Loss (nats per token)"),
    "validation_perplexity": ("perplexity", "Perplexity"),
    "validation_bits_per_byte": ("bits_per_byte", "Bits per byte"),
}


def state_bytes(model: PreTrainedModel) -> int | None:
    """What the cache takes for one sequence, of whatever length; None where a model has none."""
    if not all(layer.mixer.state_shapes for layer in model.base_model.layers):
        return None
    with torch.inference_mode():
        one_token = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype, device=model.device)
        return model.base_model(inputs_embeds=one_token, use_cache=True).past_key_values.nbytes


def model_card(
    model: PreTrainedModel,
    repo_id: str,
    *,
    source: Path | None = None,
    code: str = "shim",
    license: str | None = None,
    language: list[str] | None = None,
) -> ModelCard:
    """
    Args:
        repo_id: the repository's name, user/repo.
        source: the folder that the model is from. Where `hf-recurrent train` wrote it, the card tells of the run.
        code: what the repository has to load the model by, see `stage`.
        license, language: by default those that the run's settings name; left out where nobody says.
    """
    settings, metrics = run_facts(source)
    license = license or settings.get("license")
    language = language or settings.get("language") or None
    family, (_, arxiv) = model.config.model_type, PAPERS[model.config.model_type]
    task, _ = _task(model)
    named = [source.get("dataset") for source in settings.get("sources") or [settings]]
    on_hub = [name for name in named if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
    evaluated = lm_eval_results(source)
    results = _results(settings, metrics, task, on_hub[0] if len(named) == len(on_hub) == 1 else None) + evaluated
    data = ModelCardData(  # its values redacted one by one: *** has a meaning in YAML
        license=redacted(license) if license else None,
        language=[redacted(name) for name in language] if language else None,
        library_name="transformers",
        pipeline_tag=task,
        tags=["hf_recurrent", family, "linear-recurrence", f"arxiv:{arxiv}"],
        datasets=on_hub or None,
        model_name=repo_id.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    sections = [
        f"# {repo_id.split('/')[-1]}\n\n{MARK}",
        _about(model),
        _loading(model, repo_id, code),
        _training(settings, source),
        _evaluation(settings, metrics, evaluated),
    ]
    body = redacted("\n\n".join(filter(None, sections)))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


def run_facts(source: Path | None) -> tuple[dict, dict]:
    """The settings in `train.yaml` and the last validation in `metrics.jsonl`, empty where there is none."""
    settings, metrics = {}, {}
    if source is not None and (source / ARGUMENTS).is_file():
        settings = yaml.safe_load((source / ARGUMENTS).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"{source / ARGUMENTS}: expected `key: value` lines")
        lines = [line for line in RunFolder(str(source)).metrics() if "validation_loss" in line]
        metrics = lines[-1] if lines else {}
    return settings, metrics


def lm_eval_results(source: Path | None) -> list[EvalResult]:
    """What `hf-recurrent evaluate lm --output` wrote into the model's folder, if it did.

    Raises:
        ValueError: `lm-eval.json` is not what lm-eval writes.
    """
    path = None if source is None else source / "lm-eval.json"
    if path is None or not path.is_file():
        return []
    try:
        return task_results(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not the results of lm-eval ({type(error).__name__}: {error})") from None


def _task(model: PreTrainedModel) -> tuple[str | None, str | None]:
    name = type(model).__name__
    return next((task for ending, task in TASKS.items() if name.endswith(ending)), (None, None))


def _about(model: PreTrainedModel) -> str:
    config, kind = model.config, model.config.model_type
    title, arxiv = PAPERS[kind]
    sizes = {"image size": "image_size", "input features": "input_size"}
    reads = {name: getattr(config, field, None) for name, field in sizes.items()}
    reads = {name: size for name, size in reads.items() if size is not None} or {"vocabulary": config.vocab_size}
    facts = {
        "class": f"`{type(model).__name__}`",
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        **reads,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    size = state_bytes(model)
    if size is not None:
        facts["cache per sequence"] = f"{size:,} bytes, whatever its length"
    rows = [f"| {name} | {value if isinstance(value, str) else f'{value:,}'} |" for name, value in facts.items()]
    intro = (
        f"A {NAMES[kind]} model ([{title}](https://arxiv.org/abs/{arxiv})), a linear recurrence whose state has a "
        "fixed size, made with hf_recurrent."
    )
    return "\n".join([intro, "", "| | |", "|---|---|", *rows])


def _loading(model: PreTrainedModel, repo_id: str, code: str) -> str:
    _, auto_class = _task(model)
    if auto_class is None:
        name = type(model).__name__
        lines = [f"from hf_recurrent import {name}", "", f'model = {name}.from_pretrained("{repo_id}")']
        return "## Loading\n\n```python\n" + "\n".join(lines) + "\n```"
    remote = [
        f"from transformers import {auto_class}",
        "",
        f'model = {auto_class}.from_pretrained("{repo_id}", trust_remote_code=True)',
    ]
    if code == "standalone":
        text = "With Transformers alone, by the code in this repository:"
        return f"## Loading\n\n{text}\n\n```python\n" + "\n".join(remote) + "\n```"
    own = [
        "import hf_recurrent  # registers the models with Transformers",
        f"from transformers import {auto_class}",
        "",
        f'model = {auto_class}.from_pretrained("{repo_id}")',
    ]
    text = "With hf_recurrent installed:"
    more = "With `trust_remote_code=True` the import is not needed, but the package is."
    return f"## Loading\n\n{text}\n\n```python\n" + "\n".join(own) + f"\n```\n\n{more}"


def _training(settings: dict, source: Path | None) -> str | None:
    known = [name for kind in (ModelArguments, DataArguments, TrainArguments) for name in kind.__dataclass_fields__]
    rows = [
        f"| {name} | {_value(settings[name])} |"
        for name in known
        if name in settings and name not in UNSAID and not is_secret_name(name)
    ]
    if not rows:
        return None
    text = "## Training\n\nBy `hf-recurrent train`, with\n\n| setting | value |\n|---|---|\n" + "\n".join(rows)
    return text + ("\n\n![training and validation loss](loss.png)" if (source / "loss.png").is_file() else "")


def _value(value: object) -> str:
    """A setting as a cell of a table. Of files the names are told, not the folders they lay in."""
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, dict):  # one of several sources
        return "(" + ", ".join(f"{name}: {_value(part)}" for name, part in value.items()) + ")"
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return Path(text).name if text.startswith(("/", "~", "..")) else text


def _evaluated_on(settings: dict) -> str:
    if settings.get("validation_files"):
        return _value(settings["validation_files"])
    sources = settings.get("sources") or [settings]
    of = ", ".join(_value(source.get("dataset") or source.get("data_files") or []) for source in sources)
    of = of or "Python's standard library"
    if settings.get("validation_split"):
        return f"split {settings['validation_split']} of {_value(of)}"
    return f"held-out documents of {_value(of)}"


def _results(settings: dict, metrics: dict, task: str | None, on_hub: str | None) -> list[EvalResult]:
    return [
        EvalResult(
            task_type=task or "text-generation",
            dataset_type=on_hub or "custom",
            dataset_name=redacted(_evaluated_on(settings)),
            dataset_split=redacted(settings["validation_split"]) if "validation_split" in settings else None,
            metric_type=kind,
            metric_name=name,
            metric_value=round(metrics[key], 6),
        )
        for key, (kind, name) in METRICS.items()
        if key in metrics
    ]


def _evaluation(settings: dict, metrics: dict, evaluated: list[EvalResult]) -> str | None:
    parts = [_validation(settings, metrics)] if metrics else []
    if evaluated:
        rows = [
            f"| {_cell(one.dataset_name)} | {_cell(one.metric_name)} | {one.metric_value:.4f} |" for one in evaluated
        ]
        parts.append(f"By {evaluated[0].source_name}:\n\n| task | metric | |\n|---|---|---|\n" + "\n".join(rows))
    return "## Evaluation\n\n" + "\n\n".join(parts) if parts else None


def _cell(text: str) -> str:
    return re.sub(r"([\\|<])", r"\\\1", text)


def _validation(settings: dict, metrics: dict) -> str:
    rows = [f"| {name} | {metrics[key]:.4f} |" for key, (_, name) in METRICS.items() if key in metrics]
    where = f"On {_evaluated_on(settings)}, after step {metrics['step']:,}"
    if "validation_rows" in metrics:
        where += f", over {counted(metrics['validation_rows'], 'row')} that share no context"
    return f"{where}:\n\n| | |\n|---|---|\n" + "\n".join(rows)
