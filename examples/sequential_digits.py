"""Train S5 to tell handwritten digits that it reads one pixel at a time, row by row or in a mixed order (sequential and
permuted MNIST, arXiv 2208.04933).

The model is the preset "s5-smnist" (4 layers, H 96, P 128), the optimiser the paper's: AdamW with a learning rate of
its own and no weight decay for the state matrix, its input matrix and the steps; a linear warm-up over the
first epoch, then half a cosine.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from hf_recurrent import S5Config, S5ForSequenceClassification
from hf_recurrent.tasks.digits import digits, mixed, read_idx

EPILOG = """\
examples:
  python examples/sequential_digits.py --data mnist
  python examples/sequential_digits.py --data mnist --permutation-seed 0
  python examples/sequential_digits.py --data mnist --epochs 2 --layers 2 --output runs/digits
"""


def load(folder: Path, permutation_seed: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels in [0, 1], (digits, 784, 1), and labels, (digits,), in a random order that is the same every time: in the
    file's the last fifth is easier than the rest."""
    images, classes = (read_idx(folder / f"t10k-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    order = mixed(len(images))
    made = digits(images[order], classes[order], permutation_seed)
    return torch.from_numpy(made["input_features"]), torch.from_numpy(made["labels"])


@torch.no_grad()
def accuracy(model, images: torch.Tensor, labels: torch.Tensor, batch_size: int) -> float:
    """Share of `images` whose class the model names."""
    model.eval()
    batches = zip(images.split(batch_size), labels.split(batch_size), strict=True)
    right = sum((model(input_features=x).logits.argmax(-1) == y).sum().item() for x, y in batches)
    return right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with t10k-{images,labels}-idx*-ubyte.gz")
    parser.add_argument("--permutation-seed", type=int, help="read the pixels in a random order, the same for all")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--train-digits", type=int, default=8000, help="of the 10,000; the others test (%(default)s)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=8e-3)
    parser.add_argument("--ssm-learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--max-steps", type=int, default=None, help="stop after so many, whatever the epochs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="folder to save the model in")
    args = parser.parse_args()
    for name in ("epochs", "train_digits", "layers", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.batch_size > args.train_digits:
        parser.error(f"--batch-size must be at most --train-digits, {args.train_digits}, got {args.batch_size}")
    if args.max_steps is not None and args.max_steps < 1:
        parser.error(f"--max-steps must be at least 1, got {args.max_steps}")
    for name in ("learning_rate", "ssm_learning_rate"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be a number above 0, got {getattr(args, name)}")
    if not 0 <= args.weight_decay < math.inf:
        parser.error(f"--weight-decay must be a number of at least 0, got {args.weight_decay}")
    if args.permutation_seed is not None and args.permutation_seed < 0:
        parser.error(f"--permutation-seed must be at least 0, got {args.permutation_seed}")
    try:
        images, labels = load(args.data, args.permutation_seed)
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    if args.output is not None:
        try:
            args.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output: {error}")
    if not 0 < args.train_digits < len(labels):
        parser.error(f"--train-digits must be below {len(labels)}, got {args.train_digits}")

    torch.manual_seed(args.seed)
    images, labels = images.to(args.device), labels.to(args.device)
    test = images[args.train_digits :], labels[args.train_digits :]
    model = S5ForSequenceClassification(S5Config.from_preset("s5-smnist", num_hidden_layers=args.layers))
    model.to(args.device)
    groups = model.parameter_groups(args.learning_rate, args.weight_decay, recurrence_lr=args.ssm_learning_rate)
    optimizer = torch.optim.AdamW(groups)
    epoch_steps = args.train_digits // args.batch_size
    steps = min(args.epochs * epoch_steps, args.max_steps or math.inf)

    def ratio(step: int) -> float:
        warmup = min(epoch_steps, steps)
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, ratio)
    started = time.perf_counter()
    with tqdm(total=steps, unit="step") as progress:
        while progress.n < steps:
            model.train()
            order = torch.randperm(args.train_digits, device=args.device)
            for chosen in order[: epoch_steps * args.batch_size].split(args.batch_size)[: steps - progress.n]:
                loss = model(input_features=images[chosen], labels=labels[chosen]).loss
                if not loss.isfinite():
                    sys.exit(f"sequential_digits.py: error: the loss is {loss.item()}: try a smaller --learning-rate")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                progress.update()
            share = accuracy(model, *test, args.batch_size)
            minutes = (time.perf_counter() - started) / 60
            progress.write(f"step {progress.n}: test accuracy {share:.2%} ({len(test[1])} digits), {minutes:.1f} min")
    if args.output is not None:
        model.save_pretrained(args.output)


if __name__ == "__main__":
    main()
