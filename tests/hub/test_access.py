import errno

import datasets.config
import pytest
from huggingface_hub import constants

from hf_recurrent.hub import access
from hf_recurrent.training.model import check_folder
from hf_recurrent.training.sources import dataset_documents
from hf_recurrent.training.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def unasked():
    access.why_unreachable.cache_clear()
    yield
    access.why_unreachable.cache_clear()


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens


def test_without_a_network_the_hub_is_asked_once(no_network, capfd):
    why = r"neither here nor in the cache, and http://127.0.0.1:9 cannot be reached \(.+\)$"
    with pytest.raises(ValueError, match=f"^--dataset no-one/nothing: split 'train' cannot be loaded: it is {why}"):
        dataset_documents("no-one/nothing", None, "train", "text")
    assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE  # from here on the caches alone are used
    with pytest.raises(ValueError, match=f"^--tokenizer no-one/nothing: cannot be loaded: it is {why}"):
        load_tokenizer("no-one/nothing")
    with pytest.raises(ValueError, match=f"^--model no-one/nothing: it is {why}"):
        check_folder("no-one/nothing")
    assert "Retrying" not in capfd.readouterr().err


def test_what_is_here_asks_nobody(no_network, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_DATASETS_CACHE"])
def test_a_cache_that_cannot_be_written_to_is_named(monkeypatch, variable):
    monkeypatch.setenv(variable, "/cache/here")
    monkeypatch.setattr(constants, "HF_HOME", "/cache/here" if variable == "HF_HOME" else "/cache/home")
    expected = f"the cache folder /cache/here cannot be used (Read-only file system): set {variable} to one that can"
    for file in ("/cache", "/cache/here", "/cache/here/modules/x.lock"):
        error = OSError(errno.EROFS, "Read-only file system", file)
        assert access.reason(error, "a.jsonl") == expected
        wrapped = datasets.exceptions.DatasetGenerationError("An error occurred")
        wrapped.__cause__ = error
        assert access.reason(wrapped, "a.jsonl") == expected
    assert "/data" in access.reason(OSError(errno.EACCES, "Permission denied", "/data/a.jsonl"), __file__)
