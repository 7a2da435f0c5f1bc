"""Convert a paper's own checkpoint, look at what it computes, and push it to the Hugging Face Hub.

`hf-recurrent convert` and `hf-recurrent push` do the same from the command line.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from hf_recurrent.conversion import convert
from hf_recurrent.hub.push import push_folder

EPILOG = """\
examples:
  python examples/convert_and_push.py minlm.pt models/mingru --tokenizer bytes
  python examples/convert_and_push.py longhorn-130m models/longhorn --tokenizer gpt-neox-20b --push me/longhorn
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="SOURCE", help="file or folder of a language model's checkpoint")
    parser.add_argument("folder", metavar="DIR", help="folder to write; an existing one is refused")
    parser.add_argument("--tokenizer", help="'bytes', or a folder or name on the Hub")
    parser.add_argument("--push", metavar="USER/REPO", help="where to push it; the token is that of `hf auth login`")
    parser.add_argument("--license", help="for the model's card")
    args = parser.parse_args()

    # The format is found by the tensors' names. What the checkpoint does not say is asked for, never guessed.
    try:
        report = convert(args.checkpoint, args.folder, tokenizer=args.tokenizer)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{report.format} to {report.model_class}, {report.parameters:,} parameters in {report.dtype}")

    model = AutoModelForCausalLM.from_pretrained(args.folder).eval()
    ids = torch.arange(8)[None] % model.config.vocab_size
    with torch.no_grad():
        logits = model(ids).logits
    print(f"after ids 0 to 7 it expects id {logits[0, -1].argmax()}")

    if args.push is not None:
        print(push_folder(args.folder, args.push, license=args.license))


if __name__ == "__main__":
    main()
