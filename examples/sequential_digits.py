"""Train S5 to tell handwritten digits that it reads one pixel at a time (sequential MNIST, arXiv 2208.04933).

The model is the preset "s5-smnist" (4 layers, H 96, P 128), the optimiser the paper's: AdamW with a learning rate of
its own and no weight decay for the state matrix, its input matrix and the steps; a linear warm-up over the
first epoch, then half a cosine.
"""

import argparse
import gzip
import math
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from hf_recurrent import S5Config, S5ForSequenceClassification

EPILOG = """\
examples:
  python examples/sequential_digits.py --data mnist
  python examples/sequential_digits.py --data mnist --epochs 2 --layers 2 --output runs/digits
"""


def read_idx(path: Path) -> torch.Tensor:
    """The array in a gzipped file of MNIST's format: 4 bytes, the last the number of dimensions; the sizes; values."""
    data = gzip.open(path).read()
    sizes = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return torch.tensor(np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes))


def load(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels in [0, 1], (digits, 784, 1), and labels, (digits,)."""
    images = read_idx(folder / "t10k-images-idx3-ubyte.gz").float().flatten(1)[..., None] / 255
    return images, read_idx(folder / "t10k-labels-idx1-ubyte.gz").long()


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
    try:
        images, labels = load(args.data)
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
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
