"""Fine-tune a model on files of text with LoRA (arXiv 2106.09685): small adapters are trained, the model stays.

The adapters are saved alone, and merged into the model's weights beside them.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_recurrent  # noqa: F401  (registers the models)

EPILOG = """\
examples:
  python examples/finetune_lora.py runs/demo --data notes.txt
  python examples/finetune_lora.py runs/demo --data notes.txt --rank 16 --steps 1000 --output runs/notes
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="DIR", help="folder of a language model, or its name on the Hub")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="files of text")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (%(default)s)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/lora"), help="folder (%(default)s)")
    args = parser.parse_args()

    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        parser.error(f"{error}: pip install '.[examples]'")
    try:
        text = "\n".join(file.read_text(encoding="utf-8") for file in args.data)
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    if len(tokens) <= args.sequence_length:
        parser.error(f"--data: {len(tokens)} tokens, less than a row of {args.sequence_length}")

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    model.print_trainable_parameters()

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(tokens) - args.sequence_length, (args.batch_size,))
        rows = torch.stack([tokens[start : start + args.sequence_length] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}: loss {loss.item():.3f}")

    model.save_pretrained(args.output / "adapters")  # PeftModel.from_pretrained(model, folder) reads them
    merged = model.merge_and_unload()
    for part in (merged, tokenizer):
        part.save_pretrained(args.output / "merged")
    print(f"the adapters are saved in {args.output / 'adapters'}, the merged model in {args.output / 'merged'}")


if __name__ == "__main__":
    main()
