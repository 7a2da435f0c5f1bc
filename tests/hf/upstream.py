"""Transformers' own test mixins: fetched with the source distribution of the installed version, and imported."""

import functools
import importlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from unittest import mock

import pytest
import transformers

from hf_recurrent.scan.kernel_cache import cache_folder

MODULES = ("test_modeling_common", "test_training_mixin", "test_pipeline_mixin", "test_configuration_common")
# What these modules import from files that the source distributions lack: empty classes take their place.
MISSING_MIXINS = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
# The arguments that every configuration takes, each with a value that is not its default.
CONFIG_KWARGS = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "no", 1: "perhaps", 2: "yes"},
    "label2id": {"no": 0, "perhaps": 1, "yes": 2},
    "problem_type": "regression",
}


@functools.cache
def tests_folder() -> Path:
    """The `tests` of the installed Transformers' source distribution, which pip fetches and checks against the hash in
    the package index; kept in the cache folder, where it appears whole or not at all.

    Raises:
        pytest.UsageError: it cannot be fetched, or not be kept.
    """
    version = transformers.__version__
    folder = cache_folder() / "transformers-tests" / version
    if folder.exists():
        return folder / "tests"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            archive = _download(version, temporary)
            with tarfile.open(archive) as tar:
                root = archive.name.removesuffix(".tar.gz")
                wanted = [member for member in tar.getmembers() if member.name.startswith(f"{root}/tests/")]
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python before 3.10.12 has none
                tar.extractall(temporary, wanted)
            try:
                os.rename(archive.with_name(root), folder)
            except OSError:
                if not folder.exists():  # another process may have been faster
                    raise
    except (OSError, tarfile.TarError) as error:
        raise pytest.UsageError(
            f"cannot keep the tests of transformers {version} in {folder}: {error} ($HF_RECURRENT_CACHE names another)"
        ) from error
    return folder / "tests"


def _download(version: str, folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--retries", "2", "--no-deps", "--no-build-isolation", "--no-binary", "transformers"]
    command += ["--dest", folder, f"transformers=={version}"]
    pip = subprocess.run(command, capture_output=True, text=True)
    archives = list(Path(folder).glob("*.tar.gz"))
    if pip.returncode or len(archives) != 1:
        said = [line.strip() for line in pip.stderr.splitlines() if line.strip()] or ["it says nothing"]
        raise pytest.UsageError(
            f"cannot fetch the source distribution of transformers {version} from the package index, for the tests in "
            f"it: is there a network? pip says: {said[-1]}"
        )
    return archives[0]


def markers() -> set[str]:
    """The names of all pytest markers that the tests use."""
    files = [Path(transformers.__file__).with_name("testing_utils.py"), *tests_folder().rglob("*.py")]
    return {name for file in files for name in re.findall(r"\bmark\.(\w+)", file.read_text(encoding="utf-8"))}


@functools.cache
def load(tiny_models: str, *processors: type) -> types.SimpleNamespace:
    """
    Imports the mixins: `tests` becomes a package made of the source distribution's folder and of stand-ins for what
    its modules import and it lacks.

    Args:
        tiny_models: the folder in which the tests of pipelines will find models; see pipeline_checks.py.
        processors: the classes of the tokenizers and image processors with them.

    Returns:
        The modules in MODULES, by name.
    """
    folder = tests_folder()
    _module("tests", __path__=[str(folder)])
    for name, mixin in MISSING_MIXINS.items():
        if not (folder / name.replace(".", "/")).with_suffix(".py").exists():
            _module(f"tests.{name}", **{mixin: type(mixin, (), {"__module__": __name__})})
    if not (folder / "utils" / "test_configuration_utils.py").exists():
        _module("tests.utils.test_configuration_utils", config_common_kwargs=CONFIG_KWARGS)
    if not (folder / "pipelines").exists():
        import pipeline_checks

        source = (folder / "test_pipeline_mixin.py").read_text(encoding="utf-8")
        for name in set(re.findall(r"\bpipelines\.(test_pipelines_\w+)", source)):
            sys.modules[f"tests.pipelines.{name}"] = pipeline_checks
    os.environ["TRANSFORMERS_TINY_MODEL_PATH"] = tiny_models
    # The modules would import Transformers anew from the source beside them, to look up processors by their names.
    by_name = types.SimpleNamespace(**{processor.__name__: processor for processor in processors})
    with mock.patch("transformers.utils.direct_transformers_import", return_value=by_name):
        return types.SimpleNamespace(**{name: importlib.import_module(f"tests.{name}") for name in MODULES})


def is_stand_in(mixin: type) -> bool:
    """Whether the source distribution lacks this mixin, so that `load` has put an empty one in its place."""
    return mixin.__module__ == __name__


def _module(name: str, **attributes) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)
