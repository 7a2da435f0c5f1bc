"""`accelerate launch -m hf_recurrent.training recipe.yaml --flags`: `hf-recurrent train` in each process."""

import sys

from ..cli import main

sys.exit(main(["train", *sys.argv[1:]]))
