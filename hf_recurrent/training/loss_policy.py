"""What a run does about a loss that is not finite, or that leaps: stop before the weights are changed, skip the step,
or go on."""

import math
import statistics
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..messages import counted
from .arguments import TrainArguments

WINDOW = 128  # steps whose losses a spike is told by
FEWEST = 32  # of them, before anything is called a spike
# A median absolute deviation of normally distributed losses is their standard deviation divided by this.
NORMAL = 1.4826
# Losses that hardly vary make no spike of a small rise: the deviation counts as at least this share of the median.
LEAST_DEVIATION = 0.01


@dataclass
class Verdict:
    """About one step, the same in all processes.

    Args:
        loss: of the whole step, nats per target token.
        finite: whether the loss and the gradient are.
        fault: what is wrong with the step, in words; None where nothing is.
        action: "update", or "skip" or "stop", which leave the weights as they are.
    """

    loss: float
    finite: bool
    fault: str | None
    action: str


def spike(losses: list[float], loss: float) -> float:
    """By how many robust standard deviations a loss lies above the median of the losses before it; 0 where they are too
    few to tell."""
    if len(losses) < FEWEST:
        return 0.0
    median = statistics.median(losses)
    deviation = NORMAL * statistics.median(abs(one - median) for one in losses)
    return (loss - median) / max(deviation, LEAST_DEVIATION * abs(median), 1e-12)


class LossPolicy:
    """Judges each step between its gradients and its update.

    Args:
        state: of the run; its `recent_losses`, `skipped` and `skipped_in_row` are kept here, and saved with it, so that
            a resumed run judges alike.

    Raises:
        ValueError: skipping is asked for, and DeepSpeed makes the update itself.
    """

    def __init__(self, args: TrainArguments, accelerator: Accelerator, model: nn.Module, state):
        self.args, self.accelerator, self.model, self.state = args, accelerator, model, state
        skips = "skip" in (args.on_bad_loss, args.on_loss_spike)
        if skips and accelerator.distributed_type == "DEEPSPEED":
            name = "--on-bad-loss" if args.on_bad_loss == "skip" else "--on-loss-spike"
            raise ValueError(f"{name} skip: under DeepSpeed the gradients and the update are one call")
        # What a forward pass leaves in the model besides gradients (running statistics) is not to stay either.
        self._undoes = skips or args.on_loss_spike == "stop"
        self._before: list[Tensor] = []

    def _buffers(self) -> list[Tensor]:
        """Those of now: a model that is moved to another device gets new ones."""
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()] if self._undoes else []

    def before_step(self) -> None:
        self._before = [buffer.clone() for buffer in self._buffers()]

    def judge(self, loss: Tensor, norm: Tensor | float | None) -> Verdict:
        """
        Args:
            loss: this process's part of the step's, 0-dim.
            norm: of the gradient over all processes; None where it is not known.
        """
        # With loss scaling, gradients beyond float16's range are common, and the scaler skips their updates itself.
        unknown = norm is None or self.accelerator.scaler is not None
        broken = torch.zeros_like(loss) if unknown else (~torch.isfinite(torch.as_tensor(norm))).to(loss)
        value, broken = self.accelerator.reduce(torch.stack([loss, broken]), "sum").tolist()
        fault, action, finite = None, "update", math.isfinite(value) and not broken
        if not finite:
            what = "gradient" if math.isfinite(value) else "loss"
            fault = f"the {what} is {float(norm) if what == 'gradient' else value}"
            action = self.args.on_bad_loss
        elif (threshold := self.args.loss_spike_threshold) > 0:
            height = spike(self.state.recent_losses, value)
            if height > threshold:
                fault = f"the loss is {value:.4g}, {height:.1f} deviations above the latest ones"
                action = {"log": "update"}.get(self.args.on_loss_spike, self.args.on_loss_spike)
        if action == "update":
            self.state.recent_losses = [*self.state.recent_losses, value][-WINDOW:]
            self.state.skipped_in_row = 0
        elif action == "skip" and self.state.skipped_in_row + 1 >= self.args.max_skipped_steps:
            fault += f"; {counted(self.args.max_skipped_steps, 'step')} skipped in a row"
            action, self.state.skipped_in_row = "stop", 0  # whoever resumes it does so knowingly
        elif action == "skip":
            self.state.skipped += 1
            self.state.skipped_in_row += 1
        return Verdict(value, finite, fault, action)

    @torch.no_grad()
    def undo(self) -> None:
        """Leave the model as it was before the step."""
        for buffer, before in zip(self._buffers(), self._before, strict=True):
            buffer.copy_(before)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # it expects an update for each step that it has scaled
