"""What would make the host and a GPU wait for each other at each call: numbers that are copied from one to the other.
Told by the operators that do it, which are the same on the CPU."""

from collections import Counter

import pytest
import torch
from families import ALL, causal_lm, each_variant
from torch.utils._python_dispatch import TorchDispatchMode

from hf_recurrent import LonghornConfig, LonghornModel, StaticRecurrentCache

# From given numbers to a tensor; from a tensor to a number; to as many as only the device knows.
WAITING = ["lift_fresh", "_local_scalar_dense", "equal", "nonzero", "masked_select"]


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        indices = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        by_mask = any(x is not None and x.dtype == torch.bool for x in indices)
        self.counts[name] += name in WAITING or by_mask
        return function(*args, **(kwargs or {}))

    def found(self) -> dict[str, int]:
        return {name: count for name, count in self.counts.items() if count}


@each_variant
def test_none_without_a_mask(config):
    model, ids = causal_lm(config, torch.float32), torch.randint(config.vocab_size, (2, 9))
    with Waits() as waits, torch.no_grad():
        for cache in (None, StaticRecurrentCache(model.config)):
            cache = model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
            model(input_ids=ids[:, :1], past_key_values=cache)
    model.train()
    with waits:
        model(input_ids=ids, labels=ids).loss.backward()
        model(input_ids=ids, labels=ids, skip_logits=True).loss.backward()
    assert not waits.found()


@pytest.mark.parametrize("config", [kind for name, kind in ALL.items() if name.endswith("bare")], indirect=True)
def test_one_for_each_argument_that_is_looked_at(config):
    """Whatever the number of layers."""
    model, ids = causal_lm(config, torch.float32).train(), torch.randint(config.vocab_size, (1, 9))
    mask, places = torch.ones_like(ids), torch.arange(9)[None] % 5
    mask[:, :2] = 0
    for arguments in ({"attention_mask": mask}, {"position_ids": places}, {"seq_idx": (places == 0).long().cumsum(1)}):
        with Waits() as waits:
            model(input_ids=ids, labels=ids, **arguments).loss.backward()
        assert waits.found() == {"_local_scalar_dense": 1}


def test_layers_that_look_back_know_that_there_are_documents():
    config = LonghornConfig(vocab_size=9, hidden_size=8, num_hidden_layers=3, bidirectional=True)
    with Waits() as waits:
        LonghornModel(config)(input_ids=torch.arange(8)[None], position_ids=torch.arange(8)[None] % 5)
    assert waits.found()["_local_scalar_dense"] == 1
