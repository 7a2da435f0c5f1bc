"""Pretrain by Transformers' Trainer, with the parameter groups of the family's paper.

Documents are packed into rows without padding. `position_ids` begin at 0 in each document: there the model drops its
state, so that none sees into the one before it.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

import hf_recurrent  # noqa: F401  (registers the models)
from hf_recurrent.training.model import families
from hf_recurrent.training.tokenizer import byte_tokenizer

EPILOG = """\
examples:
  python examples/pretrain_with_trainer.py --data books/*.txt
  python examples/pretrain_with_trainer.py --data notes.txt --model-type s5 --steps 2000 --recurrence-learning-rate 5e-4
"""


def pack(documents: list[list[int]], length: int) -> Dataset:
    """Rows of `length` tokens with their positions in their documents; what is left over at the end is dropped."""
    tokens = torch.tensor([token for document in documents for token in document])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    labels = tokens.masked_fill(positions == 0, -100)  # a document's first token cannot be predicted
    rows = len(tokens) // length
    columns = {"input_ids": tokens, "position_ids": positions, "labels": labels}
    return Dataset.from_dict({name: x[: rows * length].view(rows, length).numpy() for name, x in columns.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="files of text, one document each")
    parser.add_argument("--model-type", choices=list(families()), default="mingru", help="family (%(default)s)")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--recurrence-learning-rate", type=float, help="of S5's SSM and GateLoop's transitions")
    parser.add_argument("--output", type=Path, default=Path("runs/trainer"), help="folder (%(default)s)")
    args = parser.parse_args()

    try:
        texts = [file.read_text(encoding="utf-8") for file in args.data]
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    tokenizer = byte_tokenizer()
    rows = pack([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts], args.sequence_length)
    if not len(rows):
        parser.error(f"--data: less than one row of {args.sequence_length} tokens")
    config = AutoConfig.for_model(
        args.model_type,
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    groups = model.parameter_groups(args.learning_rate, weight_decay=0.1, recurrence_lr=args.recurrence_learning_rate)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(args.output),
            per_device_train_batch_size=args.batch_size,
            max_steps=args.steps,
            warmup_steps=min(100, args.steps // 10),
            lr_scheduler_type="cosine",
            logging_steps=min(20, args.steps),
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=rows,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        optimizers=(torch.optim.AdamW(groups, betas=(0.9, 0.95)), None),  # Trainer makes the schedule
    )
    trainer.train()
    trainer.save_model()
    print(f"the model is saved in {args.output}")


if __name__ == "__main__":
    main()
