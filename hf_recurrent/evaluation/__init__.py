"""Evaluating language models: perplexity by position, over texts of any length."""

from .perplexity import Perplexity, measure_perplexity

__all__ = ["Perplexity", "measure_perplexity"]
