"""`hf-recurrent evaluate lm` on real tasks: BLiMP from local files, as pairs and as questions with letters."""

import contextlib
import fcntl
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import lm_eval
import pytest
import torch
import yaml
from lm_eval.models.huggingface import HFLM

import hf_recurrent
from hf_recurrent import cli
from hf_recurrent.evaluation import harness
from hf_recurrent.evaluation.lm import RecurrentLM
from hf_recurrent.evaluation.tables import PAPER_TASKS, model_index, paper_cells, paper_table
from hf_recurrent.training.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
BLIMP = ROOT.parent / "shared" / "data" / "blimp"
needs_blimp = pytest.mark.skipif(not BLIMP.is_dir(), reason="BLiMP's files are not at ../shared/data/blimp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = hf_recurrent.LonghornConfig(
        hidden_size=16, num_hidden_layers=2, state_size=4, vocab_size=257, initializer_range=0.3
    )
    hf_recurrent.LonghornForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_caches(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def tasks(tmp_path):
    """A folder of task files for two of BLiMP's paradigms, and one that lacks its data."""
    spec = importlib.util.spec_from_file_location("blimp_tasks", ROOT / "examples" / "blimp_tasks.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    source = tmp_path / "blimp"
    source.mkdir()
    for name in ("adjunct_island", "causative"):
        (source / f"{name}.jsonl").write_bytes((BLIMP / f"{name}.jsonl").read_bytes())
    (source / "gone.jsonl").write_text("{}\n")
    assert script.write_tasks(source, tmp_path / "tasks") == ["adjunct_island", "causative", "gone"]
    (source / "gone.jsonl").unlink()
    return tmp_path / "tasks"


def run(folder, tasks, *flags) -> int:
    return cli.main(["evaluate", "lm", "--model", str(folder), "--cpu", "--include-path", str(tasks), *flags])


@needs_blimp
def test_the_command_gives_what_hf_gives(folder, tasks, tmp_path, capsys):
    names = ["blimp_local_adjunct_island", "blimp_letters_causative"]
    flags = ["--tasks", ",".join(names), "--limit", "30", "--num-fewshot", "2", "--output", str(tmp_path / "out")]
    assert run(folder, tasks, *flags) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names) and "Written: lm-eval.json" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lm-eval.json"]
    ours = json.loads((tmp_path / "out" / "lm-eval.json").read_text())
    assert ours["config"]["model"] == folder.name and ours["n-shot"] == dict(zip(names, (0, 2), strict=True))

    model = hf_recurrent.LonghornForCausalLM.from_pretrained(folder).eval()
    manager = harness.find_tasks(names, [str(tasks)])
    theirs = lm_eval.simple_evaluate(
        HFLM(model, tokenizer=byte_tokenizer(), batch_size=8, max_length=1 << 20),
        tasks=harness.load_tasks(manager, names), num_fewshot=2, limit=30, task_manager=manager, log_samples=False,
    )  # fmt: skip
    for name in names:
        assert ours["results"][name]["acc,none"] == theirs["results"][name]["acc,none"]
    entries = {entry["dataset"]["name"]: entry for entry in model_index(ours, "books")[0]["results"]}
    assert set(entries) == set(names) and entries[names[1]]["dataset"]["args"] == {"num_few_shot": 2}
    (metric,) = entries[names[1]]["metrics"]
    assert metric["type"] == "acc" and metric["value"] == ours["results"][names[1]]["acc,none"]


@needs_blimp
def test_lm_eval_alone_loads_a_trained_model(tasks, tmp_path, capsys):
    """In a process where nobody imports hf_recurrent but the folder's own code."""
    corpus, run_folder = tmp_path / "corpus.txt", tmp_path / "run"
    corpus.write_text("The cat sat on the mat.\n" * 400)
    flags = ["--data-files", str(corpus), "--tokenizer", "bytes", "--hidden-size", "16", "--num-hidden-layers", "1"]
    flags += ["--sequence-length", "32", "--max-steps", "2", "--output-dir", str(run_folder), "--cpu"]
    assert cli.main(["train", *flags]) == 0
    name = "blimp_local_causative"
    assert run(run_folder, tasks, "--tasks", name, "--limit", "20", "--output", str(tmp_path / "ours")) == 0
    ours = json.loads((tmp_path / "ours" / "lm-eval.json").read_text())["results"][name]["acc,none"]

    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", name, "--limit", "20", "--device", "cpu"]
    command += ["--model_args", f"pretrained={run_folder},trust_remote_code=True", "--include_path", str(tasks)]
    command += ["--output_path", str(tmp_path / "theirs")]
    caches = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_DATASETS_CACHE": str(tmp_path / "data")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | caches | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "theirs").rglob("results_*.json")
    assert json.loads(file.read_text())["results"][name]["acc,none"] == ours


@needs_blimp
def test_an_interrupted_evaluation_goes_on(folder, tasks, tmp_path, capsys, monkeypatch):
    flags = ["--tasks", "blimp_local_causative", "--limit", "40", "--batch-size", "8"]
    flags += ["--output", str(tmp_path / "out")]
    read, asked, calls = RecurrentLM._loglikelihood_tokens, [], 0

    def interrupted(self, requests, **kwargs):
        def stop(*args):
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            return inner(*args)

        asked.append(len(requests))
        inner = self._reader.read
        if len(asked) == 1:
            self._reader.read = stop
        return read(self, requests, **kwargs)

    monkeypatch.setattr(RecurrentLM, "_loglikelihood_tokens", interrupted)
    assert run(folder, tasks, *flags) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    (kept,) = (tmp_path / "out").iterdir()
    assert kept.name.startswith(".lm-eval-")
    assert run(folder, tasks, *flags) == 0
    assert asked[0] == 80 and 0 < asked[1] < 80
    went_on = json.loads((tmp_path / "out" / "lm-eval.json").read_text())["results"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lm-eval.json"]
    assert run(folder, tasks, *flags[:-1], str(tmp_path / "again")) == 0
    assert json.loads((tmp_path / "again" / "lm-eval.json").read_text())["results"] == went_on


def questions(tmp_path, **changes) -> dict:
    """A task file's content, on four questions of its own."""
    rows = [{"q": f"who {n}", "c": ["the cat", "the dog"]} for n in range(4)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"task": "questions", "doc_to_text": "{{q}}", "doc_to_choice": "{{c}}", "doc_to_target": 0}
    task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "questions.jsonl")}}
    task |= {"output_type": "multiple_choice", "validation_split": "train", "fewshot_split": "train"}
    return task | {"metric_list": [{"metric": "acc"}]} | changes


def write_tasks(folder, *tasks) -> Path:
    folder.mkdir(exist_ok=True)
    for task in tasks:
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return folder


def test_no_results_are_lost(folder, tmp_path, capsys):
    own = write_tasks(tmp_path / "own", questions(tmp_path), questions(tmp_path, task="others"))
    out = tmp_path / "out"
    out.mkdir()
    other_models = out / ".lm-eval-0123456789abcdef_rank0.db"
    other_models.write_bytes(b"kept")
    assert run(folder, own, "--tasks", "questions", "--output", str(out)) == 0
    assert other_models.read_bytes() == b"kept"
    before = (out / "lm-eval.json").read_text()
    assert run(folder, own, "--tasks", "others", "--output", str(out)) == 2
    assert "holds lm-eval.json of an earlier evaluation: replace it by --overwrite" in capsys.readouterr().err
    assert (out / "lm-eval.json").read_text() == before
    assert run(folder, own, "--tasks", "quest*, ?thers", "--output", str(out), "--overwrite") == 0
    results = json.loads((out / "lm-eval.json").read_text())
    assert set(results["results"]) == {"questions", "others"} and results["max_length"] is None

    model = hf_recurrent.LonghornForCausalLM.from_pretrained(folder).eval()
    kept = out / f".lm-eval-{harness.fingerprint(RecurrentLM(model, tokenizer=byte_tokenizer()))}_rank0.db"
    kept.write_bytes(b"no database" * 100)
    assert run(folder, own, "--tasks", "questions", "--output", str(out), "--overwrite", "--batch-size", "1") == 2
    expected = f"{kept}: what an interrupted evaluation has kept cannot be read (file is not a database): remove it"
    assert expected in capsys.readouterr().err
    for table, row in (("unnamed (key TEXT, value BLOB)", ("a", b"\x80\x04cut")), ("unnamed (other TEXT)", ("a",))):
        kept.unlink()
        with contextlib.closing(sqlite3.connect(kept)) as database, database:
            database.execute(f"CREATE TABLE {table}")
            database.execute(f"INSERT INTO unnamed VALUES ({', '.join('?' * len(row))})", row)
        assert run(folder, own, "--tasks", "questions", "--output", str(out), "--overwrite", "--batch-size", "1") == 2
        assert f"{kept}: what an interrupted evaluation has kept cannot be read (" in capsys.readouterr().err
    kept.unlink()
    (tmp_path / "file").write_text("")
    assert run(folder, own, "--tasks", "questions", "--output", str(tmp_path / "file")) == 2
    assert f"--output {tmp_path / 'file'}: cannot be made (File exists)" in capsys.readouterr().err


def test_one_evaluation_at_a_time_in_a_folder(folder, tmp_path, capsys):
    own = write_tasks(tmp_path / "own", questions(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)  # as another process does
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert run(folder, own, "--tasks", "questions", "--output", str(out)) == 2
    assert f"error: {out}: another evaluation is writing there; wait" in capsys.readouterr().err
    os.close(descriptor)
    assert run(folder, own, "--tasks", "questions", "--output", str(out)) == 0


def test_one_model_evaluated_twice(folder, tmp_path):
    own = write_tasks(tmp_path / "own", questions(tmp_path))
    model = hf_recurrent.LonghornForCausalLM.from_pretrained(folder).eval()
    lm = RecurrentLM(model, tokenizer=byte_tokenizer())
    results = []
    for output in (tmp_path, None, tmp_path):
        tasks = harness.load_tasks(harness.find_tasks(["questions"], [str(own)]), ["questions"])
        results.append(harness.evaluate(lm, tasks, output=output)["results"])
    assert results[0] == results[1] == results[2]


def test_a_launcher_of_several_processes_is_refused(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(folder, tmp_path, "--tasks", "questions") == 2
    assert "evaluate lm runs in one process, got 2 of a launcher" in capsys.readouterr().err


def test_groups_and_files_that_name_what_is_not_there(folder, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"q": ')

    def data(files):
        return {"data_files": str(files)}

    own = write_tasks(
        tmp_path / "own",
        questions(tmp_path),
        questions(tmp_path, task="pattern", dataset_kwargs=data(tmp_path / "no*.jsonl")),
        questions(tmp_path, task="empty", dataset_kwargs=data(tmp_path / "empty.jsonl")),
        questions(tmp_path, task="bad", dataset_kwargs=data(tmp_path / "bad.jsonl")),
        questions(tmp_path, task="local", dataset_path=str(tmp_path / "nowhere"), dataset_kwargs={}),
    )
    for name, members in (("group", ["question"]), ("circle", ["questions", "circle"])):
        (own / f"{name}.yaml").write_text(yaml.safe_dump({"group": name, "task": members}))
    (own / "broken.yaml").write_text("task: broken\ndataset_path: [")
    for name, message in (
        ("group", "--tasks group group: question: no such task; the nearest valid ones are questions"),
        ("circle", "--tasks circle: the group circle contains itself"),
        ("broken", f"{own / 'broken.yaml'} cannot be read: "),
        ("pattern", f"task pattern: its data is not there: looked for {tmp_path / 'no*.jsonl'}"),
        ("empty", f"task empty: its data {tmp_path / 'empty.jsonl'} cannot be loaded: there is nothing in it"),
        ("bad", f"task bad: its data {tmp_path / 'bad.jsonl'} cannot be loaded: "),
        ("local", f"task local: its data is not there: looked for {tmp_path / 'nowhere'}"),
    ):
        assert run(folder, own, "--tasks", name) == 2
        said = capsys.readouterr().err
        assert message in said and "Traceback" not in said and "An error occurred while" not in said


def test_task_files_that_cannot_be_used(folder, tmp_path, capsys):
    own = write_tasks(
        tmp_path / "own",
        questions(tmp_path, task="none", doc_to_choice=None),
        questions(tmp_path, task="field", doc_to_text="{{who.is}}"),
        questions(tmp_path, task="metric", metric_list=[{"metric": "accc"}]),
        questions(tmp_path, task="zero", num_fewshot=0),
        questions(tmp_path, task="some"),
        questions(tmp_path, task="filter", output_type="generate_until", generation_kwargs={"max_gen_toks": 1},
                  metric_list=[{"metric": "exact_match"}], filter_list=[
                      {"name": "f", "filter": [{"function": "regex", "regex_pattern": "(("}]}]),
    )  # fmt: skip
    for flags, message in (
        (["filter"], "lm-eval: error: missing ), unterminated subpattern at position 1"),
        (["none"], "document 0 of task none: its choices cannot be told: TypeError"),
        (["field"], "task field: lm-eval cannot use its file: UndefinedError: 'who' is undefined"),
        (["metric"], "task metric: lm-eval cannot use its file: KeyError: None"),
        (["some", "--num-fewshot", "9"], "--num-fewshot 9: a task has fewer examples to choose from"),
    ):
        assert run(folder, own, "--tasks", *flags) == 2
        assert f"hf-recurrent: error: {message}\n" in capsys.readouterr().err
    assert run(folder, own, "--tasks", "zero,some", "--num-fewshot", "2") == 0
    assert "warning: --num-fewshot: the files of zero say 0, which stays" in capsys.readouterr().err


def test_a_tokenizer_that_does_not_fit(tmp_path, capsys):
    config = hf_recurrent.MinGRUConfig(hidden_size=8, num_hidden_layers=1, vocab_size=100)
    hf_recurrent.MinGRUForCausalLM(config).save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    own = write_tasks(tmp_path / "own", questions(tmp_path))
    assert run(tmp_path / "small", own, "--tasks", "questions") == 2
    message = "error: lm-eval: IndexError: request 0 holds the token id 119, outside the vocabulary of 100"
    assert message in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("hello")
    flags = ["--model", str(tmp_path / "small"), "--data-files", str(tmp_path / "text.txt"), "--cpu"]
    assert cli.main(["evaluate", "perplexity", *flags]) == 2
    assert "its tokenizer does not fit: token 0 of the stream is 104, outside the" in capsys.readouterr().err


def test_results_are_kept_by_model_and_settings(folder):
    model = hf_recurrent.LonghornForCausalLM.from_pretrained(folder).eval()
    prints = [
        harness.fingerprint(RecurrentLM(model, tokenizer=byte_tokenizer(), max_length=n)) for n in (None, None, 9)
    ]
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3
    prints.append(harness.fingerprint(RecurrentLM(model, tokenizer=byte_tokenizer())))
    assert prints[0] == prints[1] and len(set(prints)) == 3


@needs_blimp
def test_what_is_not_there(folder, tasks, tmp_path, capsys, monkeypatch):
    def error(*flags, model=folder) -> str:
        assert run(model, tasks, *flags) == 2
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-recurrent: error: ")]
        assert len(said) == 1
        return said[0]

    missing = tmp_path / "blimp" / "gone.jsonl"
    expected = f"task blimp_local_gone: its data is not there: looked for {missing}"
    assert expected in error("--tasks", "blimp_local_gone")
    assert expected in error("--tasks", "blimp_local")  # as a member of a group
    message = error("--tasks", "blimp_local_causativ,blimp_local")
    assert "--tasks blimp_local_causativ: no such task; the nearest valid ones are blimp_local_causative, " in message
    assert "--include-path" in error("--tasks", "a", "--include-path", str(tmp_path / "none"))
    for flags, expected in (
        (["--limit", "0"], "--limit: must be a number of documents"),
        (["--limit", "1.5"], "--limit: must be a number of documents"),
        (["--batch-size", "0"], "--batch-size: must be at least 1, got 0"),
        (["--batch-size", "many"], "--batch-size: invalid int value: 'many'"),
        (["--num-fewshot", "-1"], "--num-fewshot: must be at least 0, got -1"),
    ):
        assert expected in error("--tasks", "blimp_local_causative", *flags)

    bare = tmp_path / "bare"
    hf_recurrent.LonghornForCausalLM.from_pretrained(folder).save_pretrained(bare)
    assert "holds no tokenizer" in error("--tasks", "blimp_local_causative", model=bare)

    empty = (tasks / "blimp_letters_causative.yaml").read_text().replace("- A\n", "- ''\n")
    empty = empty.replace("blimp_letters_", "e_")
    (tasks / "e.yaml").write_text(empty + "target_delimiter: ''\n")
    assert "task e_causative: a choice is empty" in error("--tasks", "e_causative", "--limit", "3")

    rows = [{"q": "who", "c": ["the cat", "" if number == 2 else "the dog"]} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    later = {"task": "later", "doc_to_text": "{{q}}", "doc_to_choice": "{{c}}", "doc_to_target": 0}
    later |= {"dataset_path": "json", "dataset_kwargs": {"data_files": str(tmp_path / "rows.jsonl")}}
    later |= {"output_type": "multiple_choice", "validation_split": "train", "metric_list": [{"metric": "acc"}]}
    (tasks / "later.yaml").write_text(yaml.safe_dump(later))
    assert "document 2 of task later: choice 1 is empty" in error("--tasks", "later")
    assert run(folder, tasks, "--tasks", "later", "--limit", "2") == 0

    monkeypatch.setattr("hf_recurrent.hub.access.why_unreachable", lambda: "no network")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    far = yaml.safe_load(empty) | {"task": "far", "dataset_path": "some/data", "dataset_kwargs": {}}
    (tasks / "far.yaml").write_text(yaml.safe_dump(far))
    message = error("--tasks", "far")
    assert "task far: its dataset some/data cannot be loaded: it is neither here nor in the cache" in message
    assert "datasets--some--data" in message and "some___data" in message


def test_the_papers_group_and_table(tmp_path):
    manager = harness.TaskManager(include_path=[harness.TASKS], include_defaults=False)
    members = manager.task_index["longhorn_paper"].cfg["task"]
    assert members == [*(task for _, task, _ in PAPER_TASKS), "wikitext", "lambada_openai"]
    defaults = Path(lm_eval.__file__).parent / "tasks"
    folders = ("piqa", "hellaswag", "winogrande", "arc", "openbookqa", "siqa", "super_glue", "wikitext", "lambada")
    files = [path.read_text() for name in folders for path in (defaults / name).rglob("*.yaml")]
    for member in members:
        assert any(f"task: {member}\n" in text for text in files)

    results = {
        "config": {"model": "tiny"},
        "results": {
            task: {"alias": task, f"{metric},none": 0.5, f"{metric}_stderr,none": 0.1}
            for _, task, metric in PAPER_TASKS
        },
        "configs": {"piqa": {"dataset_path": "baber/piqa", "validation_split": "validation"}},
    }
    results["results"]["wikitext"] = {"word_perplexity,none": 12.25, "byte_perplexity,none": float("inf")}
    header, _, row = paper_table(results).splitlines()
    assert header.count("|") == row.count("|") == 13
    assert [f"| {' | '.join(cells)} |" for cells in paper_cells(results)] == [header, row]
    assert row == "| tiny |" + " 50.00 |" * 9 + " 12.25 | – |"
    assert paper_table(results | {"config": {"model": "a|b"}}).splitlines()[2].startswith("| a\\|b | 50.00 |")
    del results["results"]["boolq"]
    assert paper_table(results).splitlines()[2] == "| tiny |" + " 50.00 |" * 7 + " – | – | 12.25 | – |"
    (entry,) = model_index(results, "tiny")[0]["results"]
    assert entry["dataset"] == {"name": "piqa", "type": "baber/piqa", "split": "validation"}
    assert entry["metrics"] == [{"name": "acc", "type": "acc", "value": 0.5}]
    assert entry["source"]["url"].startswith("https://github.com/")
