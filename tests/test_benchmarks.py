"""benchmarks/scan.py and decode.py at tiny sizes: that they measure what they say. Never how fast."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def run(*arguments, script: str = "scan.py") -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder that a quick run has written, and what it has printed."""
    folder = tmp_path_factory.mktemp("measured") / "new"
    done = run("--quick", "--repeats", 1, "--threads", 1, "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def modules(monkeypatch):
    """What scan.py imports."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import hf_recurrent.measure as measure
    import report

    return measure, report


def test_no_recurrence_is_left_where_products_take_its_place(modules):
    import training_steps

    class Called(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(str(function))
            return function(*args, **(kwargs or {}))

    ids = torch.randint(32, (2, 8))
    for name, build in training_steps.OURS.items():
        model = build()

        def step(_, model=model) -> None:
            model(ids).backward()

        for run, scans in ((step, True), (training_steps.with_product(step), False)):
            with Called() as called:
                run(0)
            found = [other for other in called.names if re.match(r"hf_recurrent\.(?!short_convolution)", other)]
            assert bool(found) == scans, (name, found)


def test_every_section_is_measured(measured):
    document = json.loads((measured[0] / "scan.json").read_text())
    assert document["quick"] and document["command"] == "python benchmarks/scan.py --quick --repeats 1"
    assert document["machine"]["threads"] == 1 and document["machine"]["packages"]["torch"]
    results = document["results"]
    cases = {
        (row["section"], *row["shape"], row["dtype"], row["pass"])
        for row in results
        if row["section"] in ("scan", "cell", "step")
    }
    assert len([case for case in cases if case[0] in ("scan", "cell")]) == 2 * 2 * 2 * 2
    assert ("step", 2, 64, "float32", "training step") in cases
    names = {section: {row["name"] for row in results if row["section"] == section} for section in ("scan", "step")}
    assert {"linear_scan", "plain loop"} <= names["scan"]
    assert {"hf_recurrent minGRU", "matrix products alone", "nn.GRU", "nn.LSTM"} <= names["step"]
    for section in ("families", "products"):
        found = {row["name"] for row in results if row["section"] == section}
        assert found == {"minLSTM", "GateLoop, polar", "GateLoop, cartesian", "Longhorn", "S5"}
    assert {row["name"] for row in results if row["section"] == "memory"} >= {"hf_recurrent minGRU"}
    assert {row["name"] for row in results if row["section"] == "length"} >= {"linear_scan", "mingru_scan positive"}
    for row in results:
        assert row.get("ratio", 1) > 0 and row.get("mebibytes", 1) > 0


def test_what_is_timed_is_right(measured):
    rows = [row for row in json.loads((measured[0] / "scan.json").read_text())["results"] if "error" in row]
    ours = [row for row in rows if row["name"].startswith(("linear_scan", "mingru_scan"))]
    assert ours
    for row in ours:
        assert row["error"] < {"float32": 1e-5, "bfloat16": 2**-7}[row["dtype"]], row


def test_the_files_agree_and_name_no_folder(measured):
    folder, printed = measured
    assert {path.name for path in folder.iterdir()} == {"scan.json", "scan.md", "scan.png"}
    text = (folder / "scan.md").read_text()
    assert text in printed
    assert (folder / "scan.png").read_bytes().startswith(b"\x89PNG")
    for name in ("scan.json", "scan.md"):
        assert str(folder.parent) not in (folder / name).read_text()
        assert str(ROOT) not in (folder / name).read_text()


def test_a_part_can_be_measured(tmp_path):
    done = run("--quick", "--only", "length", "--repeats", 1, "--threads", 1, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "scan.json").read_text())
    assert {row["section"] for row in document["results"]} == {"length"}
    assert "--only length" in document["command"]
    assert {path.name for path in tmp_path.iterdir()} == {"scan.json", "scan.md", "scan.png"}


def test_bad_arguments_are_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    for arguments, complaint in (
        (["--repeats", "0"], "expected a whole number from 1 on, got '0'"),
        (["--output", tmp_path / "file"], "cannot be written: File exists"),
    ):
        done = run(*arguments)
        assert done.returncode == 2
        assert complaint in done.stderr and "Traceback" not in done.stderr


def test_each_candidate_is_timed_right_after_its_limit(modules):
    calls = []

    def recorder(name):
        return lambda index: calls.append((name, index))

    timings = modules[0].paired(recorder("limit"), {"a": recorder("a"), "b": recorder("b")}, rounds=2)
    rounds = calls[4:]  # after the warm-up
    assert [name for name, _ in rounds] == ["limit", "a", "limit", "b"] * 2
    assert [index for _, index in rounds] == list(range(8)), "consecutive calls take consecutive input sets"
    for timing in timings.values():
        assert len(timing.seconds) == len(timing.ratios) == 2


def test_ratios_and_rounds(modules, monkeypatch):
    measure, _ = modules
    monkeypatch.setattr(measure, "seconds_of", lambda function, index: function(index))  # each tells its own time
    candidates = {"twice the bytes' time": lambda _: 6.0, "slow": lambda _: measure.SLOW_SECONDS}
    timings = measure.paired(lambda _: 1.0, candidates, rounds=9, limit_factor=3.0)
    assert timings["twice the bytes' time"].ratios[0] == 2.0
    assert len(timings["twice the bytes' time"].seconds) == 4, "stopped once past SLOW_SECONDS"
    assert len(timings["slow"].seconds) == measure.FEWEST_ROUNDS


def test_summary_is_medians_and_quartiles(modules):
    summary = modules[0].Timing([0.002, 0.001, 0.003], [2.0, 1.0, 3.0]).summary()
    assert (summary["milliseconds"], summary["milliseconds_quartiles"]) == (2.0, [1.5, 2.5])
    assert (summary["ratio"], summary["ratio_quartiles"]) == (2.0, [1.5, 2.5])


def test_headlines_take_the_worst_of_what_was_asked_for(modules):
    def row(section, name, ratio, passes="forward", shape=(8, 1024, 768), dtype="float32"):
        return {"section": section, "name": name, "ratio": ratio, "pass": passes, "shape": list(shape), "dtype": dtype}

    results = [
        row("scan", "linear_scan", 1.1),
        row("scan", "linear_scan", 9.0, dtype="bfloat16"),
        row("scan", "plain loop", 50.0),
        row("cell", "mingru_scan vanilla", 2.5),
        row("cell", "mingru_scan positive", 2.75),
        row("step", "hf_recurrent minGRU", 1.05, "training step", (8, 256)),
        {"section": "memory", "name": "hf_recurrent minGRU", "mebibytes": 100.0},
        {"section": "memory", "name": "minGRU-pytorch minLM", "mebibytes": 200.0},
        {"section": "length", "name": "linear_scan", "exponent": 1.01},
    ]
    assert [(what.split(",")[0], value) for what, value, _ in modules[1].headlines(results)] == [
        ("linear_scan forward", "1.10 ×"),
        ("minGRU cell forward", "2.75 ×"),
        ("training step", "1.05 ×"),
        ("peak memory of a training step", "0.50 ×"),
        ("linear_scan's time grows with length to the power", "1.01"),
    ]


# ---- decode.py -------------------------------------------------------------------------------------------------------

OURS = {"minGRU", "minLSTM", "Longhorn", "GateLoop", "S5"}


def test_decoding_is_measured_section_by_section(tmp_path):
    for sections in (["token"], ["position", "crossing"]):
        arguments = ["--quick", "--only", *sections, "--repeats", 1, "--threads", 1, "--output", tmp_path]
        done = run(*arguments, script="decode.py")
        assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"decode.json", "decode.md", "decode.png"}
    found = json.loads((tmp_path / "decode.json").read_text())["sections"]
    assert list(found) == ["token", "position", "crossing"], "those measured before stay, in their order"
    tokens = found["token"]["results"]
    assert {(row["name"], row["dtype"]) for row in tokens if row["ours"]} == {
        (name, dtype) for name in OURS for dtype in ("float32", "bfloat16")
    }
    assert any("Mamba" in row["name"] for row in tokens) and any("Llama" in row["name"] for row in tokens)
    assert {row["name"] for row in found["position"]["results"]} == OURS
    for section in found.values():
        assert all(row["ratio"] > 0 for row in section["results"])
        assert section["machine"]["threads"] == 1
    assert (tmp_path / "decode.md").read_text() in done.stdout
    assert str(tmp_path) not in (tmp_path / "decode.json").read_text()


def test_a_stream_keeps_its_cache():
    done = run("--quick", "--part", "stream", "S5", "--repeats", 1, "--threads", 1, script="decode.py")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert set(row["cache_bytes"]) == {"10", "10000", "20000"} and len(set(row["cache_bytes"].values())) == 1
    assert row["tokens"][-1] > 19_000 and len(row["tokens"]) == len(row["resident_bytes"])


def test_where_attention_becomes_slower(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from decode_report import crossing

    rows = [{"context": 100, "ratio": 0.5}, {"context": 300, "ratio": 1.5}, {"context": 900, "ratio": 4.0}]
    assert crossing(rows) == "slower from a context of about 200 on"
    assert crossing(rows[1:]) == "slower at all contexts from 300 on" and crossing(rows[:1]) == "not slower up to 100"


def test_longhorn_beside_mamba(tmp_path):
    pytest.importorskip("mambapy")
    done = run("--shape", 1, 20, 16, "--rounds", 1, "--threads", 1, "--output", tmp_path, script="longhorn.py")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "longhorn.json").read_text())
    assert [row["what"] for row in document["results"]] == ["cell", "layer"]
    for row in document["results"]:
        assert row["mamba"]["milliseconds"] > 0 and row["longhorn"]["ratio"] > 0


def test_what_keeping_freed_memory_gains(tmp_path):
    flags = ["--cases", "stdlib_mingru", "--rounds", 1, "--steps", 2, "--threads", 1]
    done = run(*flags, "--output", tmp_path, script="freed_memory.py")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "freed_memory.json").read_text())["cases"].values()
    assert set(found) == {"default", "kept", "returned"} and found["default"]["ratio"] == 1
    assert all(one["seconds"] > 0 and one["peak_bytes"] > 0 for one in found.values())


def test_what_a_resume_costs(tmp_path):
    done = run("--quick", "--rounds", 1, "--output", tmp_path, script="resuming.py")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "resuming.json").read_text())
    seconds = found["seconds"]
    assert seconds["cost"] == pytest.approx(seconds["resumed"] - seconds["begun"], abs=2e-3)
    assert seconds["saved"] > 0 and seconds["read"] > 0 and found["checkpoint_bytes"] > 12 * found["parameters"]


def test_one_row_beside_many(tmp_path):
    arguments = ["--length", 64, "--channels", 8, "--batch", 4, "--rounds", 1, "--threads", 1, "--output", tmp_path]
    done = run(*arguments, script="one_row.py")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "one_row.json").read_text())
    assert found["shapes"] == [[4, 16, 8], [1, 64, 8]]
    cases = {(row["dtype"], row["pass"]) for row in found["results"]}
    assert cases == {(dtype, what) for dtype in ("float32", "bfloat16") for what in ("forward", "backward")}
    assert all(row["ratio"] > 0 for row in found["results"])
    done = run("--length", 65, "--batch", 4, script="one_row.py")
    assert done.returncode == 2 and "--length 65 is no multiple of --batch 4" in done.stderr
