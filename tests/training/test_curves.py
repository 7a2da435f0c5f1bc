import json
from pathlib import Path

import numpy as np
import pytest

from hf_recurrent import cli
from hf_recurrent.training.curves import plot_runs, points, read_runs, short_names


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


def test_lines_without_tokens_or_seconds_lie_between_their_neighbours():
    lines = [
        {"step": 0, "validation_loss": 5.0, "elapsed": 0.5},
        {"step": 5, "memory_1": 0.1},
        {"step": 10, "tokens": 640, "loss": 4.0, "elapsed": 10.5},
        {"step": 10, "memory_1": 0.2},
        {"step": 15, "validation_loss": 3.0, "elapsed": 19.0},
        {"step": 20, "tokens": 1280, "loss": 3.0, "elapsed": 20.5},
        {"step": 25, "memory_1": 0.3},  # of a run that goes on
    ]
    assert points(lines, "tokens", "memory_1").tolist() == [[320, 0.1], [640, 0.2], [1280, 0.3]]
    assert points(lines, "tokens", "validation_loss").tolist() == [[0, 5.0], [960, 3.0]]
    assert points(lines, "elapsed", "memory_1").tolist() == [[5.5, 0.1], [10.5, 0.2], [20.5, 0.3]]
    assert points(lines, "elapsed", "validation_loss").tolist() == [[0.5, 5.0], [19.0, 3.0]]
    assert points(lines[1:2], "tokens", "memory_1").tolist() == [[0, 0.1]]


ODD = [
    "5", "[1]", "null", "[" * 100_000, "9" * 5000, '{"loss": 1}', '{"step": "2", "loss": 1}',
    '{"step": true, "loss": 1}', '{"step": 1.5, "loss": 1}', '{"step": -1, "loss": 1}',
    '{"step": 9223372036854775808, "loss": 1}',
]  # fmt: skip


def test_every_run_is_in_the_legend():
    """One without validation text has no line in the first panel."""
    lines = [{"step": step, "loss": 5 - step / 10} for step in range(1, 9)]
    runs = {
        "a": lines,
        "b": [*lines, {"step": 8, "validation_loss": 4.5}],
        "c": lines,
        "none": [{"step": 1, "lr": 0.1}],
    }
    figure = plot_runs(runs, ["validation_loss", "loss"], "step")
    (legend,) = filter(None, (axes.get_legend() for axes in figure.axes))
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]
    colors = {line.get_label(): line.get_color() for line in figure.axes[1].lines}
    assert [line.get_color() for line in legend.get_lines()] == [colors[run] for run in "abc"]


def test_odd_lines_are_passed_over(runs, tmp_path, capsys):
    whole = read_runs(runs[:1])
    path = Path(runs[0]) / "metrics.jsonl"
    lines = [*ODD, '{"step": 7, "loss": "x", "elapsed": null, "tokens": true, "lr": [1], "grad_norm": NaN}']
    lines += ['{"step": 8, "loss": -1e308, "lr": 1e308, "tokens": 1' + "0" * 400 + "}"]
    path.write_bytes(b"\xff\n" + "\n".join(lines).encode() + b"\n" + path.read_bytes())
    with pytest.warns(UserWarning) as warned:
        found = read_runs(runs[:1])
    # What is no JSON is what a killed process leaves, and is not told.
    assert [str(one.message) for one in warned] == [f"{path}: 9 lines without a step passed over"]
    assert found == {"mingru": [{"step": 7}, {"step": 8}, *whole["mingru"]]}
    output = tmp_path / "curves.png"
    for x in ("step", "tokens", "elapsed"):
        flags = ["--metric", "loss", "validation_loss", "elapsed", "--x", x, "--output", str(output)]
        assert cli.main(["plot", runs[0], *flags]) == 0
        assert capsys.readouterr().err == f"hf-recurrent: warning: {path}: 9 lines without a step passed over\n"
    path.write_text("5\n" + '{"step": 1, "loss": 1e300}\n{"step": 2, "loss": -1e300}\n')
    assert cli.main(["plot", runs[0], "--output", str(output)]) == 0
    path.write_text("5\n")
    assert cli.main(["plot", runs[0]]) == 2
    assert f"{runs[0]}: there is no run with metrics in metrics.jsonl" in capsys.readouterr().err


def test_a_fault_in_drawing_is_not_told_as_one_of_the_disk(runs, tmp_path, monkeypatch):
    def points(*_):
        raise KeyError("step")

    monkeypatch.setattr("hf_recurrent.training.curves.points", points)
    with pytest.raises(KeyError):
        cli.main(["plot", *runs, "--output", str(tmp_path / "curves.png")])


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
        (["nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_what_is_refused(runs, flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot", *runs, *flags]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["plot", runs[0], runs[0]]) == 2
    assert "is given twice" in capsys.readouterr().err
    assert cli.main(["plot", str(tmp_path)]) == 2
    assert f"error: {tmp_path}: there is no run with metrics in metrics.jsonl" in capsys.readouterr().err


def test_what_is_no_run_is_left_out(runs, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("lr 1e-3\n")
    paths = sorted(map(str, Path(runs[0]).parent.glob("*"))) + [str(tmp_path / "notes.txt"), str(tmp_path)]
    assert cli.main(["plot", *paths, "--output", str(tmp_path / "curves.png")]) == 0
    out, err = capsys.readouterr()
    assert "1 run drawn" in out
    for path, line in zip(paths[1:], err.splitlines(), strict=True):
        assert line == f"hf-recurrent: warning: {path}: there is no run with metrics in metrics.jsonl; left out"


def test_names():
    """No longer than it takes to tell a folder from the others."""
    folders = [Path(path) for path in ("/runs/a/extrapolation", "/runs/b/extrapolation", "/runs/a", "/runs/c", "/x/a")]
    assert list(short_names(folders).values()) == ["a/extrapolation", "b/extrapolation", "runs/a", "c", "x/a"]
