"""lm-eval's own command line, which knows the model `hf_recurrent` when it is started from here:

python -m hf_recurrent.evaluation --model hf_recurrent --model_args pretrained=runs/books --tasks piqa
"""

from lm_eval.__main__ import cli_evaluate

from . import lm  # noqa: F401  (registers it)

if __name__ == "__main__":
    cli_evaluate()
