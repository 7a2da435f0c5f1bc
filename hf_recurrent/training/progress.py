"""Progress bars."""

import sys

from tqdm.auto import tqdm


def progress_bar(*args, **options) -> tqdm:
    """One of tqdm's. Where nobody watches, in a log, it says something every ten seconds at most."""
    return tqdm(*args, mininterval=0.1 if sys.stderr.isatty() else 10, **options)
