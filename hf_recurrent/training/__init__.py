"""Pretraining on Accelerate: text to packed rows, AdamW, checkpoints that are whole or not there.

`train` is what `hf-recurrent train` calls; `accelerate launch -m hf_recurrent.training recipe.yaml` runs the same.
"""

from typing import TYPE_CHECKING

from .arguments import DataArguments, ModelArguments, TrainArguments

if TYPE_CHECKING:
    from .loop import train

__all__ = ["DataArguments", "ModelArguments", "TrainArguments", "train"]


def __getattr__(name: str):
    """`train`, without which nothing here imports torch: flags are read before that takes its seconds."""
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .loop import train

    return train
