"""`hf-recurrent report`: runs of every kind in one page, and what cannot be used named there."""

import dataclasses
import html.parser
import json
import math
import os
import random
import re
import shlex
import shutil
from statistics import stdev

import pytest
from matplotlib.figure import Figure

from hf_recurrent import cli
from hf_recurrent.report import gather, pictures, write_report
from hf_recurrent.report.sections import commands as commands_of
from hf_recurrent.report.sections import groups, sections
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
    (line,) = commands_of(run)
    words = line.split()
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
        (folder / name).mkdir(parents=True)
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


def test_a_run_that_was_extended_is_another_training(tmp_path):
    training = TaskTraining("listops", {"shortest": 5, "longest": 8}, max_steps=3, batch_size=2, eval_examples=2)
    train_task(training, tmp_path / "whole")
    for steps in (1, 2, 3):
        extended = dataclasses.replace(training, max_steps=steps)
        train_task(extended, tmp_path / "extended", resume="auto")
    assert "extended" not in json.loads((tmp_path / "whole" / "task.json").read_text())
    found = gather([tmp_path])
    assert not found.passed_over
    table = sections(found)[1].parts[0]
    steps = table.columns.index("steps × batch")
    assert sorted(row[steps] for row in table.rows) == ["3 × 2", "3 × 2, extended at 1 and 2"]
    words = [words for words in commands(found) if "runs/extended" in words]
    assert [each[each.index("--max-steps") + 1] for each in words] == ["1", "2", "3"]
    assert ["--resume" in each for each in words] == [False, True, True]
    odd = gathered(
        tmp_path / "odd",
        stopped={"extended": [{"step": 1000, "max_steps": 2500}], "max_steps": 3000},
        **{f"odd-{i}": {"extended": x} for i, x in enumerate((7, [7], [{"step": 1}], [{"step": 0.5, "max_steps": 2}]))},
    )
    ((row,), _) = section(odd)
    assert row["steps × batch"] == "3,000 × 2, extended at 1,000 of 2,500"
    assert commands(odd)[0][-5:] == ["#", "stopped", "after", "step", "1,000"]
    assert {why for _, why in odd.passed_over} == {"task.json does not say at which steps it was extended"}


def test_digits_that_were_divided_otherwise_are_told_apart(tmp_path):
    digits = {"task": "digits", "model_type": "s5", "sizes": {"folder": "mnist"}, "parameters": 10}
    runs = gathered(tmp_path, before=digits, after=digits | {"division": "mixed"})
    rows, _ = section(runs)
    assert sorted(row["task's sizes"] for row in rows) == ["", "division mixed"] and not runs.passed_over
    odd = gathered(tmp_path / "odd", a={}, b={"division": ["mixed"]})
    assert odd.passed_over == [("b", "task.json has a division that is no name")]


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
    lines = [line.get_xdata().tolist() for line in figure.axes[0].lines]
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
        (legend,) = figure.legends or filter(None, (axes.get_legend() for axes in figure.axes))
        labels = [text.get_text() for text in legend.get_texts()]
        assert len(set(labels)) == len(labels) == number


def commands(runs):
    """The words of each command in the report."""
    (found,) = (section for section in sections(runs) if section.title == "Commands")
    return [shlex.split(line) for line in found.parts[0].lines]


def test_runs_that_began_with_others_are_told_apart_by_these(tmp_path):
    """Folders of the same name are not the same run."""
    started = {name: {"start_from": str(tmp_path / name / "base")} for name in "ab"}
    runs = gathered(
        tmp_path,
        **{"a/base": {"max_steps": 20}, "b/base": {"max_steps": 50}, "a/next": started["a"], "b/next": started["b"]},
    )
    rows, _ = section(runs)
    steps = sorted(row["steps × batch"] for row in rows)
    assert steps == ["20 × 2", "4 × 2, after a/base", "4 × 2, after b/base", "50 × 2"]
    flags = {words[words.index("--output-dir") + 1]: words for words in commands(runs)}
    for name in "ab":
        words = flags[f"runs/{name}/next"]
        assert words[words.index("--start-from") + 1] == f"runs/{name}/base" in flags


@pytest.mark.parametrize("place", ["here", "copied", "not gathered"])
def test_a_curriculum_with_several_seeds_is_one_row(tmp_path, place):
    first = tmp_path / "first"
    fields = {}
    for seed in (5, 6):
        fields[f"base-{seed}"] = {"max_steps": 20, "seed": seed}
        fields[f"next-{seed}"] = {"max_steps": 30, "seed": seed, "start_from": str(first / f"base-{seed}")}
        fields[f"last-{seed}"] = {"seed": seed, "start_from": str(first / f"next-{seed}")}
    runs = gathered(first, **fields)
    if place == "copied":
        shutil.copytree(first, tmp_path / "second")
        runs = gather([tmp_path / "second"])
    if place == "not gathered":
        runs = gather(first / f"last-{seed}" for seed in (5, 6))
    rows, _ = section(runs)
    found = sorted((row["steps × batch"], row["seeds"]) for row in rows)
    if place == "not gathered":
        assert found == [(f"4 × 2, after {first / f'next-{seed}'}", "1") for seed in (5, 6)]
        assert [words[words.index("--start-from") + 1] for words in commands(runs)] == [
            str(first / f"next-{seed}") for seed in (5, 6)
        ]
    else:
        after = ["20 × 2", "30 × 2, after base-5 and base-6", "4 × 2, after next-5 and next-6"]
        assert found == [(steps, "2") for steps in after]


def test_a_sweep_over_curricula(tmp_path):
    """What the lines began with differs in the same quantity."""
    runs = {}
    for layers in (1, 3):
        config = {"hidden_size": 8, "num_hidden_layers": layers}
        runs[f"base-{layers}"] = {"config": config, "parameters": layers}
        runs[f"next-{layers}"] = {"config": config, "parameters": layers, "max_steps": 30, "sizes": {"length": 999}}
        runs[f"next-{layers}"]["start_from"] = str(tmp_path / f"base-{layers}")
    _, pictures = section(gathered(tmp_path, **runs))
    figure = Figure((6, 4), layout="constrained")
    pictures["associative_recall-sizes"].draw(figure)
    assert [list(line.get_xdata()) for line in figure.axes[0].lines] == [[1, 3], [1, 3]]


def test_the_same_seed_after_starts_of_other_seeds_is_no_copy(tmp_path):
    starts = {f"base-{seed}": {"max_steps": 20, "seed": seed} for seed in (5, 6)}
    after = {f"after-{seed}": {"start_from": f"elsewhere/base-{seed}"} for seed in (5, 6)}
    runs = gathered(tmp_path, **starts, **after, **{"base-copy": starts["base-5"], "x": {"start_from": "base-copy"}})
    assert runs.passed_over == [
        ("base-copy", "the same training with the same seed as base-5, which counts once"),
        ("x", "the same training with the same seed as after-5, which counts once"),
    ]
    assert sorted(len(group.runs) for group in groups(runs.tasks)) == [2, 2]


def test_another_run_of_that_name_is_not_what_a_run_began_with(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    gathered(there, base={"max_steps": 20})
    started = {"start_from": str(there / "base")}
    runs = gathered(here, base={"max_steps": 50}, next=started)
    assert {run.start for run in runs.tasks} == {None, str(there / "base")}
    # Where the folder does not exist any more, the name is all that is known; two of that name are not.
    shutil.rmtree(there)
    assert {run.start for run in gather([here]).tasks} == {None, "base"}
    runs = gathered(tmp_path / "more", **{"a/base": {}, "b/base": {"seed": 1}, "next": {"start_from": "x/base/"}})
    assert {run.start for run in runs.tasks} == {None, "x/base"}
    # The end of the path may yet tell them apart.
    runs = gathered(tmp_path / "ends", **{"a/base": {}, "b/base": {"seed": 1}, "next": {"start_from": "x/b/base"}})
    assert {run.start for run in runs.tasks} == {None, "b/base"}


def test_runs_that_began_with_one_another(tmp_path):
    """What no training writes, but a damaged file may hold."""
    circle = {name: {"start_from": other, "seed": i} for i, (name, other) in enumerate(["ab", "bc", "ca"])}
    odd = {"self": {"start_from": "self", "seed": 7}, "long": {"start_from": "x" * 5000, "seed": 8}}
    runs = gathered(tmp_path, **circle, **odd)
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    runs = gathered(tmp_path, loops={"start_from": str(tmp_path / "loop" / "x"), "seed": 9})
    assert len(runs.tasks) == 6 and all(len(run.chain) <= 3 for run in runs.tasks)
    assert len(commands(runs)) == 6
    # A curriculum of many steps.
    many = {f"m{i}": {"max_steps": 100 + i, **({"start_from": f"m{i - 1}"} if i else {})} for i in range(1100)}
    runs = gathered(tmp_path / "many", **many)
    assert max(len(run.chain) for run in runs.tasks) == 1100 and len(runs.tasks[-1].training) < 10**6


def test_a_command_stands_behind_the_one_that_it_goes_on_from(tmp_path):
    runs = gathered(
        tmp_path, a={"start_from": "y"}, b={"seed": 1}, c={"start_from": "a"}, y={"start_from": "z"}, z={"max_steps": 9}
    )
    assert [words[words.index("--output-dir") + 1] for words in commands(runs)] == [
        f"runs/{name}" for name in ("z", "y", "a", "b", "c")
    ]


def test_a_command_drops_defaults_alone(tmp_path):
    (run,) = gathered(tmp_path, a={"learning_rate": 0, "weight_decay": 0.0, "sizes": {"noise": 0.0}}).tasks
    (line,) = commands_of(run)
    words = line.split()
    assert words[words.index("--learning-rate") + 1] == "0" and words[words.index("--task-args") + 1] == "noise=0.0"
    assert not {"--weight-decay", "--seed", "--start-from"} & set(words)


ROW = {"from": 1, "to": 1, "perplexity": 3.0}
ODD_FILES = [
    *(
        ("task.json", json.dumps(PLAIN | changes), message)
        for changes, message in (
            ({"sizes": {"length": "x"}}, "a length among the sizes that is no number"),
            ({"sizes": {"length": True}}, "a length among the sizes that is no number"),
            ({"sizes": {"length": [1]}}, "a length among the sizes that is no number"),
            ({"sizes": {"bogus": {"a": 1}}}, "a bogus among the sizes that is no number"),
            ({"sizes": {"length": 10**400}}, "a length among the sizes that is no number"),
            ({"config": [1]}, "no config as"),
            ({"curve": {"step": 1}}, "no curve as"),
            ({"curve": [5]}, "no result that is a finite number"),
            ({"curve": [{"accuracy": 0.5}]}, "a curve without steps"),
            ({"curve": [{"step": -1, "accuracy": 0.5}]}, "a curve without steps"),
            ({"curve": [{"step": 1, "accuracy": 0.5, "loss": "low"}]}, "a loss that is no finite number"),
            ({"accuracy": 10**400}, "no result that is a finite number"),
            ({"accuracy": math.nan}, "no result that is a finite number"),
            ({"accuracy": 62.5}, "an accuracy above 1"),
            ({"metric": "mse", "mse": 0.5}, "another metric than the task's, accuracy"),
            ({"max_steps": 0}, "no max_steps that is an integer from 1"),
            ({"max_steps": -5}, "no max_steps that is an integer from 1"),
            ({"max_steps": 1e3}, "no max_steps that is an integer from 1"),
            ({"batch_size": 10**30}, "no batch_size that is an integer from 1"),
            ({"seed": True}, "no seed that is an integer from 0"),
            ({"parameters": True}, "no parameters that is an integer from 1"),
            ({"learning_rate": True}, "no learning_rate that is a number from 0"),
            ({"learning_rate": math.inf}, "no learning_rate that is a number from 0"),
            ({"learning_rate": -1}, "no learning_rate that is a number from 0"),
            ({"weight_decay": math.nan}, "no weight_decay that is a number from 0"),
            ({"start_from": 5}, "a start_from that is no path"),
            ({"start_from": "a\0b"}, "a start_from that is no path"),
            ({"config": {"x": "\ud800"}}, "task.json is not JSON"),
        )
    ),
    ("task.json", "[" * 10**6, "task.json is not JSON"),
    *(
        ("perplexity.json", json.dumps({"perplexity": 3.0, "by_position": [ROW]} | changes), "perplexity.json is not")
        for changes in (
            {"by_position": [ROW | {"perplexity": 0}]}, {"by_position": [ROW | {"perplexity": -2.0}]},
            {"by_position": [ROW | {"to": "9"}]}, {"by_position": [ROW | {"from": -9}]}, {"by_position": []},
            {"by_position": [[1, 1, 3.0]]}, {"perplexity": 0}, {"sequence_length": "x"}, {"sequence_length": 0},
        )
    ),
    *(
        ("perplexity.json", json.dumps({"perplexity": 3.0, "by_position": [ROW]} | changes), "the model has diverged")
        for changes in ({"perplexity": 10**400}, {"perplexity": None}, {"by_position": [ROW | {"perplexity": None}]})
    ),
    *(
        ("lm-eval.json", json.dumps({"results": {"piqa": {"acc,none": 0.5}}, "configs": {"piqa": {}}} | changes), why)
        for changes, why in (
            ({"n-shot": 5}, "not the results of lm-eval"),
            ({"results": {"piqa": 0.5}}, "not the results of lm-eval"),
            ({"results": {"piqa": {"acc,none": 10**400}}}, "a number above"),
        )
    ),
    ("metrics.jsonl", '{"step": "x", "loss": 1}', "no metrics.jsonl yet"),
    ("metrics.jsonl", '{"step": 1, "loss": ' + "9" * 5000 + "}", "no metrics.jsonl yet"),
]  # fmt: skip


@pytest.mark.parametrize("file, content, why", ODD_FILES)
def test_one_odd_file_is_passed_over(tmp_path, file, content, why):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / file).write_text(content)
    runs = gathered(tmp_path, sound={})
    assert [run.name for run in runs.tasks] == ["sound"]
    ((name, told),) = runs.passed_over
    assert name == "odd" and why in told and "\n" not in told
    assert sections(runs)


def test_what_is_odd_but_hurts_nothing_is_shown(tmp_path):
    runs = gathered(
        tmp_path,
        machine={"machine": {"threads": "many"}, "seconds": -1e999, "half_rate": 5, "device": None},
        packages={"machine": {"threads": 1, "packages": 3, "cpu": None}, "seed": 1, "seconds": "long"},
        config={"config": {"hidden_size": [1, 2], "num_hidden_layers": None, "_$a$": "|"}},
        curve={"curve": [], "seed": 3, "sizes": {"length": 64}},
        **{"a | _b_ $x$": {"max_steps": 5}},
    )
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "metrics.jsonl").write_text('{"step": 1, "loss": "x"}\n{"step": 2, "loss": 1.5}\n[1]\n')
    runs = gather([tmp_path])
    assert runs.passed_over == [] and [run.metrics for run in runs.texts] == [[{"step": 1}, {"step": 2, "loss": 1.5}]]
    output = tmp_path / "report.html"
    write_report(runs, output)
    assert "6 results" in output.read_text()


def test_a_transition_that_cannot_be_shown_is_named(runs, tmp_path):
    shutil.copytree(runs / "horizon", tmp_path / "horizon")
    file = tmp_path / "horizon" / "task.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sizes": {"length": 24, "numbers": 900}}))
    found = gather([tmp_path])
    _, task, *_ = sections(found)
    assert not [part for part in task.parts if getattr(part, "name", "").startswith("transitions")]
    assert "its model knows" in found.passed_over[0][1]


def test_no_damage_ends_in_a_traceback(runs, tmp_path):
    """Values of the files are put in place of one another, or of what is unlike all of them."""
    rng = random.Random(0)
    strange = [
        None,
        True,
        -1,
        0,
        10**30,
        1e308,
        math.nan,
        "",
        "x" * 300,
        "$\\frac{$",
        [],
        [[]],
        {},
        {"a": {}},
        "\ud800",
    ]

    def damaged(value):
        if rng.random() < 0.08 or not value or not isinstance(value, (dict, list)):
            return rng.choice(strange) if rng.random() < 0.15 else value
        if isinstance(value, dict):
            return {name: damaged(one) for name, one in value.items()}
        return [damaged(one) for one in value]

    sources = [runs / "pendulum" / "task.json", runs / "horizon" / "task.json", runs / "text" / "perplexity.json"]
    sources += [runs / "text" / "lm-eval.json"]
    for number in range(40):
        for source in sources:
            folder = tmp_path / f"{source.parent.name}-{source.stem}-{number}"
            folder.mkdir()
            (folder / source.name).write_text(json.dumps(damaged(json.loads(source.read_text()))))
    found = gather([tmp_path])
    assert len(found.passed_over) > 40 and found.tasks and found.perplexities and found.evaluations
    write_report(found, tmp_path / "report.html")


def test_folders_of_any_name(tmp_path):
    name = os.fsdecode(b"caf\xe9 | x")
    try:
        (tmp_path / name).mkdir()
    except OSError:
        pytest.skip("names are UTF-8 here")
    (tmp_path / name / "task.json").write_text(json.dumps(PLAIN))
    (tmp_path / os.fsdecode(b"\xe9")).mkdir()
    (tmp_path / os.fsdecode(b"\xe9") / "task.json").write_text("{")
    write_report(gather([tmp_path]), tmp_path / "r.md")
    assert "caf" in (tmp_path / "r.md").read_text(encoding="utf-8")


def test_what_stands_behind_plus_minus_is_said_once(tmp_path):
    half_rates = [
        {"accuracy": 0.5, "accuracy_without_rescaling": 0.2},
        {"accuracy": 0.7, "accuracy_without_rescaling": 0},
    ]
    tones = {"task": "tones", "model_type": "s5"}
    several = gathered(
        tmp_path / "several",
        a={}, b={"seed": 1},
        **{f"tones-{seed}": tones | {"seed": seed, "half_rate": half_rates[seed]} for seed in (0, 1)},
        **{"tones-long": tones | {"max_steps": 9, "half_rate": half_rates[0]}},
    )  # fmt: skip
    write_report(several, tmp_path / "several.md")
    text = (tmp_path / "several.md").read_text()
    assert text.count("standard deviation") == 1 and "± is the sample standard deviation over the seeds" in text
    assert "| 60.00 ± 14.14 % | 10.00 ± 14.14 % |" in text and "| 50.00 % | 20.00 % |" in text
    write_report(gathered(tmp_path / "one", a={}, b={"max_steps": 9}), tmp_path / "one.md")
    assert "standard deviation" not in (tmp_path / "one.md").read_text()


def test_a_run_with_a_bar_in_its_name_stays_in_its_cell(tmp_path):
    folder = tmp_path / "x | y"
    folder.mkdir()
    results = {"piqa": {"acc,none": 0.625}}
    (folder / "lm-eval.json").write_text(json.dumps({"results": results, "configs": {"piqa": {}}, "n-shot": None}))
    _, found = sections(gather([tmp_path]))
    for table in found.parts:
        (row,) = table.rows
        assert len(row) == len(table.columns) and row[0] == "x | y"
    assert found.parts[0].rows[0][1] == "62.50"


def test_the_papers_digits(tmp_path):
    _, *found = sections(gathered(tmp_path, a={}), with_papers=True)
    (digits,) = (section for section in found if section.title == "Digits, pixel by pixel")
    table = digits.parts[0]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["model"], row["accuracy"], row["the paper's"]) for row in rows] == [
        ("S5", "not run", "99.65 %"), ("S5", "not run", "98.67 %"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sizes, value", [({}, "99.65 %"), ({"permutation": None}, "99.65 %"), ({"permutation": 0}, "98.67 %")]
)
def test_a_run_on_digits(tmp_path, sizes, value):
    changes = {"task": "digits", "model_type": "s5"}
    runs = gathered(
        tmp_path,
        a=changes | {"sizes": sizes | {"folder": "/data/mnist"}},
        b=changes | {"sizes": sizes | {"folder": "/data/mnist"}, "seed": 1},
        other=changes | {"sizes": sizes | {"folder": "/data/other"}},
    )
    rows, _ = section(runs)
    assert sorted((row["seeds"], row["the paper's"]) for row in rows) == [("1", value), ("2", value)]
    assert {row["task's sizes"] for row in rows} == {"permutation 0" if sizes.get("permutation") == 0 else ""}
    (line,) = commands_of(runs.tasks[0])
    assert "folder=/data/mnist" in line and "null" not in line
