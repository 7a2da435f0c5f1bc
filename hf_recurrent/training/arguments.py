"""What `hf-recurrent train` can be told: three dataclasses, read from flags and from a YAML file."""

import argparse
import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

import yaml
from transformers import HfArgumentParser

from ..cli.parser import CommandLineError, Parser
from ..messages import nearest
from .data_arguments import DataArguments
from .options import flag, option, require, type_name

EXAMPLES = """\
examples:
  hf-recurrent train                                        minGRU on the standard library's source, one epoch
  hf-recurrent train --max-minutes 5 --hidden-size 256 --num-hidden-layers 4
  hf-recurrent train --data-files 'books/*.txt' --vocab-size 8192 --sequence-length 512
  hf-recurrent train --dataset roneneldan/TinyStories --streaming --max-steps 5000 --mixed-precision bf16
  hf-recurrent train --sources '{data_files: [code.jsonl], weight: 0.7}' '{dataset: me/prose, weight: 0.3}'
  hf-recurrent train recipe.yaml --learning-rate 5e-4       a file's settings, one of them overridden
  hf-recurrent train runs/mingru/train.yaml --resume        go on after an interruption
  hf-recurrent train recipe.yaml --dry-run                  sizes, memory and time, without data or network
  hf-recurrent train recipe.yaml --resume auto              the same command, however often it is interrupted
  hf-recurrent train --model runs/mingru --data-files notes.txt --output-dir runs/notes
  torchrun --nproc-per-node 4 -m hf_recurrent.training recipe.yaml --context-parallel 4     rows too long for one device
"""


@dataclass
class ModelArguments:
    _argument_group_name = "model"

    model: str | None = option(None, "Continue from this folder, its configuration and tokenizer included.")
    model_type: str | None = option(None, "Family of a new model (default: mingru).")
    hidden_size: int | None = option(None, "Width of a new model (default: 256).")
    num_hidden_layers: int | None = option(None, "Blocks of a new model (default: 4).")
    expansion: float | None = option(None, "Width of the recurrence over hidden_size (default: the family's).")
    conv_kernel: int | None = option(None, "Kernel of the short convolution, 0 for none (default: the family's).")
    mlp_ratio: float | None = option(None, "Width of the MLP over hidden_size, 0 for none (default: the family's).")
    hidden_dropout: float | None = option(None, "Dropout probability (default: the family's).")
    config_overrides: str | None = option(
        None, "Other configuration fields of a new model: key=value,key=value.", metavar="KEY=VALUE,..."
    )

    def config_fields(self) -> dict[str, int | float]:
        """The configuration fields given by flags of their own."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            name: value
            for name, value in values.items()
            if value is not None and name not in ("model", "model_type", "config_overrides")
        }

    def __post_init__(self):
        require(self, "hidden_size", "num_hidden_layers", at_least=1)
        require(self, "conv_kernel", "mlp_ratio", at_least=0)
        require(self, "expansion", above=0)
        require(self, "hidden_dropout", at_least=0, below=1)
        given = self.config_fields() | {
            name: True for name in ("model_type", "config_overrides") if getattr(self, name) is not None
        }
        if self.model is not None and given:
            raise ValueError(f"{flag(next(iter(given)))} describes a new model and cannot be given with --model")


@dataclass
class TrainArguments:
    _argument_group_name = "training"

    output_dir: str | None = option(None, "Folder for model, metrics and checkpoints (default: runs/MODEL_TYPE).")
    dry_run: bool = option(False, "Check the settings and print sizes and costs; train nothing, read no data.")
    overwrite: bool = option(False, "Replace an earlier run in --output-dir as soon as this one has saved.")
    resume: Literal["newest", "auto"] | None = option(
        None,
        "Continue from the newest whole checkpoint in --output-dir; with 'auto', begin anew where there is none.",
        nargs="?",
        const="newest",
    )
    max_steps: int | None = option(
        None, "Stop after so many optimiser steps. The first budget to run out ends the run. (default: --num-epochs 1)"
    )
    num_epochs: float | None = option(None, "Stop after so many passes over the corpus.")
    max_minutes: float | None = option(
        None, "Stop after so many minutes of training, not counting the data's preparation."
    )
    batch_size: int = option(16, "Rows per process in one forward pass.")
    gradient_accumulation_steps: int | None = option(
        None, "Forward and backward passes per optimiser step (default: 1, or what --total-batch-size needs)."
    )
    total_batch_size: int | None = option(
        None,
        "Rows per optimiser step over all processes and passes, whatever their number; --batch-size is then the most "
        "that a process takes in one pass.",
    )
    learning_rate: float = option(2e-3, "Highest learning rate.")
    recurrence_learning_rate: float | None = option(
        None, "Highest learning rate of what the family's paper trains at its own (S5's SSM, GateLoop's transitions)."
    )
    min_learning_rate_ratio: float = option(0.1, "Learning rate at the end of the cosine, in multiples of the highest.")
    warmup_steps: float = option(0.05, "Steps of linear warm-up; below 1, a share of the run.")
    weight_decay: float = option(0.1, "Weight decay of matrices; vectors (norms, biases) have none.")
    adam_beta1: float = option(0.9, "AdamW's β1.")
    adam_beta2: float = option(0.95, "AdamW's β2.")
    adam_epsilon: float = option(1e-8, "AdamW's ε.")
    max_grad_norm: float = option(1.0, "Clip the gradient's norm to this; 0 does not clip.")
    mixed_precision: Literal["no", "bf16", "fp16"] | None = option(
        None, "Precision of the forward pass (default: what `accelerate launch` was told, else no)."
    )
    seed: int = option(0, "Seed of initialisation, shuffling and dropout.")
    bptt_chunk: int | None = option(
        None,
        "Truncated backpropagation through time: read each row in chunks of so many tokens, each from the state that "
        "the one before it left. Takes the memory of one chunk (default: rows as a whole).",
    )
    bptt_carry_gradients: bool = option(
        False, "Let gradients flow through the state into the chunks before: those of the whole row, at its memory."
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations, those of the head too, in the backward pass, to save memory."
    )
    compile: bool = option(False, "Compile the model by torch.compile.")
    cpu: bool = option(False, "Train on the CPU even where there is an accelerator.")
    fsdp: bool = option(
        False,
        "Cut weights, gradients and optimiser states over the processes (FSDP2), as `accelerate launch --use_fsdp "
        "--fsdp_version 2` does too; one process has them all as ever.",
    )
    context_parallel: int = option(
        1,
        "Split each row over so many processes, between which only states travel: for rows that are too long for one. "
        "Groups of so many processes share the rows of a step.",
    )
    timeout_minutes: float | None = option(
        None,
        "End the run where a process has not answered the others for so long (default: PyTorch's 30 minutes, 10 on "
        "NVIDIA GPUs).",
    )
    log_steps: int = option(10, "Steps between lines of metrics.jsonl.")
    eval_steps: int = option(200, "Steps between validations on --eval-rows rows; 0: only at both ends.")
    eval_rows: int = option(64, "Rows of these validations, spread evenly; the last one takes all.")
    save_steps: int = option(1000, "Steps between checkpoints; one at the end too; 0: none but after an interruption.")
    keep_checkpoints: int = option(2, "Checkpoints to keep, the newest ones.")
    on_bad_loss: Literal["stop", "skip"] = option(
        "stop",
        "Where the loss or the gradient is not finite: stop, or skip the step. The weights stay as they were, and the "
        "rows are named in bad_batches.jsonl.",
    )
    on_loss_spike: Literal["log", "skip", "stop"] = option(
        "log", "Where the loss leaps: note the rows in bad_batches.jsonl and go on, or what --on-bad-loss does."
    )
    loss_spike_threshold: float = option(
        10.0, "A leap is so many robust standard deviations above the median of the latest 128 steps; 0: none is."
    )
    max_skipped_steps: int = option(10, "Stop when so many steps in a row have been skipped.")
    health_steps: int = option(
        200,
        "Steps between measurements of what each layer remembers (memory_1, memory_16 ... in metrics.jsonl); 0: none.",
    )
    log_with: list[str] = option(
        [], "Send the metrics to these trackers as well: tensorboard, wandb, trackio ..., or all that are installed."
    )
    license: str | None = option(None, "Licence of the model, for its card (hf-recurrent push): mit, apache-2.0 ...")
    language: list[str] = option([], "Languages of the corpus, for the model's card: en, de ...")

    def __post_init__(self):
        require(self, "max_steps", "batch_size", "gradient_accumulation_steps", "log_steps", at_least=1)
        require(self, "total_batch_size", "context_parallel", at_least=1)
        require(self, "eval_rows", "keep_checkpoints", "bptt_chunk", at_least=1)
        require(self, "max_skipped_steps", at_least=1)
        require(self, "loss_spike_threshold", "health_steps", at_least=0)
        require(self, "num_epochs", "max_minutes", above=0)
        require(self, "timeout_minutes", above=0, at_most=60 * 24 * 365)
        require(self, "learning_rate", "recurrence_learning_rate", above=0, at_most=1e38)  # float32's range
        require(self, "warmup_steps", "weight_decay", "max_grad_norm", "eval_steps", "save_steps", at_least=0)
        require(self, "min_learning_rate_ratio", at_least=0, at_most=1)
        require(self, "adam_beta1", "adam_beta2", at_least=0, below=1)
        require(self, "adam_epsilon", at_least=1e-37)  # below, it is 0 in float32, and AdamW divides by it
        require(self, "seed", at_least=0, at_most=2**31 - 1)
        if self.bptt_carry_gradients and self.bptt_chunk is None:
            raise ValueError("--bptt-carry-gradients belongs to --bptt-chunk, which is not given")
        if self.context_parallel > 1:
            for name in ("bptt_chunk", "compile"):
                if getattr(self, name):
                    raise ValueError(
                        f"--context-parallel {self.context_parallel} and {flag(name)} cannot both be given"
                    )
        if self.cpu and self.mixed_precision == "fp16":
            raise ValueError("--mixed-precision fp16: Accelerate has it on accelerators only; with --cpu bf16 works")
        if self.overwrite and self.resume:
            raise ValueError("--overwrite and --resume cannot both be given")
        if self.on_loss_spike != "log" and self.loss_spike_threshold == 0:
            raise ValueError(f"--on-loss-spike {self.on_loss_spike} and --loss-spike-threshold 0 cannot both be given")
        if self.total_batch_size is not None and self.gradient_accumulation_steps is not None:
            raise ValueError("--total-batch-size and --gradient-accumulation-steps cannot both be given")

    def replicas(self, processes: int) -> int:
        """Copies of the model that read different rows: one per group of --context-parallel processes.

        Raises:
            ValueError: so many processes form no such groups.
        """
        if processes % self.context_parallel:
            raise ValueError(
                f"--context-parallel {self.context_parallel} must divide the number of processes, got {processes}"
            )
        return processes // self.context_parallel

    def passes(self, replicas: int) -> tuple[int, int]:
        """Rows per replica in one pass, and passes per optimiser step.

        Raises:
            ValueError: so many replicas cannot share --total-batch-size evenly.
        """
        if self.total_batch_size is None:
            return self.batch_size, self.gradient_accumulation_steps or 1
        if self.total_batch_size % replicas:
            of = f"groups of {self.context_parallel} " if self.context_parallel > 1 else ""
            raise ValueError(
                f"--total-batch-size {self.total_batch_size} cannot be shared evenly by {replicas} {of}processes"
            )
        mine = self.total_batch_size // replicas
        size = next(size for size in range(min(self.batch_size, mine), 0, -1) if mine % size == 0)
        return size, mine // size


def check_together(model: ModelArguments, data: DataArguments, train: TrainArguments) -> None:
    """
    Raises:
        ValueError: arguments of different kinds that contradict each other.
    """
    if (train.bptt_chunk or 0) > data.sequence_length:
        raise ValueError(
            f"--bptt-chunk must be at most --sequence-length {data.sequence_length}, got {train.bptt_chunk}"
        )
    if train.context_parallel > data.sequence_length:
        raise ValueError(
            f"--context-parallel must be at most --sequence-length {data.sequence_length}, got {train.context_parallel}"
        )
    if train.max_steps is not None and train.warmup_steps > train.max_steps:
        warnings.warn(
            f"--warmup-steps {train.warmup_steps:g} are more than --max-steps {train.max_steps}: the learning rate "
            f"will not come to {train.learning_rate:g}",
            stacklevel=2,
        )
    if model.model is not None and data.vocab_size is not None:
        raise ValueError("--vocab-size belongs to a new tokenizer, but --model brings its own")
    ends = train.num_epochs is None and (train.max_steps is not None or train.max_minutes is not None)
    if not ends and any(part.streaming for part in data.parts()):
        instead = "" if train.num_epochs is None else " instead of --num-epochs"
        raise ValueError(f"a stream's length is not known: with --streaming give --max-steps or --max-minutes{instead}")


# ---- parsing ---------------------------------------------------------------------------------------------------------


class TrainParser(Parser, HfArgumentParser):
    """The parser of `hf-recurrent train`."""

    def __init__(self):
        super().__init__(
            (ModelArguments, DataArguments, TrainArguments),
            prog="hf-recurrent train",
            usage="hf-recurrent train [CONFIG.yaml] [--flags]",
            description="Pretrain a recurrent language model, or continue with one. Every flag can stand in a YAML "
            "file too, as `hidden_size: 256`; flags override the file.",
            epilog=EXAMPLES,
        )
        for action in self._actions:
            if action.const is False:  # --no-packing, which `--packing no` is as well
                action.help = argparse.SUPPRESS
        self.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="settings, by the flags' names")


def parse(argv: list[str]) -> tuple[ModelArguments, DataArguments, TrainArguments]:
    """Parse the command line of `hf-recurrent train`.

    Raises:
        CommandLineError: an unknown flag or key, or a value that does not fit; the message names the nearest valid one.
        FileNotFoundError, IsADirectoryError: the YAML file does not exist, or is a folder.
    """
    parser = TrainParser()
    argv = _with_values(parser, argv)
    config = parser.parse(argv).config
    if config is not None:
        from_file = _with_values(parser, _yaml_arguments(parser, Path(config)))
        try:
            parser.parse(from_file)
        except CommandLineError as error:
            raise CommandLineError(f"{config}: {error}") from None
        # The later value wins. The file's name goes first, where no list of values before it can take it in.
        argv.remove(config)
        argv = [config, *from_file, *argv]
    model, data, train, _ = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    return model, data, train


def _with_values(parser: TrainParser, argv: list[str]) -> list[str]:
    """Write `--overwrite` as `--overwrite=true`, and `--resume` as `--resume=newest`, lest argparse take what follows,
    the YAML file say, for its value."""
    optional = {name: action for action in parser._actions if action.nargs == "?" for name in action.option_strings}
    truth = {"true", "false", "yes", "no", "t", "f", "y", "n", "1", "0"}
    words = []
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        if word in optional and after.lower() not in (optional[word].choices or truth):
            word += f"={str(optional[word].const).lower()}"
        words.append(word)
    return words


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice; YAML forbids it, and SafeLoader takes the last one."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if keys[place] in keys[:place]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {keys[place]!r} is given twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


def _yaml_arguments(parser: TrainParser, path: Path) -> list[str]:
    """The settings in a YAML file as flags."""
    if path.is_dir():
        raise IsADirectoryError(f"{path}: a folder, expected a file of settings")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandLineError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if settings is None:
        return []
    if not isinstance(settings, dict):
        raise CommandLineError(f"{path}: expected `key: value` lines, got a {type(settings).__name__}")
    names = {f.name: f for dtype in parser.dataclass_types for f in dataclasses.fields(dtype)}
    argv = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in names:
            raise CommandLineError(f"{path}: unknown key {key!r}{nearest(name, names)}")
        if value is None:
            continue
        if isinstance(value, dict) and name == "config_overrides":
            value = ",".join(f"{k}={yaml.safe_dump(v).splitlines()[0]}" for k, v in value.items())
        if isinstance(value, dict) or isinstance(value, list) != (get_origin(names[name].type) is list):
            raise CommandLineError(f"{path}: {key}: got {value!r}, expected {type_name(names[name])}")
        items = value if isinstance(value, list) else [value]
        if str in (names[name].type, *get_args(names[name].type)) and any(isinstance(item, bool) for item in items):
            raise CommandLineError(
                f"{path}: {key}: got {value!r}, expected text: YAML reads no, yes, off and on as false and true, "
                "unless they are in quotes"
            )
        if isinstance(value, list):
            argv += [flag(name), *map(_word, value)] if value else []
        elif value is False and name == "mixed_precision":
            argv.append(f"{flag(name)}=no")  # YAML reads a bare `no` as false
        elif isinstance(value, bool) and name == "resume":
            argv += [flag(name)] * value
        else:
            argv.append(f"{flag(name)}={value}")
    return argv


def _word(item: object) -> str:
    """An item of a list in a YAML file as a word of the command line."""
    return yaml.safe_dump(item, default_flow_style=True, width=10**9).strip() if isinstance(item, dict) else str(item)


def to_yaml(model: ModelArguments, data: DataArguments, train: TrainArguments) -> str:
    """The arguments as a YAML file that `hf-recurrent train` reads; without those that say how to start."""
    lines = ["# hf-recurrent train THIS_FILE repeats the run; with --resume it goes on where the run stopped.\n"]
    for arguments in (model, data, train):
        settings = {
            name: value
            for name, value in dataclasses.asdict(arguments).items()
            if value not in (None, []) and name not in ("dry_run", "overwrite", "resume")
        }
        if settings:
            lines.append(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=1000))
    return "".join(lines)
