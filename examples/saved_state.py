"""Read a long text once, keep the state that it leaves, and go on from it as often as you like.

The state of a recurrent model is small and has the same size after any text. The first call with a text writes it to
a file; every later one reads the file in place of the text. Several continuations share one state by cloning it.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_recurrent import RecurrentCache, stream

EPILOG = """\
examples:
  python examples/saved_state.py runs/demo --prefix manual.txt --state manual.safetensors --prompts "def " "class "
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="DIR", help="folder of a language model, or its name on the Hub")
    parser.add_argument("--prefix", type=Path, required=True, help="file of text that every continuation begins with")
    parser.add_argument("--state", type=Path, required=True, help="file of its state; written if it is not there")
    parser.add_argument("--prompts", nargs="+", required=True, help="what follows the text, for each continuation")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    args = parser.parse_args()

    try:
        text = args.prefix.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(f"--prefix: {error}")

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    prefix = tokenizer(text, return_tensors="pt")["input_ids"]
    digest = hashlib.sha256(prefix.numpy().tobytes()).hexdigest()
    if args.state.is_file():
        try:
            cache = RecurrentCache.load(args.state, model.config)
        except ValueError as error:  # of another model: it says what differs
            parser.error(f"--state: {error}")
        with safe_open(args.state, "pt") as file:
            if file.metadata().get("prefix_sha256") != digest:
                parser.error(f"--state {args.state}: not of the text in --prefix {args.prefix}: name another file")
    else:
        cache = RecurrentCache(model.config)
        for _ in stream(model, prefix[0], cache):  # in chunks, whatever the text's length
            pass
        cache.save(args.state, {"prefix_sha256": digest})
    print(f"{prefix.shape[1]:,} tokens, {cache.nbytes:,} bytes of state in {args.state}")

    for prompt in args.prompts:
        ids = torch.cat([prefix, tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]], dim=1)
        # `generate` sees by the cache's length how much of the text has been read, and reads only the rest.
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache.clone(),
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
        )
        print("-" * 40)
        print(tokenizer.decode(tokens[0, prefix.shape[1] :]))


if __name__ == "__main__":
    main()
