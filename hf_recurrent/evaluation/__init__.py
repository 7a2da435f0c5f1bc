"""Evaluating language models: perplexity by position, over texts of any length; and lm-eval's tasks.

`lm`, `harness` and `tables` are for lm-eval, and want it installed.
"""

from .perplexity import Perplexity, measure_perplexity

__all__ = ["Perplexity", "measure_perplexity"]
