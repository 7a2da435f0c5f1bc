"""The command line: `hf-recurrent train | generate | evaluate | info`.

Only the standard library is imported at the top. What a command needs is imported by the command.
"""

import argparse
import contextlib
import difflib
import importlib.metadata
import json
import logging
import os
import platform
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator

from . import __version__

PREFILL_TOKENS = 4096  # of a long prompt, read at once
LARGEST = 10**12  # of any number on the command line: what lies far beyond overflows in one library or another


class CommandLineError(ValueError):
    """What was typed cannot be understood; the message is one line."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help that shows each flag once, by its hyphenated name, and each default worth showing."""

    def _format_action_invocation(self, action):
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "_" not in name]
        value = "" if action.nargs in (0, "?") else f" {self._format_args(action, self._get_default_metavar(action))}"
        return ", ".join(names) + value

    def _get_default_metavar(self, action):
        return action.metavar or {int: "N", float: "X"}.get(action.type, "NAME")

    def _get_help_string(self, action):
        default = action.default
        if default is None or default is False or default == [] or default is argparse.SUPPRESS:
            return action.help
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser that raises CommandLineError instead of leaving, and that names the nearest valid flag."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, formatter_class=Formatter, allow_abbrev=False, **kwargs)

    def error(self, message):
        # "argument --hidden_size/--hidden-size: invalid ..." -> "--hidden-size: invalid ..."
        message = re.sub(r"^argument (?:\S*/)?(--?\S+?):", r"\1:", message)
        # argparse takes what begins with a dash for a flag, whatever it stands behind.
        if missing := re.fullmatch(r"(--\S+): expected one argument", message):
            message += f"; one that begins with a dash is given as {missing[1]}=-..."
        raise CommandLineError(message)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        # Before argparse misses a required flag for the one that was misspelt.
        for before, word in zip(["", *argv], argv, strict=False):
            if word.startswith("--") and word.split("=")[0] not in self._option_string_actions:
                if before == "--prompt":
                    self.error("argument --prompt: expected one argument")
                raise self._unknown(word)
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            raise self._unknown(unknown[0])
        for action in self._actions:
            value = getattr(namespace, action.dest, None)
            for text in value if isinstance(value, list) else [value]:
                if not isinstance(text, str):
                    continue
                name = action.option_strings[-1] if action.option_strings else action.metavar
                # Most often a shell variable that is not set. That a prompt is empty is for the tokenizer to say.
                if text == "" and action.dest != "prompt":
                    raise CommandLineError(f"{name}: expected a value, got ''")
                if text != text.encode("utf-8", "ignore").decode("utf-8"):
                    raise CommandLineError(f"{name} {text!r}: not UTF-8 text")
        return namespace

    def _unknown(self, word: str) -> CommandLineError:
        name = word.split("=")[0]
        if not name.startswith("-"):
            return CommandLineError(f"unexpected argument {word!r}")
        flags = [option for option in self._option_string_actions if "_" not in option]
        return CommandLineError(f"unknown flag {name}{nearest(name.replace('_', '-'), flags)}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message (other libraries write many), or its kind where it has none.

    Two lines, where the first one ends in a colon.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


@contextlib.contextmanager
def within_memory(remedy: str) -> Iterator[None]:
    """Turns whatever a library raises for too little memory, or for a size that overflows, into one MemoryError."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        told = re.search("out of memory|allocate memory|[Oo]verflow|Maximum allowed", str(error))
        if not isinstance(error, (MemoryError, OverflowError)) and not told:
            raise
        raise MemoryError(f"not enough memory: {remedy} ({first_line(error)})") from error


def counted(number: int, noun: str) -> str:
    """1 document; 2,000 documents."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint at the valid name that is most like `name`."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0)
    return f"; the nearest valid one is {close[0]}" if close else ""


# ---- train -----------------------------------------------------------------------------------------------------------


def train(argv: list[str]) -> int:
    from .training import arguments, train

    _no_bars_for_files()
    # What its readers log about a broken file stands in the error that they raise.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    parsed = arguments.parse(argv)
    with within_memory("try a smaller --batch-size, --sequence-length or model"):
        return 130 if train(*parsed)["interrupted"] else 0


# ---- generate --------------------------------------------------------------------------------------------------------


def _generate_parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent generate",
        usage="hf-recurrent generate --model DIR [--prompt TEXT] [--state-in FILE] [--flags]",
        description="Continue a prompt.",
        epilog="""\
examples:
  hf-recurrent generate --model runs/mingru --prompt "def "
  hf-recurrent generate --model runs/mingru --prompt "import " --max-new-tokens 500 --temperature 0.7 --stream
  hf-recurrent generate --model runs/mingru --prompt "class " --temperature 0        always the likeliest token
  hf-recurrent generate --model runs/mingru --prompt "class " --num-beams 4
  hf-recurrent generate --model runs/mingru --prompt - --state-out book.state < book.txt
  hf-recurrent generate --model runs/mingru --state-in book.state --prompt "And then" --stream
""",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="folder of a model, or its name on the Hub")
    add("--prompt", metavar="TEXT", help="text to continue; - reads it from standard input")
    add(
        "--state-in",
        metavar="FILE",
        help="go on after the text whose state this file holds; a prompt is then what comes next, if anything",
    )
    add("--state-out", metavar="FILE", help="write the state after the generated text")
    add("--max-new-tokens", type=_number(int, 1), default=200, metavar="N", help="tokens to generate at most")
    add(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="divides the logits before sampling; 0 takes the likeliest token (default: 0.8, with --num-beams 0)",
    )
    add(
        "--top-p",
        type=_number(float, 0, 1),
        default=0.9,
        metavar="P",
        help="sample from the likeliest tokens of mass P; 1 from all",
    )
    add("--top-k", type=_number(int, 0), default=0, metavar="K", help="sample from the K likeliest tokens; 0 from all")
    add("--num-beams", type=_number(int, 1), default=1, metavar="N", help="beams of a beam search; 1 does without")
    add("--seed", type=_number(int, 0, 2**32 - 1), metavar="N", help="seed of the sampling (default: a new one)")
    add("--stream", action="store_true", help="print the tokens as they come")
    add("--cpu", action="store_true", help="generate on the CPU even where there is a GPU")
    return parser


def _number(kind: type, low: float, high: float = LARGEST):
    """A type for argparse: a number in [low, high]."""

    def convert(text: str):
        value = kind(text)
        if not low <= value <= high:
            between = f"at least {low}" if high == LARGEST and value < low else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"must be {between}, got {text}")
        return value

    convert.__name__ = kind.__name__  # argparse names it: "invalid int value"
    return convert


def _temperature(text: str) -> float:
    value = float(text)
    # Logits over less than this leave float32's range.
    if value != 0 and not 1e-30 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"must be 0 or between 1e-30 and {LARGEST}, got {text}")
    return value


_temperature.__name__ = "float"  # argparse names it, as above


def generate(argv: list[str]) -> int:
    args = _generate_parser().parse(argv)
    temperature = (0.8 if args.num_beams == 1 else 0.0) if args.temperature is None else args.temperature
    if args.stream and args.num_beams > 1:
        raise CommandLineError("--stream cannot be combined with --num-beams: beams are known at the end")

    if args.state_out is not None and args.num_beams > 1:
        raise CommandLineError("--state-out cannot be combined with --num-beams: each beam has a state of its own")
    if args.prompt is None and args.state_in is None:
        raise CommandLineError("the following arguments are required: --prompt (or --state-in, to go on from a state)")
    if args.state_out is not None:
        _check_writable("--state-out", args.state_out)

    import torch
    from transformers import TextStreamer, set_seed

    from .modeling import RecurrentCache
    from .training.model import load_model
    from .training.tokenizer import load_tokenizer

    _no_bars_for_files()
    model = load_model(args.model).eval()
    tokenizer = load_tokenizer(args.model, "--model")
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    model.to(device)
    cache, unread = RecurrentCache(model.config), []
    if args.state_in is not None:
        cache, unread = _load_state(args.state_in, model.config, device)
    prompt = _standard_input() if args.prompt == "-" else args.prompt or ""
    ids = tokenizer(prompt, add_special_tokens=args.state_in is None)["input_ids"]
    if not unread and not tokenizer(prompt, add_special_tokens=False)["input_ids"]:
        raise CommandLineError(f"--prompt {prompt!r} tokenises to nothing: give at least one character")
    if (largest := max([*unread, *ids])) >= model.config.vocab_size:
        raise ValueError(
            f"--model {args.model}: its tokenizer does not fit: token id {largest} is outside the model's vocabulary "
            f"of {model.config.vocab_size}"
        )
    if args.seed is not None:
        set_seed(args.seed)
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": args.top_p, "top_k": args.top_k}
    # `generate` leaves out as many tokens as the cache has seen, whatever they are.
    seen = cache.get_seq_length()
    inputs = torch.tensor([[0] * seen + unread + ids], device=device)
    streamer = None
    if args.stream:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        print(prompt, end="", flush=True)
    with torch.inference_mode(), within_memory("try fewer --num-beams or a smaller model"):
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=cache,
            max_new_tokens=args.max_new_tokens,
            prefill_chunk_size=PREFILL_TOKENS if len(ids) > PREFILL_TOKENS else None,
            num_beams=args.num_beams,
            streamer=streamer,
            **sampling,
        )[0].tolist()
    if not args.stream:
        print(tokenizer.decode(output[seen + len(unread) :], skip_special_tokens=True))
    if args.state_out is not None:
        cache.save(args.state_out, {"unread": json.dumps(output[cache.get_seq_length() :])})
    return 0


def _standard_input() -> str:
    """All of it, as text.

    Raises:
        CommandLineError: it is not UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandLineError(f"--prompt -: standard input is not UTF-8 text (byte {error.start})") from None


def _check_writable(flag: str, name: str) -> None:
    folder = os.path.dirname(os.path.abspath(name))
    if os.path.isdir(name) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise CommandLineError(f"{flag} {name}: cannot be written")


def _load_state(name: str, config, device) -> tuple:
    """The cache in a file that --state-out wrote, and the tokens generated last that it has not read."""
    from safetensors import safe_open

    from .modeling import RecurrentCache

    try:
        cache = RecurrentCache.load(name, config, device)
        with safe_open(name, "pt") as file:
            unread = json.loads((file.metadata() or {}).get("unread", "[]"))
        if cache.batch_size > 1:
            raise ValueError(f"holds the states of {cache.batch_size} texts, expected 1")
        if not isinstance(unread, list) or not all(isinstance(token, int) and token >= 0 for token in unread):
            raise ValueError("is a damaged state file: its unread tokens are not token ids")
    except (OSError, ValueError) as error:
        raise CommandLineError(f"--state-in {name}: {first_line(error)}") from None
    return cache, unread


# ---- evaluate --------------------------------------------------------------------------------------------------------


def _evaluate_parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent evaluate",
        usage="hf-recurrent evaluate perplexity --model DIR --data-files FILE [FILE ...] [--flags]",
        description="Perplexity and bits per byte of a text of any length, over all of it and by position.",
        epilog="""\
examples:
  hf-recurrent evaluate perplexity --model runs/books --data-files book.txt
  hf-recurrent evaluate perplexity --model runs/books --data-files 'test/*.txt' --window 32768 --output runs/length
""",
    )
    add = parser.add_argument
    add("evaluation", choices=["perplexity"], metavar="perplexity", help="what to evaluate")
    add("--model", required=True, metavar="DIR", help="folder of a model, or its name on the Hub")
    add("--data-files", required=True, nargs="+", metavar="FILE", help="text files (globs too), read as one text")
    add(
        "--window",
        type=_number(int, 2),
        metavar="N",
        help="start again from nothing after N tokens (default: read on to the end)",
    )
    add("--chunk-size", type=_number(int, 1), default=1024, metavar="N", help="tokens that are read at once")
    add("--output", metavar="DIR", help="also write perplexity.json and perplexity.png there")
    add("--cpu", action="store_true", help="compute on the CPU even where there is a GPU")
    return parser


def evaluate(argv: list[str]) -> int:
    args = _evaluate_parser().parse(argv)

    import torch
    from tqdm import tqdm

    from .evaluation import measure_perplexity
    from .evaluation.perplexity import save
    from .training.data import expand, file_documents, pieces
    from .training.model import load_model
    from .training.report import table
    from .training.tokenizer import load_tokenizer

    _no_bars_for_files()
    files = expand(args.data_files, "--data-files")
    if args.output is not None:
        os.makedirs(args.output, exist_ok=True)
        _check_writable("--output", os.path.join(args.output, "perplexity.json"))
    model = load_model(args.model).eval()
    tokenizer = load_tokenizer(args.model, "--model")
    model.to(torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu"))
    texts = list(file_documents(files, "text").texts())
    text_bytes = sum(len(text.encode()) for text in texts)
    tokens = (
        token
        for text in texts
        for piece in pieces(text)
        for token in tokenizer(piece, add_special_tokens=False)["input_ids"]
    )
    with tqdm(desc="reading", unit=" tokens", unit_scale=True, disable=None, leave=False) as bar:
        result = measure_perplexity(model, tokens, text_bytes, args.window, args.chunk_size, bar.update)
    whole = result.as_dict()
    rows = [("tokens before", "tokens  perplexity")]
    rows += [
        (f"{row['from']:,} to {row['to']:,}", f"{row['tokens']:,}  {row['perplexity']:10,.3f}")
        for row in whole["by_position"]
    ]
    rows.append(("all", f"{whole['tokens']:,}  {whole['perplexity']:10,.3f}"))
    print(table(rows))
    print(f"{whole['bits_per_byte']:.4f} bits per byte, over {counted(text_bytes, 'byte')}")
    if args.output is not None:
        from pathlib import Path

        save(result, Path(args.output), f"{Path(args.model).name} on {counted(text_bytes, 'byte')} of text")
        print(f"Written: perplexity.json and perplexity.png in {args.output}")
    return 0


# ---- info ------------------------------------------------------------------------------------------------------------


def _info_parser() -> Parser:
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


def info(argv: list[str]) -> int:
    args = _info_parser().parse(argv)
    facts = {"versions": _versions(), "devices": _devices(), "backends": _backends()}
    if args.model is not None:
        facts["model"] = _model_facts(args.model)
    if args.preset is not None:
        facts["model"] = _preset_facts(args.preset)
    print(json.dumps(facts, indent=2) if args.json else _show(facts))
    return 0


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "accelerate", "datasets", "tokenizers")
    return {
        "hf_recurrent": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


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
    from .scan import available_backends, backend_report

    available = available_backends()
    return {
        "report": backend_report(),
        "used": {
            "cpu tensors": "cpu" if "cpu" in available else "chunked",
            "cuda tensors": "cuda" if "cuda" in available else "chunked",
            "other tensors": "chunked",
        },
    }


def _model_facts(name: str) -> dict[str, object]:

    from .training.model import load_model

    _no_bars_for_files()
    return {"folder": name, **_size_facts(load_model(name).eval())}


def _preset_facts(name: str) -> dict[str, object]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSequenceClassification

    from .modeling import FAMILIES

    presets = {preset: config_class for config_class in FAMILIES for preset in config_class.presets}
    if name not in presets:
        raise CommandLineError(f"--preset {name}: no such preset{nearest(name, presets)}; known: {', '.join(presets)}")
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
    import torch

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
    if all(layer.mixer.state_shapes for layer in model.base_model.layers):
        with torch.inference_mode():
            one_token = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype, device=model.device)
            cache = model(inputs_embeds=one_token, use_cache=True).past_key_values
        facts["state bytes per sequence"] = cache.nbytes
    return facts


def _show(facts: dict) -> str:
    sections = {
        "versions": facts["versions"],
        "devices": facts["devices"],
        "scan backends": facts["backends"]["report"],
        "backend used for": facts["backends"]["used"],
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


def _no_bars_for_files() -> None:
    """Transformers shows a bar for each model it reads or writes, even for milliseconds."""
    from transformers.utils import logging

    logging.disable_progress_bar()


# ---- all commands ----------------------------------------------------------------------------------------------------

COMMANDS = {
    "train": (train, "pretrain a model on text, or continue with one"),
    "generate": (generate, "continue a prompt"),
    "evaluate": (evaluate, "perplexity of a text of any length, by position"),
    "info": (info, "versions, devices, scan backends, a model's size"),
}

HELP = """\
usage: hf-recurrent COMMAND [--flags]

Linear-recurrent sequence models for Hugging Face Transformers.

commands:
{commands}

`hf-recurrent COMMAND --help` explains a command. Everywhere:
  --debug    show the traceback of an error (so does HF_RECURRENT_DEBUG=1)
  --version  print the version

examples:
  hf-recurrent train
  hf-recurrent generate --model runs/mingru --prompt "def "
  hf-recurrent info
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: what follows the program's name; by default the process's own arguments.

    Returns:
        The exit status: 0; 2 for what the user can put right, said in one line; 130 after Ctrl-C, and where SIGTERM has
        made a run save and stop. Other exceptions are faults of this program and pass through.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("HF_RECURRENT_DEBUG", "0") not in ("", "0")
    if "--debug" in argv:
        argv.remove("--debug")
        debug = True
    if hasattr(sys.stdout, "reconfigure"):  # not where a program has put something else in its place
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack the characters of a model's text
    with warnings.catch_warnings(), _orderly_termination():
        warnings.showwarning = _show_warning
        try:
            return _run(argv)
        except KeyboardInterrupt:
            print("hf-recurrent: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader has gone, as in `hf-recurrent info | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (ValueError, OSError, ImportError, FloatingPointError, MemoryError, RuntimeError) as error:
            if debug:
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            print(f"hf-recurrent: error: {message}", file=sys.stderr)
            return 2


@contextlib.contextmanager
def _orderly_termination() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what is half-written is cleared away as it is after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in COMMANDS.items())
        print(HELP.format(commands=commands), end="")
        return 0
    if argv[0] == "--version":
        print(f"hf-recurrent {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        kind = "flag" if argv[0].startswith("-") else "command"
        raise CommandLineError(f"unknown {kind} {argv[0]}{nearest(argv[0], COMMANDS)}")
    return COMMANDS[argv[0]][0](argv[1:])


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    text = " ".join(str(message).split())
    print(f"hf-recurrent: warning: {text}", file=sys.stderr)
