"""Checkpoints of the papers' own codes, to ours and back: one module per source, each a table of renames and the
functions that split and merge tensors. No source is covered yet."""
