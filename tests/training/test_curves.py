import json
from pathlib import Path

import numpy as np
import pytest

from hf_recurrent import cli
from hf_recurrent.training.curves import points, read_runs, short_names


@pytest.fixture
def runs(tmp_path):
    """Two runs of one name in different folders, one without validation."""
    folders = []
    for number, parent in enumerate(("a", "b")):
        folder = tmp_path / parent / "mingru"
        folder.mkdir(parents=True)
        lines = [{"step": 0, "validation_loss": 5.0, "elapsed": 0.0}] if number == 0 else []
        for step in range(1, 101):
            lines.append({"step": step, "tokens": step * 64, "loss": 5 - number - step / 50, "elapsed": step / 10})
        if number == 0:
            lines.append({"step": 100, "validation_loss": 3.5, "elapsed": 10.0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1')
        folders.append(str(folder))
    return folders


def test_what_is_drawn(runs):
    found = read_runs(runs)
    assert list(found) == ["a/mingru", "b/mingru"]
    np.testing.assert_array_equal(points(found["a/mingru"], "tokens", "validation_loss"), [[0, 5.0], [6400, 3.5]])
    assert points(found["b/mingru"], "elapsed", "loss")[0].tolist() == [0.1, 3.98]
    norms = [{"step": step, "grad_norm": norm} for step, norm in enumerate([2.0, float("inf"), float("nan"), 1.0])]
    assert points(norms, "step", "grad_norm").tolist() == [[0, 2.0], [3, 1.0]]  # or the running mean would be nan
    assert list(read_runs([runs[0] + "/metrics.jsonl"])) == ["mingru"]


@pytest.mark.parametrize("name", ["curves.png", "curves.svg"])
def test_a_picture(runs, tmp_path, name, capsys):
    path = tmp_path / name
    assert cli.main(["plot", *runs, "--output", str(path), "--x", "tokens"]) == 0
    assert "2 runs drawn" in capsys.readouterr().out
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if name.endswith("png") else b"</svg>" in content
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "b", name}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--metric", "los"], "--metric los: no run has it; the nearest valid one is loss"),
        (["--output", "curves.gif"], "--output curves.gif: expected a name ending in .png, .svg, .pdf"),
        (["--output", "nowhere/curves.png"], "--output nowhere/curves.png: cannot be written"),
        (["nowhere"], "nowhere: there is no run with metrics in metrics.jsonl"),
    ],
)
def test_what_is_refused(runs, flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", *runs, *flags]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["plot", runs[0], runs[0]]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_names():
    """No longer than it takes to tell a folder from the others."""
    folders = [Path(path) for path in ("/runs/a/extrapolation", "/runs/b/extrapolation", "/runs/a", "/runs/c", "/x/a")]
    assert list(short_names(folders).values()) == ["a/extrapolation", "b/extrapolation", "runs/a", "c", "x/a"]
