"""The parser of every command, and what the commands share."""

import argparse
import os
import re
import tempfile

from ..messages import nearest

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


def number(kind: type, low: float, high: float = LARGEST, above: bool = False):
    """A type for argparse: a number in [low, high], or `above` low."""

    def convert(text: str):
        value = kind(text)
        if above and value <= low:
            raise argparse.ArgumentTypeError(f"must be above {low}, got {text}")
        if not low <= value <= high:
            between = f"at least {low}" if high == LARGEST and value < low else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"must be {between}, got {text}")
        return value

    convert.__name__ = kind.__name__  # argparse names it: "invalid int value"
    return convert


def in_one_process(what: str, instead: str = "") -> None:
    """
    Raises:
        CommandLineError: a launcher has started several processes of a command that is for one.
    """
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise CommandLineError(f"{what} in one process, got {processes} of a launcher{instead}")


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[KMGT]i?B", text):
        raise argparse.ArgumentTypeError(f"must be a size such as 500MB or 5GB, got {text}")
    return text


def add_shard_size(parser: Parser) -> None:
    """--max-shard-size, of the files that weights are written to."""
    parser.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="larger weights go into several files"
    )


def add_model_flags(parser: Parser, what: str) -> None:
    """--model and --cpu, for `load_model_and_tokenizer`. `what` the command does on the CPU: "generate"."""
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a model, or its name on the Hub")
    parser.add_argument("--cpu", action="store_true", help=f"{what} on the CPU even where there is a GPU")


def load_model_and_tokenizer(args: argparse.Namespace, *, ends: bool = False) -> tuple:
    """The model, in evaluation mode and on the GPU if there is one, and its tokenizer.

    Args:
        ends: whether the tokenizer needs an end-of-sequence token.

    Raises:
        ValueError: there is none, or it cannot be used.
    """
    import torch

    from ..training.model import load_model
    from ..training.tokenizer import load_tokenizer

    no_bars_for_files()
    model = load_model(args.model).eval()
    tokenizer = load_tokenizer(args.model, "--model", ends=ends)
    return model.to("cuda" if torch.cuda.is_available() and not args.cpu else "cpu"), tokenizer


def check_writable(flag: str, name: str) -> None:
    """Refuse a file that cannot be written, before any work is done.

    Raises:
        CommandLineError: its folder is missing or takes no file, or a folder has its name.
    """
    try:
        if os.path.isdir(name):
            raise IsADirectoryError("a folder of that name is there")
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(name))):
            pass
    except OSError as error:
        raise CommandLineError(f"{flag} {name}: cannot be written ({error.strerror or error})") from None


def add_output_folder(parser: Parser, what: str) -> None:
    """--output and --overwrite, for `check_output_folder`."""
    parser.add_argument("--output", metavar="DIR", help=what)
    parser.add_argument("--overwrite", action="store_true", help="replace the results of an earlier evaluation there")


def check_output_folder(args: argparse.Namespace, name: str) -> None:
    """Refuse an --output that cannot take a file of this name, before any work is done. The folder is made.

    Raises:
        CommandLineError: it is no folder, or nothing can be written there; an earlier file without --overwrite.
    """
    path = os.path.join(args.output, name)
    if os.path.isfile(path) and not args.overwrite:
        raise CommandLineError(
            f"--output {args.output}: holds {name} of an earlier evaluation: replace it by --overwrite, or choose "
            "another folder"
        )
    try:
        os.makedirs(args.output, exist_ok=True)
    except OSError as error:
        raise CommandLineError(f"--output {args.output}: cannot be made ({error.strerror})") from None
    check_writable("--output", path)


def no_bars_for_files() -> None:
    """Transformers shows a bar for each model it reads or writes, even for milliseconds."""
    from transformers.utils import logging

    logging.disable_progress_bar()
