"""benchmarks/shakespeare.py on a little text: models beside each other, seeds added later, other settings refused."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def shakespeare(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import shakespeare

    return shakespeare


def test_seeds_are_added_to_what_is_there(shakespeare, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question:\n" * 150)
    flags = [
        "--data",
        str(tmp_path / "text.txt"),
        "--steps",
        "2",
        "--eval-steps",
        "1",
        "--hidden-size",
        "16",
        "--learning-rate",
        "1e-3",
    ]
    flags += ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]
    shakespeare.main([*flags, "--models", "mingru", "transformer", "--seeds", "0"])
    first = json.loads((tmp_path / "out" / "shakespeare.json").read_text())
    assert [(one["model"], one["seed"]) for one in first["runs"]] == [("mingru", 0), ("transformer", 0)]
    assert first["summary"]["mingru"]["spread"] is None and first["summary"]["mingru"]["paper"] == 1.548
    for one in first["runs"]:
        assert [step for step, _ in one["curve"]] == [0, 1, 2]
        assert one["best"]["test_loss"] == min(loss for _, loss in one["curve"])

    shakespeare.main([*flags, "--models", "mingru", "--seeds", "0", "1"])
    second = json.loads((tmp_path / "out" / "shakespeare.json").read_text())
    assert second["runs"][0] == first["runs"][0] and second["summary"]["mingru"]["seeds"] == 2
    assert second["summary"]["mingru"]["spread"] > 0 and second["runs"][2] == first["runs"][1]
    assert (tmp_path / "out" / "shakespeare.png").read_bytes().startswith(b"\x89PNG")
    assert "| mingru |" in capsys.readouterr().out

    with pytest.raises(SystemExit):
        shakespeare.main([*flags, "--seeds", "0", "--steps", "3"])
    assert "other settings" in capsys.readouterr().err


def test_the_transformer_is_of_the_recipes_size(shakespeare, tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question:\n" * 150)
    settings = ["--data-files", str(tmp_path / "text.txt"), "--output-dir", str(tmp_path / "run"), "--cpu"]
    recipe = str(shakespeare.RECIPES / "shakespeare_char_mingru.yaml")
    sizes = [
        sum(p.numel() for p in kind(*shakespeare.parse([recipe, *settings])).model.parameters())
        for kind in (shakespeare.Run, shakespeare.TransformerRun)
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-3)
