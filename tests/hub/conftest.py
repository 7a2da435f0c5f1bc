import threading

import pytest
from hub_server import TOKEN, FakeHub
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path_factory, monkeypatch):
    """Nothing goes to the user's cache."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    server = FakeHub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # made once, for the endpoint of then
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for module in (_http, file_download):  # the client waits between its attempts
        monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    yield server
    server.shutdown()
    server.server_close()
