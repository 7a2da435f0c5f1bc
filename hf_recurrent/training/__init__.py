"""Pretraining on Accelerate: text to packed rows, AdamW, checkpoints that are whole or not there.

`train` is what `hf-recurrent train` calls; `accelerate launch -m hf_recurrent.training recipe.yaml` runs the same.
"""

from .arguments import DataArguments, ModelArguments, TrainArguments
from .loop import train

__all__ = ["DataArguments", "ModelArguments", "TrainArguments", "train"]
