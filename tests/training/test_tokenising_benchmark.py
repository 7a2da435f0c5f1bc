"""benchmarks/tokenising.py at tiny sizes: that it measures what it says. Never how fast."""

from pathlib import Path

import pytest

from hf_recurrent.training.documents import Documents
from hf_recurrent.training.tokenizer import byte_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tokenising(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import tokenising

    return tokenising


def test_rates(tokenising):
    texts = [("a", "one two three " * 100), ("b", "four five " * 50)]
    rates = tokenising.input_rates(byte_tokenizer(), Documents(lambda epoch: texts), rounds=1)
    assert rates.pop("tokens") == sum(len(text) for _, text in texts)
    assert set(rates) == {"to_rows", "to_rows_from_the_cache", "tokenizer_alone", "ids_to_arrays_alone"}
    assert all(rate > 0 for rate in rates.values())


def test_the_shares_are_of_the_whole(tokenising):
    flags = "--hidden-size 16 --num-hidden-layers 1 --sequence-length 32 --batch-size 2 --tokenizer bytes"
    flags += " --max-documents 3 --validation-share 0 --no-token-cache"
    share = tokenising.loop_share(flags.split(), steps=20)
    parts = [share[f"{part}_share"] for part in ("forward", "backward", "clip", "step", "loop")]
    assert sum(parts) == pytest.approx(1, abs=1e-3) and all(0 < part < 1 for part in parts)
    assert share["steps"] == 18 and share["milliseconds_of_a_step"] > 0
