import pytest
import torch
from cuda_host import Host

from hf_recurrent.scan import cuda


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Fills every uninitialised tensor with NaN, so that an element that a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The oracle is thousands of tiny operations, which a second thread only slows; a test of threads sets its own."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shim")


@pytest.fixture
def host(monkeypatch, folder):
    """The CUDA backend serves CPU tensors, undefined behaviour is an error."""
    torch.manual_seed(0)
    host = Host(folder)
    host.install(monkeypatch.setattr)
    return host


@pytest.fixture
def once(host, monkeypatch):
    """The same, where rows too few to fill a GPU are read once, four of several blocks of a row side by side."""
    monkeypatch.setattr(cuda, "READ_ONCE", True)
    host.multiprocessors, host.resident, host.seed = 9, 4, 1
    return host
