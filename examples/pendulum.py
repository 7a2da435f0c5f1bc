"""Train S5 to follow a pendulum through noisy pictures at irregular times (arXiv 2208.04933, section 6.3).

The model is the paper's: a small convolutional encoder for each picture, which CRU has too (arXiv 2111.11344), S5 of 4
layers (H 30, P 16) that is told the time between pictures, and two decoders of two layers: of the sine and the cosine
of the angle, and of how sure they are. As in the authors' code it learns from the likelihood of a normal distribution,
so that pictures with nothing but noise in them count for little, and what is reported is the mean squared error. The
pictures are those of `hf_recurrent.tasks.TASKS["pendulum"]`, from a seed.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from hf_recurrent import S5Config, S5Model
from hf_recurrent.tasks import generate

EPILOG = """\
examples:
  python examples/pendulum.py
  python examples/pendulum.py --epochs 20 --train 500 --output runs/pendulum
"""
SIZE = 24  # of a picture, in pixels
INTERVAL = 0.01  # seconds: the unit of time that S5's steps are given in


class PendulumModel(nn.Module):
    """Pictures and the times between them to sines and cosines."""

    def __init__(self):
        super().__init__()
        # The features of the pictures go to the first block as they are.
        config = S5Config.from_preset("s5-pendulum", input_size=30, input_projection=False)
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 12, kernel_size=5, padding=2), nn.MaxPool2d(2), nn.ReLU(),  # 24 x 24 to 12 x 12
            nn.Conv2d(12, 12, kernel_size=3, stride=2, padding=1), nn.MaxPool2d(2), nn.ReLU(),  # 6 x 6 to 3 x 3
            nn.Flatten(), nn.Linear(12 * 3 * 3, 30), nn.ReLU(), nn.Linear(30, 30),
        )  # fmt: skip
        self.backbone = S5Model(config)
        self.mean = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
        self.spread = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
        for part in (self.encoder, self.mean, self.spread):
            for module in part:
                if isinstance(module, nn.Linear | nn.Conv2d):  # as flax does
                    nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                    nn.init.zeros_(module.bias)

    def forward(self, pictures: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """pictures (B, L, SIZE²) in [0, 1], timesteps (B, L) in seconds -> mean and variance, (B, L, 2) each."""
        frames = pictures.reshape(-1, 1, SIZE, SIZE).contiguous(memory_format=torch.channels_last)
        # On a CPU, a few at a time stay in its cache: four times as fast as all of them as PyTorch has them by default.
        parts = frames.split(100) if frames.device.type == "cpu" else [frames]
        features = torch.cat([self.encoder(part) for part in parts]).unflatten(0, pictures.shape[:2])
        outputs = self.backbone(input_features=features, timesteps=timesteps / INTERVAL, use_cache=False)
        states = outputs.last_hidden_state
        return self.mean(states), F.elu(self.spread(states)) + 1

    def parameter_groups(self, lr: float, ssm_lr: float) -> list[dict]:
        rest = [p for part in (self.encoder, self.mean, self.spread) for p in part.parameters()]
        return [*self.backbone.parameter_groups(lr, recurrence_lr=ssm_lr), {"params": rest, "lr": lr}]


def tensors(examples: dict[str, np.ndarray], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures, timesteps and labels."""
    return tuple(torch.from_numpy(examples[name]).to(device) for name in ("input_features", "timesteps", "labels"))


@torch.no_grad()
def squared_errors(model: PendulumModel, pictures: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
    """The mean squared error of each sequence, (B,)."""
    model.eval()
    batches = zip(pictures.split(100), timesteps.split(100), labels.split(100), strict=True)
    return torch.cat([(model(x, dt)[0] - y).square().mean(dim=(1, 2)) for x, dt, y in batches])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train", type=int, default=2000, help="sequences to train on (default: the paper's %(default)s)")
    add("--test", type=int, default=1000, help="others to measure on after each epoch (default: %(default)s)")
    add(
        "--final-test",
        type=int,
        default=7000,
        help="and in the end: one in a hundred has a third of the error, and a mean needs many (default: %(default)s)",
    )
    add("--epochs", type=int, default=100, help="passes over them (default: the paper's %(default)s)")
    add("--batch-size", type=int, default=32, help="sequences of a step (default: the paper's %(default)s)")
    add("--learning-rate", type=float, default=0.012, help="highest (default: the paper's %(default)s)")
    add("--ssm-learning-rate", type=float, default=0.003, help="of the SSM (default: the paper's %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0, help="of weights and examples")
    add("--output", type=Path, default=None, help="folder to save the model in")
    args = parser.parse_args()
    for name in ("train", "test", "final_test", "epochs", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("learning_rate", "ssm_learning_rate"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be a number above 0, got {getattr(args, name)}")
    if args.output is not None:
        try:
            args.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output {args.output}: {error.strerror}")

    train = tensors(generate("pendulum", args.train, args.seed), args.device)
    test = tensors(generate("pendulum", args.test, args.seed, "test"), args.device)
    torch.manual_seed(args.seed)
    model = PendulumModel().to(args.device)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameter_groups(args.learning_rate, args.ssm_learning_rate), weight_decay=0.0)
    epoch_steps = math.ceil(args.train / args.batch_size)
    steps = args.epochs * epoch_steps

    def ratio(step: int) -> float:
        """A linear warm-up over the first epoch, then half a cosine."""
        if step < epoch_steps:
            return (step + 1) / epoch_steps
        return 0.5 * (1 + math.cos(math.pi * (step - epoch_steps) / max(steps - epoch_steps, 1)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, ratio)
    started = time.perf_counter()
    with tqdm(total=steps, unit="step", disable=None) as bar:
        for epoch in range(1, args.epochs + 1):
            model.train()
            total = torch.zeros(2)
            for chosen in torch.randperm(args.train).split(args.batch_size):
                pictures, timesteps, labels = (array[chosen] for array in train)
                mean, variance = model(pictures, timesteps)
                loss = F.gaussian_nll_loss(mean, labels, variance, eps=1e-6)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += len(chosen) / args.train * torch.stack([loss, F.mse_loss(mean, labels)]).detach().cpu()
                bar.update()
            error, minutes = squared_errors(model, *test).mean(), (time.perf_counter() - started) / 60
            loss, train_error = total.tolist()
            if not math.isfinite(loss):
                sys.exit(f"pendulum.py: error: the loss is {loss} in epoch {epoch}: try a smaller --learning-rate")
            bar.write(
                f"epoch {epoch}: loss {loss:.4f}, mean squared error {train_error:.5f} in training, {error:.5f} in the "
                f"test, {minutes:.1f} min"
            )
    errors = squared_errors(model, *tensors(generate("pendulum", args.final_test, args.seed, "test"), args.device))
    uncertainty = errors.std(correction=0) / math.sqrt(len(errors))
    print(
        f"{len(errors):,} others: mean {errors.mean():.5f}, its standard error {uncertainty:.5f}, "
        f"median {errors.median():.5f}"
    )
    if args.output is not None:
        save_file(model.state_dict(), args.output / "model.safetensors")
        model.backbone.config.save_pretrained(args.output)


if __name__ == "__main__":
    main()
