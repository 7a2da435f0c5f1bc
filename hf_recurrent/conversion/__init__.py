"""Checkpoints of the papers' own codes, to ours and back: one module per source, each a table of renames and the
functions that split and merge tensors, read in both directions."""

from .convert import DTYPES, FORMATS, Report, convert

__all__ = ["DTYPES", "FORMATS", "Report", "convert"]
