"""`hf-recurrent generate`: continue a prompt, or the text whose state a file holds."""

import argparse
import json
import sys

from ..messages import first_line, within_memory
from .parser import LARGEST, CommandLineError, Parser, add_model_flags, check_writable, load_model_and_tokenizer, number

PREFILL_TOKENS = 4096  # of a long prompt, read at once


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
""",
    )
    add = parser.add_argument
    add_model_flags(parser, "generate")
    add("--prompt", metavar="TEXT", help="text to continue; - reads it from standard input")
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
    from transformers import TextStreamer, set_seed

    from ..modeling import RecurrentCache

    model, tokenizer = load_model_and_tokenizer(args)
    cache, unread = RecurrentCache(model.config), []
    if args.state_in is not None:
        cache, unread = _load_state(args.state_in, model.config, model.device)
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
    inputs = torch.tensor([[0] * seen + unread + ids], device=model.device)
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


def _load_state(name: str, config, device) -> tuple:
    """The cache in a file that --state-out wrote, and the tokens generated last that it has not read."""
    from safetensors import safe_open

    from ..modeling import RecurrentCache

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
