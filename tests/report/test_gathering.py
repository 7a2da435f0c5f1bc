"""`hf-recurrent report`: runs of every kind in one page, and what cannot be used named there."""

import html.parser
import json
import re
from statistics import stdev

import pytest
from matplotlib.figure import Figure

from hf_recurrent import cli
from hf_recurrent.report import gather, pictures
from hf_recurrent.report.sections import command, groups, sections
from hf_recurrent.tasks.settings import TaskTraining
from hf_recurrent.tasks.train import train_task

LONGHORN = {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 2}
RUNS = {
    **{
        f"copying-{layers}-{seed}": {
            "task": "selective_copying", "sizes": {"length": 6, "data_tokens": 2, "vocab_size": 5}, "seed": seed,
            "config": {"hidden_size": 8, "num_hidden_layers": layers},
        }
        for layers in (1, 2) for seed in (0, 1)
    },
    **{
        f"recall-{length}-{width}": {
            "task": "associative_recall", "sizes": {"length": length, "pairs": 2, "vocab_size": 12},
            "model_type": "longhorn", "config": LONGHORN | {"hidden_size": width},
        }
        for length, width in ((8, 8), (16, 8), (8, 12))
    },
    "horizon": {
        "task": "memory_horizon", "sizes": {"length": 24}, "model_type": "gateloop",
        "config": {"hidden_size": 8, "num_hidden_layers": 2},
    },
    "pendulum": {
        "task": "pendulum", "sizes": {"steps": 4, "grid": 8, "size": 4, "duration": 0.8},
        "config": {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 4, "num_blocks": 1},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs, whole ones and others."""
    folder = tmp_path_factory.mktemp("work") / "runs"
    for name, fields in RUNS.items():
        train_task(TaskTraining(**fields, max_steps=2, batch_size=2, eval_examples=4, evaluations=2), folder / name)
    text = folder / "text"
    text.mkdir()
    (text / "train.yaml").write_text("max_steps: 30\nmodel_type: longhorn\n")
    lines = [{"step": step, "loss": 5 - step / 10, "tokens": 64 * step} for step in range(1, 20)]
    lines += [{"step": 19, "validation_loss": 3.25, "validation_bits_per_byte": 2.125}]
    (text / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 2')  # half a line at the end
    rows = [{"from": 2**k, "to": 2 ** (k + 1) - 1, "tokens": 5, "perplexity": 20.0 - k} for k in range(10)]
    (text / "perplexity.json").write_text(json.dumps({"perplexity": 12.5, "sequence_length": 256, "by_position": rows}))
    scores = {"piqa": {"alias": "piqa", "acc,none": 0.625, "acc_stderr,none": 0.01}}
    (text / "lm-eval.json").write_text(json.dumps({"results": scores, "configs": {"piqa": {}}, "n-shot": {"piqa": 0}}))
    for name, mark, content in (
        ("broken", "task.json", "{<b>"),
        ("<script>alert(1)", "task.json", '{"task": "other"}'),
        ("list", "lm-eval.json", "[]"),
        ("infinite", "perplexity.json", '{"perplexity": Infinity, "by_position": [{}]}'),
        ("begun", "train.yaml", "max_steps: 3\n"),
        ("stopped", "task-settings.json", "{}"),
        ("text/checkpoints/step-1", "metrics.jsonl", '{"step": 1}\n'),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / mark).write_text(content)
    older = json.loads((folder / "copying-1-0" / "task.json").read_text())
    for name, changes in (
        ("older", {"metric": None, "machine": None, "seconds": None, "device": None, "max_steps": 3}),
        ("no-number", {"accuracy": "high"}),
        ("no-family", {"model_type": "transformer"}),
    ):
        (folder / name).mkdir()
        changed = {key: value for key, value in (older | changes).items() if value is not None}
        (folder / name / "task.json").write_text(json.dumps(changed))
    return folder


PASSED_OVER = {
    "begun": "no metrics.jsonl yet",
    "broken": "task.json is not JSON",
    "infinite": "perplexity.json is not what",
    "list": "lm-eval.json holds no object",
    "no-family": "no family that is known here: transformer",
    "no-number": "no result that is a finite number",
    "stopped": "has not finished: the same command with --resume",
    "<script>alert(1)": "task.json has no sizes",
}


def test_what_is_gathered(runs):
    found = gather([runs, runs / "text"])  # a folder in another counts once
    assert sorted(run.name for run in found.tasks) == sorted([*RUNS, "older"])
    assert [len(kind) for kind in (found.texts, found.perplexities, found.evaluations)] == [1, 1, 1]
    assert not found.texts[0].finished and len(found.texts[0].metrics) == 20
    passed_over = {name: why for name, why in found.passed_over}
    assert set(passed_over) == set(PASSED_OVER)
    assert all(text in passed_over[name] for name, text in PASSED_OVER.items())

    copying = groups([run for run in found.tasks if run.result["task"] == "selective_copying"])
    assert sorted(len(group.runs) for group in copying) == [1, 2, 2]
    for group in copying:
        values = [run.value for run in group.runs]
        assert group.mean == pytest.approx(sum(values) / len(values))
        assert group.deviation == (None if len(values) == 1 else pytest.approx(stdev(values)))


def test_the_commands_are_those_of_the_runs(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (run,) = (run for run in gather([runs]).tasks if run.name == "recall-8-12")
    words = command(run).split()
    assert words[:2] == ["hf-recurrent", "train"] and "--cpu" in words
    assert cli.main(words[1:]) == 0
    again = json.loads((tmp_path / "runs" / "recall-8-12" / "task.json").read_text())
    assert {name: again[name] for name in ("sizes", "config", "accuracy", "parameters")} == {
        name: run.result[name] for name in ("sizes", "config", "accuracy", "parameters")
    }


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.sources = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]


def test_html(runs, tmp_path, capsys):
    output = tmp_path / "report.html"
    assert cli.main(["report", str(runs), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert f"13 results in {output}" in said and "Passed over: broken: task.json is not JSON" in said
    text, page = output.read_text(), Tags()
    page.feed(text)
    assert "script" not in page.tags and page.tags.count("img") == len(page.sources) == 9
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in page.sources)
    for told in ("37.0 ± 2.3 %", "Memory Horizon", "broken", "19 of 30, unfinished", "62.50", "-15.4 %", "piqa"):
        assert told in text
    assert "not run" not in text and "&lt;script&gt;alert(1)" in text
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_markdown(runs, tmp_path):
    output = tmp_path / "tables.md"
    flags = ["--papers", "--output", str(output)]
    assert cli.main(["report", str(runs / "copying-1-0"), str(runs / "copying-1-1"), *flags]) == 0
    text = output.read_text()
    assert re.search(r"\| minGRU \|.* 2 \| \d+\.\d\d ± \d+\.\d\d % \| 37\.0 ± 2\.3 % \|", text)
    assert re.search(r"\| S5 \|.* not run \| 62\.15 % \|", text)
    assert re.search(r"## Pendulum.*\n\n\| model \|.* seeds \| mean squared error \|", text)
    pictures = re.findall(r"\]\((.*?)\)", text)
    assert pictures and all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    # What lies there already is replaced, but for what is not ours.
    assert cli.main(["report", str(runs / "copying-1-0"), *flags]) == 0
    kept = tmp_path / "tables-pictures" / "thesis.txt"
    kept.write_text("mine")
    before = output.read_text()
    assert cli.main(["report", str(runs / "copying-2-0"), *flags]) == 2
    assert kept.read_text() == "mine" and output.read_text() == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "nowhere: no such folder"),
        ([".", "--output", "report.pdf"], "--output report.pdf: expected a name ending in .html or .md"),
        (["."], "there is nothing to report: .: holds no run: none of task.json"),
        ([".", "--output", "no/such/report.html"], "--output no/such/report.html: cannot be written"),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_long_labels_stand_whole_under_a_picture():
    figure_module = pytest.importorskip("matplotlib.figure")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    curve = [{"step": 1, "loss": 1.0, "accuracy": 0.5}]
    for long in (
        "x" * 60,
        "Longhorn, length 512, pairs 4, vocab size 256, steps 1,500, batch 64, lr 0.003, after recall",
    ):
        figure = figure_module.Figure((9, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        pictures.learning({long: [curve], f"{long}!": [curve], "short": [curve]}, "accuracy")(figure)
        figure.canvas.draw()
        for text in figure.legends[0].get_texts():
            extent = text.get_window_extent()
            assert 0 <= extent.x0 and extent.x1 <= figure.bbox.width


PLAIN = {
    "task": "associative_recall", "sizes": {}, "model_type": "mingru", "config": {}, "max_steps": 4, "batch_size": 2,
    "learning_rate": 0.003, "weight_decay": 0.0, "eval_examples": 4, "seed": 0, "parameters": 9, "metric": "accuracy",
    "accuracy": 0.5, "curve": [{"step": 4, "loss": 1.0, "accuracy": 0.5, "mse": 0.5}],
}  # fmt: skip


def gathered(folder, **runs):
    """What is gathered from files of results with these differences from PLAIN."""
    for name, changes in runs.items():
        (folder / name).mkdir()
        (folder / name / "task.json").write_text(json.dumps(PLAIN | changes))
    return gather([folder])


def section(runs):
    """The table of the one task, as a list of rows by column, and its pictures by name."""
    _, found, *_ = sections(runs)
    table, *parts = found.parts
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows], {part.name: part for part in parts}


def test_a_copy_of_a_run_is_no_other_seed(tmp_path):
    runs = gathered(tmp_path, a={}, b={"seed": 1, "accuracy": 0.7}, copy={}, longer={"max_steps": 5})
    assert [run.name for run in runs.tasks] == ["a", "b", "longer"]
    assert runs.passed_over == [("copy", "the same training with the same seed as a, which counts once")]
    first, second = groups(runs.tasks)
    assert (len(first.runs), first.mean, first.deviation) == (2, pytest.approx(0.6), pytest.approx(stdev([0.5, 0.7])))


def test_a_size_that_is_the_default_is_the_same_as_none(tmp_path):
    spelt = {"sizes": {"length": 512}, "config": {"hidden_size": 64, "num_hidden_layers": 2}, "seed": 1}
    (group,) = groups(gathered(tmp_path, a={}, b=spelt).tasks)
    assert len(group.runs) == 2


def test_runs_with_other_learning_rates_are_told_apart(tmp_path):
    lengths, rates = (64, 128, 512), (0.001, 0.003)
    runs = gathered(
        tmp_path,
        **{f"{n}-{rate}": {"sizes": {"length": n}, "learning_rate": rate} for n in lengths for rate in rates},
        decayed={"sizes": {"length": 64}, "weight_decay": 0.1},
    )
    rows, drawn = section(runs)
    assert [row["task's sizes"] for row in rows] == ["length 64"] * 3 + ["length 128"] * 2 + ["length 512"] * 2
    assert sorted(row["learning rate"] for row in rows[:3]) == ["0.001", "0.003", "0.003, weight decay 0.1"]
    figure = Figure()
    drawn["associative_recall-sizes"].draw(figure)
    lines = [container.lines[0].get_xdata().tolist() for container in figure.axes[0].containers]
    assert lines == [list(lengths)] * 2


def test_sizes_may_be_called_like_settings(tmp_path):
    """The pendulum has steps of its own."""
    runs = gathered(
        tmp_path,
        **{
            f"{steps}-{width}": {
                "task": "pendulum", "model_type": "s5", "sizes": {"steps": steps}, "config": {"hidden_size": width},
                "metric": "mse", "mse": 0.1,
            }
            for steps in (25, 50) for width in (32, 64)
        },
        later={"task": "pendulum", "model_type": "s5", "metric": "mse", "mse": 0.1, "parameters": 10},
    )  # fmt: skip
    _, drawn = section(runs)
    for name, number in (("pendulum-learning", 5), ("pendulum-sizes", 2)):
        figure = Figure((9, 4))
        drawn[name].draw(figure)
        (legend,) = figure.legends or [figure.axes[0].get_legend()]
        labels = [text.get_text() for text in legend.get_texts()]
        assert len(set(labels)) == len(labels) == number
