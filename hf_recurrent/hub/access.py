"""What is asked for by a name on the Hugging Face Hub: failing soon without a network, and saying why in one line."""

import functools
import os
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from ..messages import first_line

TIMEOUT = 10.0  # seconds
# Each names a folder that is written to even where nothing is downloaded; the last one holds the others by default.
CACHES = ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_HUB_CACHE", "HF_HOME")


@functools.cache
def why_unreachable() -> str | None:
    """Ask once whether the Hub can be reached: why it cannot, or None.

    Where it cannot, the caches alone are used from then on. Otherwise each file would be asked for six times, over
    half a minute.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
        return None
    except Exception as error:  # the HTTP client has kinds of its own, which are not part of the Hub's interface
        reason = first_line(error)
    import datasets.config  # has a copy of the setting

    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return reason


def prepare(name: str) -> None:
    """To be called before anything is loaded by a name that may be one on the Hub."""
    if not Path(name).exists():
        why_unreachable()


def reason(error: Exception, name: str) -> str:
    """Why `name` could not be loaded: the first line of the error, or what lies behind it."""
    from datasets.exceptions import DatasetGenerationError

    if isinstance(error, DatasetGenerationError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it says no more than that generating the dataset failed
    if not isinstance(error, OSError):
        return first_line(error)
    if error.filename is not None:
        file = Path(os.fsdecode(error.filename)).absolute()
        for variable in CACHES:
            folder = os.environ.get(variable) or (constants.HF_HOME if variable == "HF_HOME" else None)
            if folder is not None and (Path(folder) in (file, *file.parents) or file in Path(folder).parents):
                return f"the cache folder {folder} cannot be used ({error.strerror}): set {variable} to one that can"
    if not Path(name).exists() and (why := why_unreachable()):
        return f"it is neither here nor in the cache, and {constants.ENDPOINT} cannot be reached ({why})"
    return first_line(error)
