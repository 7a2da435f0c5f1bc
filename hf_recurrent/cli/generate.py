"""`hf-recurrent generate`: continue a prompt, or the text whose state a file holds."""

import argparse
import codecs
import hashlib
import json
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

from ..messages import first_line, within_memory
from .parser import LARGEST, CommandLineError, Parser, add_model_flags, check_writable, load_model_and_tokenizer, number

PREFILL_TOKENS = 4096  # of a long prompt, read at once
CONTEXT_TOKENS = 8  # of a text, that are decoded with what goes on after it: characters may begin in them
SAMPLED = 64  # numbers of each weight, by which a state file knows its model
PIECE = 1 << 16  # characters of standard input after which what has come is tokenised and read


def _temperature(text: str) -> float:
    value = float(text)
    # Logits over less than this leave float32's range.
    if value != 0 and not 1e-30 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"must be 0 or between 1e-30 and {LARGEST}, got {text}")
    return value


_temperature.__name__ = "float"  # argparse names it, as above


def _parser() -> Parser:
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
  tail -n +1 -f log --pid $! | hf-recurrent generate --model runs/log --prompt - --stream --state-out log.state
""",
    )
    add = parser.add_argument
    add_model_flags(parser, "generate")
    add(
        "--prompt",
        metavar="TEXT",
        help="text to continue, in which special tokens may be written, <|endoftext|> say; - follows standard input to "
        "its end, of any length, and prints it as it is read (there they are the characters they are, as in training)",
    )
    add(
        "--state-in",
        metavar="FILE",
        help="go on after the text whose state this file holds; a prompt is then what comes next, if anything",
    )
    add("--state-out", metavar="FILE", help="write the state after the generated text")
    add("--max-new-tokens", type=number(int, 1), default=200, metavar="N", help="tokens to generate at most")
    add(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="divides the logits before sampling; 0 takes the likeliest token (default: 0.8, with --num-beams 0)",
    )
    add(
        "--top-p",
        type=number(float, 0, 1),
        default=0.9,
        metavar="P",
        help="sample from the likeliest tokens of mass P; 1 from all",
    )
    add("--top-k", type=number(int, 0), default=0, metavar="K", help="sample from the K likeliest tokens; 0 from all")
    add("--num-beams", type=number(int, 1), default=1, metavar="N", help="beams of a beam search; 1 does without")
    add("--seed", type=number(int, 0, 2**32 - 1), metavar="N", help="seed of the sampling (default: a new one)")
    add("--stream", action="store_true", help="print the tokens as they come")
    return parser


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)
    temperature = (0.8 if args.num_beams == 1 else 0.0) if args.temperature is None else args.temperature
    if args.stream and args.num_beams > 1:
        raise CommandLineError("--stream cannot be combined with --num-beams: beams are known at the end")

    if args.state_out is not None and args.num_beams > 1:
        raise CommandLineError("--state-out cannot be combined with --num-beams: each beam has a state of its own")
    if args.prompt is None and args.state_in is None:
        raise CommandLineError("the following arguments are required: --prompt (or --state-in, to go on from a state)")
    if args.state_out is not None:
        check_writable("--state-out", args.state_out)

    import torch
    from transformers import set_seed

    from ..modeling import RecurrentCache

    model, tokenizer = load_model_and_tokenizer(args)
    cache, unread, context, held = RecurrentCache(model.config), [], [], 0
    if args.state_in is not None:
        cache, unread, context, held = _load_state(args.state_in, model)
    if args.prompt:  # an incomplete character at the end of the text before stays one
        print("\ufffd" * held, end="", flush=True)
        context, held = [], 0
    prompt, special, interrupts = args.prompt or "", args.state_in is None, []
    options = {"name": args.model, "vocab_size": model.config.vocab_size, "split_special": prompt == "-"}
    if prompt == "-":
        prompt = ""
        if sys.stdin is None:
            raise CommandLineError("--prompt -: standard input is closed")
        for piece in _pieces(_standard_input(args.stream, None if args.state_out is None else interrupts)):
            if prompt:  # another one follows: this one is read, but for its last token
                unread += _tokens(tokenizer, prompt, special, **options)
                _read(model, unread[:-1], cache)
                unread, special = unread[-1:], False
                if not args.stream:
                    print(prompt, end="")
            prompt = piece
    ids = _tokens(tokenizer, prompt, special, **options)
    if interrupts:
        if tokens := [*unread, *ids]:  # else there is no state yet
            _read(model, tokens[:-1], cache)
            _save_state(args.state_out, model, cache, tokens[-1:], context + ids, 0)
        raise interrupts[0]
    if not unread and not tokenizer(prompt, add_special_tokens=False)["input_ids"]:
        given = "-: standard input" if args.prompt == "-" else f"{prompt!r}"
        raise CommandLineError(f"--prompt {given} tokenises to nothing: give at least one character")
    if args.stream and args.prompt not in (None, "-"):
        print(prompt, end="", flush=True)
    if args.seed is not None:
        set_seed(args.seed)
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": args.top_p, "top_k": args.top_k}
    # `generate` wants a token for each that the cache has seen, and then leaves them out. One stands for all of them.
    before = max(0, cache.seen_tokens - 1)
    cache.seen_tokens -= before
    seen = cache.seen_tokens
    inputs = torch.tensor([[0] * seen + unread + ids], device=model.device)
    streamer = _streamer(tokenizer, context, held, holds=args.state_out is not None) if args.stream else None
    with torch.inference_mode(), within_memory("try fewer --num-beams or a smaller model"):
        cache.batch_repeat_interleave(args.num_beams)  # what has been read, for each beam
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
    context, known = context + output[seen + len(unread) :], len(_text(tokenizer, context)) - held
    text = _text(tokenizer, context)
    held = _incomplete(text) if args.state_out is not None else 0
    if not args.stream:
        print(text[known : len(text) - held])
    if args.state_out is not None:
        new = output[cache.seen_tokens :]
        cache.seen_tokens += before
        _save_state(args.state_out, model, cache, new, context, held)
    return 0


def _save_state(name: str, model, cache, unread: list[int], context: list[int], held: int) -> None:
    """What `_load_state` reads."""
    tail = {"unread": unread, "context": context[-CONTEXT_TOKENS:], "held": held, "weights": _weights(model)}
    cache.save(name, {name: json.dumps(value) for name, value in tail.items()})


def _weights(model) -> str:
    """By which a model's weights are told from others of the same shapes: a hash of some of each."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        some = weight.flatten()[:: max(1, weight.numel() // SAMPLED)][:SAMPLED]
        digest.update(f"{name} {some.tolist()}".encode())
    return digest.hexdigest()[:16]


def _text(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def _incomplete(text: str) -> int:
    """Characters at its end that may be the beginning of one whose other bytes come with the next tokens: three at
    most, for decoders that show each byte as one."""
    return min(3, len(text) - len(text.rstrip("\ufffd")))


def _streamer(tokenizer, context: list[int], held: int, holds: bool):
    """Prints what is generated after `context`, of which the last `held` characters are not printed yet. An incomplete
    character at the end is left to the process that goes on, where it `holds`."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def end(self):
            text = _text(tokenizer, self.token_cache)
            end = len(text) - _incomplete(text) if holds else len(text)
            self.on_finalized_text(text[self.print_len : end], stream_end=True)

    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    streamer.token_cache, streamer.print_len = list(context), len(_text(tokenizer, context)) - held
    return streamer


class _Waiting:
    """Reads standard input. Ctrl-C and SIGTERM are raised where it is waited for; what else goes on is done first,
    unless they come a second time: a state is of whole pieces of a text."""

    def __init__(self):
        self.waits, self.came = False, None

    def __enter__(self) -> "_Waiting":
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        heard = [signum for signum in numbers if signal.getsignal(signum) is not signal.SIG_IGN]
        self.before = {signum: signal.signal(signum, self._interrupted) for signum in heard}
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self.before.items():
            signal.signal(signum, handler)

    def _interrupted(self, signum: int, frame) -> None:
        again = self.came is not None
        self.came = KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)
        if self.waits or again:
            raise self.came

    def read(self) -> bytes:
        self.waits = True
        try:
            if self.came is not None:
                raise self.came
            return sys.stdin.buffer.read1(PIECE)
        finally:
            self.waits = False


def _standard_input(echo: bool, interrupts: list[BaseException] | None = None) -> Iterator[str]:
    """Its text, as it comes; printed on the way where `echo` is set. Where a list of `interrupts` is given, Ctrl-C or
    SIGTERM ends the text, an incomplete character at its end left out, and is noted there.

    Raises:
        CommandLineError: it is not UTF-8.
    """
    if interrupts is None:
        yield from _decoded(lambda: sys.stdin.buffer.read1(PIECE), echo)
        return
    with _Waiting() as waiting:
        try:
            yield from _decoded(waiting.read, echo)
            if waiting.came is not None:  # while the last piece was read
                raise waiting.came
        except (KeyboardInterrupt, SystemExit) as interrupt:
            interrupts.append(interrupt)


def _decoded(read: Callable[[], bytes], echo: bool) -> Iterator[str]:
    decoder, place = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        data = read()
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            byte = place - pending + error.start
            raise CommandLineError(f"--prompt -: standard input is not UTF-8 text (byte {byte})") from None
        place += len(data)
        if echo:
            print(text, end="", flush=True)
        yield text
        if not data:
            return


def _pieces(texts: Iterator[str]) -> Iterator[str]:
    """The text in pieces of about PIECE characters, cut where a line ends, before its white space: a place that is
    hardly ever inside a token. A longer line is cut at a space, or anywhere."""
    rest = ""
    for text in texts:
        rest += text
        while len(rest) > PIECE:
            # A match is tried only where white space begins, or a long run of it would be read over and over.
            cut = _last(r"(?<!\s)\s*\n", rest[:PIECE]) or _last(r"\s+", rest[:PIECE]) or PIECE
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _last(pattern: str, text: str) -> int:
    """Where the last match begins, 0 where there is none."""
    return max((match.start() for match in re.finditer(pattern, text)), default=0)


def _tokens(tokenizer, text: str, special: bool, name: str, vocab_size: int, split_special: bool) -> list[int]:
    """The ids of a text, `special` ones around it included; those written in it are characters with `split_special`.

    Raises:
        ValueError: one is outside the model's vocabulary.
    """
    ids = tokenizer(text, add_special_tokens=special, split_special_tokens=split_special)["input_ids"]
    if ids and (largest := max(ids)) >= vocab_size:
        raise ValueError(
            f"--model {name}: its tokenizer does not fit: token id {largest} is outside the model's vocabulary "
            f"of {vocab_size}"
        )
    return ids


def _read(model, ids: list[int], cache) -> None:
    """Tokens into the cache, PREFILL_TOKENS at a time."""
    import torch

    with torch.inference_mode():
        for start in range(0, len(ids), PREFILL_TOKENS):
            piece = torch.tensor([ids[start : start + PREFILL_TOKENS]], device=model.device)
            model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _load_state(name: str, model) -> tuple:
    """What --state-out wrote into a file: the cache, the tokens generated last that it has not read, the last tokens of
    the text, and how many characters at their end are not printed. Warns where it is of a model with other weights."""
    from safetensors import safe_open

    from ..modeling import RecurrentCache

    config = model.config
    try:
        cache = RecurrentCache.load(name, config, model.device)
        with safe_open(name, "pt") as file:
            metadata = file.metadata() or {}
        unread, context = (json.loads(metadata.get(key, "[]")) for key in ("unread", "context"))
        held = json.loads(metadata.get("held", "0"))
        if cache.batch_size > 1:
            raise ValueError(f"holds the states of {cache.batch_size} texts, expected 1")
        for tokens in (unread, context):
            if not isinstance(tokens, list) or not all(
                type(token) is int and 0 <= token < config.vocab_size for token in tokens
            ):
                raise ValueError("is a damaged state file: its unread tokens are not token ids")
        if held not in (0, 1, 2, 3):
            raise ValueError(f"is a damaged state file: it holds {held} characters back")
        if json.loads(metadata.get("weights", "null")) not in (None, _weights(model)):
            warnings.warn(
                f"--state-in {name}: holds the state of a model with other weights than --model's, which may not make "
                "sense of it",
                stacklevel=2,
            )
    except (OSError, ValueError) as error:
        raise CommandLineError(f"--state-in {name}: {first_line(error)}") from None
    return cache, unread, context, held
