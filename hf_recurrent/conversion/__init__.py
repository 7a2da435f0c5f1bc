"""Checkpoints of the papers' own codes, to ours and back: one module per source, each a table of renames and the
functions that split and merge tensors, read in both directions."""

from .common import DTYPES, Report
from .convert import convert
from .formats import FORMATS

__all__ = ["DTYPES", "FORMATS", "Report", "convert"]
