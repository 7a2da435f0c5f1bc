"""Perplexity by position, against the whole text in one call."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F

import hf_recurrent
from hf_recurrent import cli
from hf_recurrent.evaluation import measure_perplexity, perplexity
from hf_recurrent.training.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = hf_recurrent.MinGRUConfig(hidden_size=12, num_hidden_layers=2, vocab_size=257, initializer_range=0.4)
    return hf_recurrent.MinGRUForCausalLM(config).eval()


def losses(model, tokens) -> torch.Tensor:
    """(len(tokens) - 1,), of one call."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none").double()


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("window", [None, 2, 64, 75, 76])
def test_it_is_that_of_one_call(model, window, chunk_size):
    tokens = torch.randint(257, (151,), generator=torch.Generator().manual_seed(0)).tolist()
    told = []
    result = measure_perplexity(model, iter(tokens), 151, window, chunk_size, told.append)
    windows = [tokens] if window is None else [tokens[i : i + window] for i in range(0, 151, window)]
    nats = [losses(model, text) for text in windows if len(text) > 1]
    assert sum(told) == 151
    assert math.isclose(result.loss, torch.cat(nats).mean().item(), rel_tol=1e-5)
    # Each token is a byte, whether a window begins with it or not.
    assert math.isclose(result.bits_per_byte, torch.cat(nats).mean().item() / math.log(2), rel_tol=1e-5)
    for row in result.rows():
        here = torch.cat([x[row["from"] - 1 : row["to"]] for x in nats])
        assert row["tokens"] == len(here)
        assert math.isclose(row["loss"], here.mean().item(), rel_tol=1e-5)
        assert math.isclose(row["perplexity"], math.exp(row["loss"]))
    assert sum(row["tokens"] for row in result.rows()) == sum(map(len, nats))


def test_what_cannot_be_measured(model):
    for tokens in ([], [1]):
        with pytest.raises(ValueError, match="fewer than two tokens"):
            measure_perplexity(model, tokens, 1)
    with pytest.raises(ValueError, match="window must be at least 2 tokens, got 1"):
        measure_perplexity(model, [1, 2], 2, window=1)


def test_the_command(model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    text = "Ein Text ohne <|endoftext|>, " * 20 + "\n"
    (tmp_path / "a.txt").write_text(text)
    flags = ["evaluate", "perplexity", "--model", str(tmp_path / "model")]
    out = tmp_path / "out" / "put"
    assert cli.main([*flags, "--data-files", str(tmp_path / "*.txt"), "--output", str(out)]) == 0
    said = capsys.readouterr().out
    measured = json.loads((out / "perplexity.json").read_text())
    tokens = list(text.encode())  # a special token that is written in a text, too
    assert math.isclose(measured["loss"], losses(model, tokens).mean().item(), rel_tol=1e-5)
    assert measured["text_bytes"] == len(text) and "256 to 511" in said and "bits per byte, over 581 bytes" in said
    assert (out / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == ["perplexity.json", "perplexity.png"]
    for wrong, message in (
        (
            ["--data-files", str(tmp_path / "a.txt"), "--output", str(out)],
            "holds perplexity.json of an earlier evaluation",
        ),
        (["--data-files", "none"], "--data-files none: no such file"),
        (["--data-files", str(tmp_path / "a.txt"), "--window", "1"], "--window: must be at least 2, got 1"),
    ):
        assert cli.main([*flags, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["evaluate", "complexity", *flags[2:], "--data-files", "a"]) == 2
    assert "unknown evaluation complexity; the nearest valid one is perplexity" in capsys.readouterr().err
    assert cli.main(["evaluate", *flags[2:]]) == 2
    assert "unknown flag --model; evaluate is followed by perplexity or lm" in capsys.readouterr().err


def test_a_model_that_has_diverged(model, tmp_path):
    """Beyond what a float holds there is no perplexity; losses and tables stay."""
    with torch.no_grad():
        wild = copy.deepcopy(model)
        wild.lm_head.weight.mul_(1e5)
    result = measure_perplexity(wild, [1, 2, 3, 4, 5, 6], 6)
    content = result.as_dict()
    assert content["loss"] > 1000 and content["perplexity"] is None
    assert all(row["perplexity"] is None or row["loss"] < 1000 for row in content["by_position"])
    assert perplexity.shown(None) == "> e^700" and perplexity.shown(1e40) == "1.000e+40"
    perplexity.save(result, tmp_path, "wild")
    assert json.loads((tmp_path / "perplexity.json").read_text())["perplexity"] is None
    assert (tmp_path / "perplexity.png").is_file()
