"""One step of decoding as a program that needs PyTorch alone, and a loop over it.

    python examples/export_decode_step.py runs/demo step.pt2

The program takes a token and the states, and returns logits and the new states; they have the same size at every step.
`torch.export.load("step.pt2").module()` runs it anywhere, and ahead-of-time compilers take it from there.
"""

import argparse

import torch
from transformers import AutoTokenizer

import hf_recurrent  # noqa: F401  (registers the models)
from hf_recurrent.hub.decode_step import DecodeStep, export_decode_step
from hf_recurrent.training.model import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="DIR", help="folder of a language model, or its name on the Hub")
    parser.add_argument("output", metavar="FILE.pt2", help="file to write")
    parser.add_argument("--prompt", default="def ", help="text to continue greedily (default: %(default)r)")
    parser.add_argument("--max-new-tokens", type=int, default=40, metavar="N", help="tokens (default: %(default)s)")
    args = parser.parse_args()

    model = load_model(args.model, "DIR")
    torch.export.save(export_decode_step(model), args.output)
    step, states = torch.export.load(args.output).module(), DecodeStep(model).initial_states

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompt = tokenizer(args.prompt)["input_ids"]
    text = list(prompt)
    with torch.no_grad():
        for place in range(len(prompt) + args.max_new_tokens - 1):
            logits, states = step(torch.tensor([[text[place]]]), states)
            if place + 1 == len(text):
                text.append(logits[0].argmax().item())
    print(tokenizer.decode(text))
    print(f"\nWritten: {args.output}, with {sum(state.nbytes for state in states):,} bytes of states")


if __name__ == "__main__":
    main()
