import functools

import pytest
from accelerate.state import AcceleratorState, GradientState
from runs import run_processes


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps its settings for the whole process; a command line has a process of its own."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path_factory, monkeypatch):
    """Nothing goes to the user's cache, and no test waits for a network."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        "hf_recurrent.training.token_cache.cache_folder", lambda: tmp_path_factory.getbasetemp() / "cache"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def train_processes(tmp_path):
    """`train_processes(name, processes, *flags, status=0)`: see `runs.run_processes`."""
    return functools.partial(run_processes, tmp_path)
