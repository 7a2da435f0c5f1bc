"""Decoding calls kernels past PyTorch where nothing looks; what looks sees the operators, and the same results."""

import torch
from families import causal_lm, each_family, token_ids
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.add(operator.namespace)
        return operator(*args, **kwargs or {})


@each_family
@torch.no_grad()
def test_a_mode_sees_a_decoded_token(config):
    model, ids = causal_lm(config).float(), token_ids(config, 1, 9)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    alone = model(ids[:, 8:], past_key_values=cache.clone(), use_cache=True)
    with Operators() as mode:
        seen = model(ids[:, 8:], past_key_values=cache, use_cache=True)
    assert mode.seen == {"aten", "hf_recurrent"}
    torch.testing.assert_close(seen.logits, alone.logits, rtol=1e-4, atol=1e-5)


@each_family
@torch.no_grad()
def test_gradients_change_nothing(config):
    """A token under no_grad, by kernels, and one that is differentiated."""
    model, ids = causal_lm(config).double(), token_ids(config, 2, 9)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    alone = model(ids[:, 8:], past_key_values=cache.clone(), use_cache=True)
    with torch.enable_grad():
        graded = model(ids[:, 8:], past_key_values=cache, use_cache=True)
    assert graded.logits.requires_grad
    torch.testing.assert_close(graded.logits.detach(), alone.logits, rtol=1e-9, atol=1e-11)
