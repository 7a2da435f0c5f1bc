"""benchmarks/shakespeare.py on a little text: models beside each other, seeds added later, other settings refused."""

import json
import os
import signal
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture
def shakespeare(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import shakespeare

    return shakespeare


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question:\n" * 150)
    sizes = {"--steps": "2", "--eval-steps": "1", "--hidden-size": "16", "--learning-rate": "1e-3"}
    paths = {"--data": "text.txt", "--runs": "runs", "--output": "out"}
    sizes |= {name: str(tmp_path / path) for name, path in paths.items()}
    return [part for flag in sizes.items() for part in flag]


def test_seeds_are_added_to_what_is_there(shakespeare, flags, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "shakespeare_char_mingru.yaml"  # whose steps are so few that the layers' health is measured
    recipe.write_text((shakespeare.RECIPES / recipe.name).read_text() + "health_steps: 1\n")
    with monkeypatch.context() as patch:
        patch.setattr(shakespeare, "RECIPES", tmp_path)
        shakespeare.main([*flags, "--models", "mingru", "transformer", "--seeds", "0"])
    first = json.loads((tmp_path / "out" / "shakespeare.json").read_text())
    assert [(one["model"], one["seed"]) for one in first["runs"]] == [("mingru", 0), ("transformer", 0)]
    assert first["summary"]["mingru"]["spread"] is None and first["summary"]["mingru"]["paper"] == 1.548
    for one in first["runs"]:
        assert [step for step, _ in one["curve"]] == [0, 1, 2]
        assert one["best"]["test_loss"] == min(loss for _, loss in one["curve"])

    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the precision for the whole process
    shakespeare.main([*flags, "--models", "mingru", "--seeds", "0", "1", "--mixed-precision", "bf16"])
    AcceleratorState._reset_state(reset_partial_state=True)
    second = json.loads((tmp_path / "out" / "shakespeare.json").read_text())
    assert second["runs"][0] == first["runs"][0] and second["summary"]["mingru"]["seeds"] == 2
    assert second["summary"]["mingru"]["spread"] > 0 and second["runs"][2] == first["runs"][1]
    assert second["summary"]["mingru"]["mixed_precision"] == ["no", "bf16"]
    assert (tmp_path / "out" / "shakespeare.png").read_bytes().startswith(b"\x89PNG")
    assert "| mingru |" in capsys.readouterr().out

    with pytest.raises(SystemExit):
        shakespeare.main([*flags, "--seeds", "0", "--steps", "3"])
    assert "other settings" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("Another text")
    with pytest.raises(SystemExit):
        shakespeare.main([*flags, "--seeds", "0"])
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


def test_an_interrupted_run_is_no_result(shakespeare, flags, tmp_path, monkeypatch, capsys):
    flags += ["--models", "minlstm", "--seeds", "0"]
    step = shakespeare.Run._step

    def interrupted(run):
        os.kill(os.getpid(), signal.SIGINT)
        return step(run)

    with monkeypatch.context() as patch:
        patch.setattr(shakespeare.Run, "_step", interrupted)
        with pytest.raises(SystemExit, match="130"):
            shakespeare.main(flags)
    assert not (tmp_path / "out" / "shakespeare.json").exists()
    shakespeare.main(flags)
    [one] = json.loads((tmp_path / "out" / "shakespeare.json").read_text())["runs"]
    assert [step for step, _ in one["curve"]] == [0, 1, 2]
    assert "stopped after step 1" in capsys.readouterr().out


def test_a_width_that_the_transformer_cannot_have_is_refused_at_once(shakespeare, flags, tmp_path, capsys):
    with pytest.raises(SystemExit):
        shakespeare.main([*flags, "--hidden-size", "200"])
    assert "--hidden-size 200: the transformer's 3 heads need a multiple of 24" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
