"""lm-eval's own command line, with the model `hf_recurrent`: python -m hf_recurrent.evaluation --model hf_recurrent ..."""

from lm_eval.__main__ import cli_evaluate

from . import lm  # noqa: F401  (registers it)

if __name__ == "__main__":
    cli_evaluate()
