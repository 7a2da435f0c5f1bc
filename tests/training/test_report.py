import gzip
import math

import numpy as np
import pytest

from hf_recurrent.training.documents import Documents
from hf_recurrent.training.report import baselines, plot_loss, smooth, table
from hf_recurrent.training.tokenizer import byte_tokenizer
from hf_recurrent.training.validation import validation_rows


@pytest.fixture
def validation():
    texts = ["abba é", "b"]
    return validation_rows(Documents(lambda epoch: zip("xy", texts, strict=True)), byte_tokenizer(), 4, 257)


def test_baselines_by_hand(validation):
    counts = np.zeros(257, np.int64)
    counts[[97, 98, 256]] = [5, 3, 2]
    references = baselines(validation, counts)
    content = "abba éb".encode()
    bits = 0.0
    for target in [*content, 256, 256]:
        bits -= math.log2((counts[target] + 1) / (10 + 257))
    assert references.unigram == pytest.approx(bits / len(content), rel=1e-12)
    assert references.gzip == 8 * len(gzip.compress(content, 9)) / len(content)
    assert references.bytes_per_token == len(content) / (len(content) + 2)


def test_bits_per_byte(validation):
    references = baselines(validation, np.ones(257, np.int64))
    # All 257 tokens alike: log2 257 bits for each of 10 targets, over 8 bytes.
    assert references.unigram == pytest.approx(10 * math.log2(257) / 8, rel=1e-12)
    assert references.bits_per_byte(math.log(257)) == pytest.approx(references.unigram, rel=1e-12)
    assert references.nats_per_token(references.bits_per_byte(1.5)) == pytest.approx(1.5, rel=1e-12)


def test_smooth():
    values = np.array([1.0, 2.0, 6.0, 3.0])
    assert smooth(values, 1).tolist() == values.tolist()
    assert smooth(values, 3).tolist() == [1.5, 3.0, 11 / 3, 4.5]


def test_table():
    assert table([("", "bits"), ("model", "1.5")]) == "         bits\n  model   1.5"


@pytest.mark.parametrize("lines", [0, 1, 60])
def test_the_curve_is_a_picture(tmp_path, validation, lines):
    metrics = [{"step": step, "loss": 5.0 - step / 20} for step in range(lines)]
    metrics += [{"step": step, "validation_loss": 5.0 - step / 20} for step in range(0, lines, 10)]
    for references in (None, baselines(validation, np.ones(257, np.int64))):
        plot_loss(metrics, references, "title", tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
