import pytest
import torch


@pytest.fixture
def config(request):
    """The configuration named by `each_family` or `each_variant` (families.py)."""
    config_class, options = request.param
    return config_class(**options)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
