"""Decode a 12-layer model with the help of a 2-layer assistant that was trained on the same text.

The assistant drafts a few tokens, and the model reads them all in one call, keeps those that it would have written
itself, and takes the others back from its recurrent state. The text is that of greedy decoding, token by token.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_recurrent import FAMILIES
from hf_recurrent.training import DataArguments, ModelArguments, TrainArguments, train

EPILOG = """\
A model that is in the output folder already is taken as it is, and not trained again.

examples:
  python examples/assisted_generation.py --data tinyshakespeare.txt
  python examples/assisted_generation.py --data books.txt --model-type longhorn --minutes 60 --mixed-precision bf16
"""

HELD_OUT = 0.005  # of the text, at its end


def trained(
    folder: Path, layers: int, hidden_size: int, minutes: float, args: argparse.Namespace
) -> AutoModelForCausalLM:
    """The model in `folder`, in evaluation mode; trained on bytes first where there is none."""
    if not (folder / "config.json").is_file():
        train(
            ModelArguments(model_type=args.model_type, hidden_size=hidden_size, num_hidden_layers=layers),
            DataArguments(
                data_files=[str(args.data)],
                tokenizer="bytes",
                sequence_length=args.sequence_length,
                validation_share=HELD_OUT,
            ),
            TrainArguments(
                output_dir=str(folder),
                overwrite=True,
                max_minutes=minutes,
                batch_size=args.batch_size,
                learning_rate=args.learning_rate,
                mixed_precision=args.mixed_precision,
                eval_rows=16,
                save_steps=0,
                seed=args.seed,
            ),
        )
    return AutoModelForCausalLM.from_pretrained(folder).eval()


class Calls:
    """Counts the calls of a model."""

    def __init__(self, model):
        self.number = 0
        model.base_model.register_forward_hook(self._count)

    def _count(self, *_) -> None:
        self.number += 1


def measure(model, assistant, prompts: list[torch.Tensor], new_tokens: int) -> dict[str, float]:
    """Seconds of greedy and of assisted decoding, tokens, and calls of the model.

    Raises:
        AssertionError: the tokens differ.
    """
    result = {"greedy": 0.0, "assisted": 0.0, "tokens": 0, "calls": 0}
    calls = Calls(model)
    options = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": None}
    for prompt in prompts:
        texts = []
        for how, assistance in (("greedy", {}), ("assisted", {"assistant_model": assistant})):
            before, started = calls.number, time.perf_counter()
            texts.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **assistance))
            result[how] += time.perf_counter() - started
            if assistance:
                result["calls"] += calls.number - before
        assert torch.equal(*texts), "assisted decoding gave other tokens than greedy decoding"
        result["tokens"] += texts[0].shape[1] - prompt.shape[1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    families = sorted(config_class.model_type for config_class in FAMILIES)
    parser.add_argument("--data", type=Path, required=True, help="file of text to train on")
    parser.add_argument("--output", type=Path, default=Path("runs/assisted"), help="folder of both models")
    parser.add_argument("--model-type", choices=families, default="mingru")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--assistant-hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12, help="of the model (%(default)s)")
    parser.add_argument("--assistant-layers", type=int, default=2, help="of the assistant (%(default)s)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of training the model (%(default)s)")
    parser.add_argument("--assistant-minutes", type=float, default=10.0, help="of training the assistant (%(default)s)")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no", help="of training (%(default)s)")
    parser.add_argument("--prompts", type=int, default=5, help="places in the text to go on from (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=200, help="to generate from each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in ("prompts", "new_tokens", "layers", "assistant_layers", "hidden_size", "assistant_hidden_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not args.data.is_file():
        parser.error(f"--data: there is no file {args.data}")

    model = trained(args.output / "model", args.layers, args.hidden_size, args.minutes, args)
    assistant = trained(
        args.output / "assistant", args.assistant_layers, args.assistant_hidden_size, args.assistant_minutes, args
    )
    tokenizer = AutoTokenizer.from_pretrained(args.output / "model")
    ids = tokenizer(args.data.read_text(encoding="utf-8"), return_tensors="pt", add_special_tokens=False)["input_ids"]
    # From the end of the text, which is validated on.
    places = torch.linspace((1 - HELD_OUT) * ids.shape[1], ids.shape[1] - 128, args.prompts).long().clamp(min=0)
    prompts = [ids[:, place : place + 128] for place in places]
    measure(model, assistant, prompts[:1], 10)  # compiles kernels, and warms up
    result = measure(model, assistant, prompts, args.new_tokens)
    for name, one in (("model", model), ("assistant", assistant)):
        print(f"{name:10} {one.config.num_hidden_layers} layers, {one.num_parameters():,} parameters")
    for how in ("greedy", "assisted"):
        print(f"{how:10} {1000 * result[how] / result['tokens']:.2f} ms per token")
    print(f"tokens     {result['tokens']:,}, all equal, {result['tokens'] / result['calls']:.2f} per call of the model")
    print(f"assisted decoding takes {result['assisted'] / result['greedy']:.2f} of the time of greedy decoding")


if __name__ == "__main__":
    main()
