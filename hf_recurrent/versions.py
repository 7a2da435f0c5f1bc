"""The versions behind a result."""

import importlib.metadata
import platform

from . import __version__


def version_of(package: str) -> str | None:
    """The installed version of a distribution; None where it is not installed. PyTorch's says which build it is
    ("2.15.0+cu132"), which its distribution on the package index leaves out."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if package == "torch":
        import torch

        return str(torch.__version__)
    return version


def versions_of(*packages: str) -> dict[str, str]:
    """Of this package, of Python and of the distributions named, all of which are dependencies."""
    return {
        "hf_recurrent": __version__,
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
    }
