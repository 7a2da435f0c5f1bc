import pytest


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path_factory, monkeypatch):
    """Nothing goes to the user's cache."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
