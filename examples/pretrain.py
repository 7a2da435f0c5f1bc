"""Pretrain a language model on files of text, and let it write.

What `hf-recurrent train` does, from Python: the same settings by the same names, the same folder in the end.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_recurrent.training import DataArguments, ModelArguments, TrainArguments, train
from hf_recurrent.training.model import families
from hf_recurrent.training.sources import expand

EPILOG = """\
examples:
  python examples/pretrain.py --data 'books/*.txt'
  python examples/pretrain.py --data notes.txt --model-type longhorn --minutes 30 --output runs/notes
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", required=True, help="files or globs: text, .jsonl, .parquet, .csv")
    parser.add_argument("--model-type", choices=list(families()), default="mingru", help="family (%(default)s)")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokenizer", default="bytes", help="'bytes', 'bpe', or a folder or name (%(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training (%(default)s)")
    parser.add_argument("--prompt", default="The ", help="what the model goes on from in the end (%(default)r)")
    parser.add_argument("--output", default="runs/pretrained", help="folder (%(default)s)")
    args = parser.parse_args()
    try:
        expand(args.data, "--data")
    except FileNotFoundError as error:
        parser.error(str(error))

    train(
        ModelArguments(
            model_type=args.model_type, hidden_size=args.hidden_size, num_hidden_layers=args.layers, hidden_dropout=0.1
        ),
        DataArguments(data_files=args.data, tokenizer=args.tokenizer, sequence_length=256),
        # A second call goes on from the newest checkpoint, if the first was interrupted.
        TrainArguments(output_dir=args.output, max_minutes=args.minutes, batch_size=16, resume="auto"),
    )

    model = AutoModelForCausalLM.from_pretrained(args.output).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.output)
    torch.manual_seed(0)
    tokens = model.generate(
        **tokenizer(args.prompt, return_tensors="pt"), max_new_tokens=100, do_sample=True, temperature=0.8
    )
    print(tokenizer.decode(tokens[0]))


if __name__ == "__main__":
    main()
