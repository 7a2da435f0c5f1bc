"""push and pull against a Hub on loopback: what arrives is what was sent, and what fails leaves nothing broken."""

import json
import logging
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import TOKEN, FakeHub, Repo
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file

import hf_recurrent
from hf_recurrent import cli
from hf_recurrent.conversion import convert
from hf_recurrent.hub import card
from hf_recurrent.hub.card import model_card
from hf_recurrent.hub.staging import load
from hf_recurrent.training.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What a training run leaves."""
    path = tmp_path_factory.mktemp("run") / "books"
    torch.manual_seed(0)
    config = hf_recurrent.LonghornConfig(
        vocab_size=257, hidden_size=16, num_hidden_layers=2, state_size=4, eos_token_id=256, pad_token_id=256
    )
    hf_recurrent.LonghornForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    settings = {
        "model_type": "longhorn", "hidden_size": 16, "config_overrides": "state_size=4", "learning_rate": 0.002,
        "data_files": ["/home/somebody/books/a.txt", "b.txt"], "output_dir": "/home/somebody/runs",
        "license": "mit", "language": ["en", "de"],
    }  # fmt: skip
    (path / "train.yaml").write_text(yaml.safe_dump(settings))
    lines = [{"step": 0, "validation_loss": 5.5}, {"step": 7, "loss": 2.5}]
    last = {"step": 8, "validation_loss": 2.25, "validation_perplexity": 9.4877, "validation_bits_per_byte": 3.246}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, last]))
    (path / "loss.png").write_bytes(b"\x89PNG")
    (path / "checkpoints").mkdir()
    return path


@pytest.fixture
def run(capfd, caplog):
    """Run a command; returns what it printed. A refused one leaves one line, which is returned. No token is seen."""

    def call(*argv, status=0):
        with caplog.at_level(logging.DEBUG):
            assert cli.main(list(map(str, argv))) == status
        out, err = capfd.readouterr()
        assert TOKEN not in out + err + caplog.text and "f00dcafe" not in out
        if status == 0:
            return out
        lines = [line for line in err.splitlines() if line.startswith("hf-recurrent: error: ")]
        assert len(lines) == 1 and err.rstrip().endswith(lines[0]) and "f00dcafe" not in lines[0]
        return lines[0].removeprefix("hf-recurrent: error: ")

    return call


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def head(hub: FakeHub, repo_id: str = "me/books", branch: str = "main") -> dict[str, bytes]:
    repo = hub.repos[repo_id]
    return repo.commits[repo.branches[branch]]


# ---- there and back --------------------------------------------------------------------------------------------------


def test_what_arrives_is_what_was_sent(hub, folder, run, tmp_path):
    out = run("push", folder, "me/books", "--max-shard-size", "10KB", "--private")
    sha = hub.repos["me/books"].branches["main"]
    assert out == f"Pushed: {hub.url}/me/books/commit/{sha}\n"
    assert hub.repos["me/books"].private
    there = head(hub)
    shards = [name for name in there if name.endswith(".safetensors")]
    assert len(shards) > 1 and "model.safetensors.index.json" in there
    others = {
        "README.md",
        "config.json",
        "generation_config.json",
        "modeling_longhorn.py",
        "loss.png",
        ".gitattributes",
    }
    tokenizer = {name for name in files(folder) if name.startswith("tokenizer")}
    assert set(there) == {*shards, "model.safetensors.index.json", *others, *tokenizer}
    assert all(there[name] == (folder / name).read_bytes() for name in tokenizer)

    assert run("pull", "me/books", tmp_path / "pulled") == f"Pulled: me/books at {sha} into {tmp_path / 'pulled'}\n"
    assert files(tmp_path / "pulled") == there
    assert [path.name for path in tmp_path.iterdir()] == ["pulled"]
    sent = load_file(folder / "model.safetensors")
    got = {}
    for shard in shards:
        got |= load_file(tmp_path / "pulled" / shard)
    assert sent.keys() == got.keys() and all(torch.equal(sent[name], got[name]) for name in sent)
    assert load(tmp_path / "pulled").config.architectures == ["LonghornForCausalLM"]


def test_a_second_push_replaces_the_first_in_one_commit(hub, folder, run, tmp_path):
    run("push", folder, "me/books", "--max-shard-size", "10KB")
    first = hub.repos["me/books"].branches["main"]
    run("push", folder, "me/books", "--standalone")
    there = head(hub)
    assert [name for name in there if name.endswith(".safetensors")] == ["model.safetensors"]
    assert "model.safetensors.index.json" not in there
    assert b"class LonghornMixer" in there["modeling_longhorn.py"]
    assert [path for method, path in hub.requests if "/commit/" in path] == ["/api/models/me/books/commit/main"] * 2

    run("push", folder, "me/books", "--revision", "trial")
    assert "class LonghornMixer" not in head(hub, branch="trial")["modeling_longhorn.py"].decode()
    assert b"class LonghornMixer" in head(hub)["modeling_longhorn.py"]
    run("pull", "me/books", tmp_path / "a", "--revision", first)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    run("pull", "me/books", tmp_path / "a", "--overwrite")
    assert files(tmp_path / "a") == head(hub)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_card_of_ones_own_stays(hub, folder, run, tmp_path):
    run("push", folder, "me/books")
    repo = hub.repos["me/books"]
    repo.commit("main", head(hub) | {"README.md": b"---\nlicense: mit\n---\n\nMine.\n"})
    run("push", folder, "me/books")
    assert head(hub)["README.md"].endswith(b"Mine.\n")
    own = tmp_path / "own"
    load(folder).save_pretrained(own)
    (own / "README.md").write_text("---\nlicense: other\n---\n\nFrom the folder.\n")
    run("push", own, "me/own")
    assert head(hub, "me/own")["README.md"].decode().endswith("From the folder.\n")


def test_push_to_hub(hub, folder, tmp_path):
    model = load(folder)
    url = model.push_to_hub("me/books", tokenizer=byte_tokenizer(), license="mit")
    assert url.startswith(hub.url)
    there = head(hub)
    assert there["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert "tokenizer.json" in there and "loss.png" not in there
    assert ModelCard(there["README.md"].decode()).data.license == "mit"
    with pytest.raises(ValueError, match="code must be one of 'shim', 'standalone', got 'magic'"):
        model.push_to_hub("me/books", code="magic")
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="the model's weights are not finite: model.embed_tokens.weight"):
        model.push_to_hub("me/books")
    config = hf_recurrent.S5Config(vocab_size=13, hidden_size=8, num_hidden_layers=1, norm="batch")
    model = hf_recurrent.S5ForCausalLM(config)
    model.model.layers[0].mixer_norm.running_var.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    for refused in (lambda: model.push_to_hub("me/books"), lambda: load(tmp_path)):
        with pytest.raises(ValueError, match="are not finite: model.layers.0.mixer_norm.running_var$"):
            refused()


def test_saving_pushes_the_code_too(hub, folder, tmp_path):
    """By Transformers' own `save_pretrained(push_to_hub=True)`."""
    load(folder).save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/books")
    there, saved = head(hub), files(tmp_path / "saved")
    assert "LonghornForCausalLM" in there["modeling_longhorn.py"].decode()
    assert json.loads(there["config.json"])["auto_map"]["AutoConfig"] == "modeling_longhorn.LonghornConfig"
    assert all(there[name] == content for name, content in saved.items())


# ---- the card --------------------------------------------------------------------------------------------------------


def test_the_card_tells_facts(hub, folder, run):
    run("push", folder, "me/books")
    card = ModelCard(head(hub)["README.md"].decode())
    data = card.data
    assert (data.license, data.language, data.library_name) == ("mit", ["en", "de"], "transformers")
    assert (data.pipeline_tag, data.datasets) == ("text-generation", None)
    assert "arxiv:2407.14207" in data.tags and "longhorn" in data.tags
    results = {result.metric_type: result.metric_value for result in data.eval_results}
    assert results == {"loss": 2.25, "perplexity": 9.4877, "bits_per_byte": 3.246}
    assert data.eval_results[0].dataset_name == "held-out documents of a.txt, b.txt"
    model = load(folder)
    cache = model(torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values
    for line in (
        f"| parameters | {model.num_parameters():,} |",
        f"| cache per sequence | {cache.nbytes:,} bytes, whatever its length |",
        "| config_overrides | state_size=4 |",
        "| data_files | a.txt, b.txt |",
        'model = AutoModelForCausalLM.from_pretrained("me/books")',
        "![training and validation loss](loss.png)",
        "held-out documents of a.txt, b.txt, after step 8",
    ):
        assert line in card.text, line
    assert "somebody" not in str(card)
    run("push", folder, "me/other", "--license", "apache-2.0", "--language", "fr", "--standalone")
    card = ModelCard(head(hub, "me/other")["README.md"].decode())
    assert (card.data.license, card.data.language) == ("apache-2.0", ["fr"])
    assert "trust_remote_code=True" in card.text and "import hf_recurrent" not in card.text


def test_the_card_tells_what_lm_eval_found(folder, tmp_path):
    folder = Path(shutil.copytree(folder, tmp_path / "books"))
    results = {
        "configs": {name: {"dataset_path": "json"} for name in ("piqa", "pairs", "more")},
        "results": {
            "piqa": {"acc,none": 0.75, "acc_stderr,none": 0.01},
            "pairs": {"acc,none": 0.5},
            "more": {"acc,none": 1},
        },
        "n-shot": {"piqa": 0},
        "lm_eval_version": "0.4.13",
    }
    (folder / "lm-eval.json").write_text(json.dumps(results))
    card = model_card(load(folder), "me/books", source=folder)
    found = {one.dataset_name: one.metric_value for one in ModelCard(str(card)).data.eval_results if one.source_name}
    assert found == {"piqa": 0.75, "pairs": 0.5, "more": 1}
    assert "By lm-evaluation-harness 0.4.13:" in card.text and "| piqa | acc | 0.7500 |" in card.text
    (folder / "lm-eval.json").write_text("[]")
    with pytest.raises(ValueError, match="lm-eval.json: not the results of lm-eval"):
        model_card(load(folder), "me/books", source=folder)


def test_nothing_is_invented(hub, tmp_path, run):
    config = hf_recurrent.S5Config(hidden_size=8, num_hidden_layers=1, state_size=4, num_blocks=1, bidirectional=True)
    hf_recurrent.S5ForSequenceClassification(config).save_pretrained(tmp_path / "s5")
    run("push", tmp_path / "s5", "me/s5")
    card = ModelCard(head(hub, "me/s5")["README.md"].decode())
    data = card.data
    assert (data.license, data.language, data.datasets, data.eval_results) == (None, None, None, None)
    assert data.pipeline_tag == "text-classification"
    for heading in ("## Training", "## Evaluation", "cache per sequence"):
        assert heading not in card.text


def test_tokens_reach_no_card(hub, folder, run, tmp_path):
    secrets = [
        TOKEN, "0123456789abcdef" * 2 + "01234567", "sk-proj-abcdefghijklmnop", "hunter2word",
        "ghp_" + "a" * 36, "pw4me",
    ]  # fmt: skip
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    settings = yaml.safe_load((copy / "train.yaml").read_text())
    settings |= {
        "dataset": f"https://user:{secrets[3]}@example.com/x?token={TOKEN}",
        "data_files": [f"hf://{TOKEN}@x"],
        "config_overrides": f"api_key={secrets[2]},wandb={secrets[1]}",
        "text_column": f"Authorization: Bearer {secrets[5]}",
        "validation_split": f"a{secrets[4]}",
        "hub_token": secrets[4],
        "language": [TOKEN],
        "license": TOKEN,
    }
    (copy / "train.yaml").write_text(yaml.safe_dump(settings))
    run("push", copy, "me/books")
    for name, content in head(hub).items():
        for secret in secrets:
            assert secret.encode() not in content, (name, secret)
    assert ModelCard(head(hub)["README.md"].decode()).data.license == "***"


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_connection_cut_in_an_upload(hub, folder, run):
    """Once: the client tries again. Every time: the repository stays as it was."""
    run("push", folder, "me/books", "--max-shard-size", "10KB")
    before = dict(head(hub))
    hub.blobs.clear()
    uploads = []

    def once(handler):
        if handler.command == "PUT":
            uploads.append(handler.path)
            return "cut" if len(uploads) == 1 else None

    hub.fault = once
    run("push", folder, "me/books")
    assert len(uploads) == 2 and head(hub)["model.safetensors"] == (folder / "model.safetensors").read_bytes()

    hub.blobs.clear()
    repo = hub.repos["me/books"]
    commit, hub.fault = repo.branches["main"], lambda handler: "cut" if handler.command == "PUT" else None
    error = run("push", folder, "me/books", "--max-shard-size", "10KB", status=2)
    assert error.startswith("me/books: ") and error.endswith("; nothing was pushed")
    assert repo.branches["main"] == commit and "model-00001-of-00002.safetensors" not in head(hub)
    assert len(before) > len(head(hub))


def test_a_connection_cut_in_a_download(hub, folder, run, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    run("push", folder, "me/books")
    cuts, ranges = [], []

    def once(handler):
        if handler.command == "GET" and handler.path.endswith("model.safetensors"):
            cuts.append(handler.path)
            ranges.append(handler.headers.get("Range"))
            return "cut" if len(cuts) == 1 else None

    hub.fault = once
    run("pull", "me/books", tmp_path / "model")
    size = (folder / "model.safetensors").stat().st_size
    assert len(ranges) == 2 and 0 < int(ranges[1].removeprefix("bytes=").removesuffix("-")) <= size // 2
    assert files(tmp_path / "model") == head(hub)

    before = files(tmp_path / "model")
    hub.fault = lambda handler: 503 if handler.command == "GET" and "safetensors" in handler.path else None
    error = run("pull", "me/books", tmp_path / "model", "--overwrite", status=2)
    expected = f"me/books: the Hub answered 503: try again later; there is nothing new in {tmp_path / 'model'}"
    assert error == expected
    assert files(tmp_path / "model") == before
    assert run("pull", "me/books", tmp_path / "new", status=2).startswith("me/books: the Hub answered 503")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_was_damaged_on_the_way(hub, folder, run, tmp_path):
    run("push", folder, "me/books")
    weights = head(hub)["model.safetensors"]
    repo, sha = hub.repos["me/books"], hub.repos["me/books"].branches["main"]

    class Lying(bytes):
        """Is sent as it is, but described as what it was."""

    from hub_server import Handler

    described = Handler.described
    good = described("model.safetensors", weights), described("model.safetensors", weights, "oid")
    repo.commits[sha] = head(hub) | {"model.safetensors": Lying(weights[:-4] + b"oops")}
    try:
        Handler.described = staticmethod(
            lambda name, content, oid="blobId": (
                good[oid == "oid"] if isinstance(content, Lying) else described(name, content, oid)
            )
        )
        error = run("pull", "me/books", tmp_path / "x", status=2)
    finally:
        Handler.described = staticmethod(described)
    assert error.startswith("me/books: model.safetensors is not what the Hub says it is (its checksum)")

    def refusal(**changed) -> str:
        content = {name.replace("__", "."): value for name, value in changed.items()}
        kept = {name: value for name, value in (head_files | content).items() if value is not None}
        repo.commit("main", kept)
        return run("pull", "me/books", tmp_path / "x", status=2)

    head_files = head(hub) | {"model.safetensors": weights}
    assert refusal(config__json=None) == "me/books: has no config.json, so it holds no model"
    assert refusal(model__safetensors=None) == "me/books: has no weights in model.safetensors"
    assert "model.safetensors is not a whole safetensors file" in refusal(model__safetensors=weights[:-1])
    index = json.dumps({"weight_map": {"a": "../../etc/passwd"}}).encode()
    assert "names a file outside of its folder" in refusal(model__safetensors__index__json=index)
    assert "is damaged" in refusal(model__safetensors__index__json=b"[]")
    assert "is damaged" in refusal(model__safetensors__index__json=b'{"weight_map": {}}')
    assert not list(tmp_path.iterdir())

    # Pickles stay where they are.
    repo.commit("main", head_files | {"pytorch_model.bin": b"cos\nsystem"})
    run("pull", "me/books", tmp_path / "x")
    assert "pytorch_model.bin" not in files(tmp_path / "x")


def test_what_the_hub_refuses(hub, folder, run, tmp_path, monkeypatch):
    run("push", folder, "me/books")
    pull = ("pull", "me/books", tmp_path / "x")
    assert "me/books: has no revision nowhere" in run(*pull, "--revision", "nowhere", status=2)
    missing = f"me/nothing: there is no such repository at {hub.url}, or it is hidden from your token; "
    assert run("pull", "me/nothing", tmp_path / "x", status=2).startswith(missing)
    for name in ("books", "me/books/x", "me/bo oks", "-me/books", "me/a--b"):
        assert run("pull", f"./{name}" if name[0] == "-" else name, tmp_path / "x", status=2).count("user/repo") == 1
        assert "user/repo" in run("push", folder, f"./{name}" if name[0] == "-" else name, status=2)
    refused = "others/x: the token may not do this: it needs write access to the repository; nothing was pushed"
    assert run("push", folder, "others/x", status=2) == refused
    for status, reason in (
        (409, "the repository has changed meanwhile, or another commit is under way: try again"),
        (500, "the Hub answered 500: try again later"),
        (401, "the Hub refuses the token; log in by `hf auth login`, or set HF_TOKEN"),
        (418, "the Hub refused: "),
    ):
        hub.fault = lambda handler, status=status: status if "/commit/" in handler.path else None
        error = run("push", folder, "me/books", status=2)
        assert error.startswith(f"me/books: {reason}") and error.endswith("; nothing was pushed"), error
    hub.fault = lambda handler: None

    hub.repos["me/gated"] = Repo(gated=True)
    hub.repos["me/hidden"] = Repo(private=True)
    monkeypatch.delenv("HF_TOKEN")
    no_token = "there is no token; log in by `hf auth login`, or set HF_TOKEN; nothing was pushed"
    assert run("push", folder, "me/books", status=2) == f"me/books: {no_token}"
    error = run("pull", "me/gated", tmp_path / "x", status=2)
    assert error.startswith(f"me/gated: is gated: ask for access at {hub.url}/me/gated, then log in by")
    assert "or it is private: log in by `hf auth login`" in run("pull", "me/hidden", tmp_path / "x", status=2)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "wrong" * 8)
    assert "me/books: the Hub refuses the token" in run("push", folder, "me/books", status=2)
    assert not list(tmp_path.iterdir())


def test_without_a_network(hub, folder, run, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:pw4me@127.0.0.1:9")  # where nobody listens
    for argv in (("push", folder, "me/books"), ("pull", "me/books", tmp_path / "x")):
        error = run(*argv, status=2)
        assert error.startswith("me/books: http://***@127.0.0.1:9 cannot be reached, or the connection was cut (")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for argv in (("push", folder, "me/books"), ("pull", "me/books", tmp_path / "x")):
        assert "me/books: HF_HUB_OFFLINE is set, so the Hub is not asked" in run(*argv, status=2)
    assert not list(tmp_path.iterdir())


def test_folders_that_are_refused(hub, folder, run, tmp_path):
    run("push", folder, "me/books")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    notes = ("pull", "me/books", tmp_path / "notes")
    assert "exists, and is not empty: replace it by --overwrite" in run(*notes, status=2)
    assert "holds no model, and is not replaced" in run(*notes, "--overwrite", status=2)
    (tmp_path / "notes" / "checkpoints").mkdir()
    (tmp_path / "notes" / "config.json").write_text("{}")
    assert "holds a training run's checkpoints, and is not replaced" in run(*notes, "--overwrite", status=2)
    shutil.rmtree(tmp_path / "notes" / "checkpoints")
    (tmp_path / "notes" / "config.json").unlink()
    assert "DIR no/where: no such folder" in run("push", "no/where", "me/books", status=2)
    assert "has no config.json" in run("push", tmp_path / "notes", "me/books", status=2)
    assert files(tmp_path) == {"notes/a.txt": b"mine"}


# ---- from_pretrained -------------------------------------------------------------------------------------------------

HERE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("me/books", trust_remote_code=True)  # imports hf_recurrent itself
assert type(model).__module__ == "hf_recurrent.modeling.longhorn", type(model)
assert AutoTokenizer.from_pretrained("me/books")("a")["input_ids"] == [97]
model.save_pretrained(sys.argv[1])  # copies no source: the one module takes the classes from the package
(module,) = __import__("pathlib").Path(sys.argv[1]).glob("*.py")
assert "from hf_recurrent import (" in module.read_text()
import hf_recurrent
local = AutoModelForCausalLM.from_pretrained(sys.argv[2])
again = AutoModelForCausalLM.from_pretrained("me/books", revision="trial")
ids = torch.arange(9)[None]
assert torch.equal(model(ids).logits, local(ids).logits) and torch.equal(again(ids).logits, local(ids).logits)
"""
ELSEWHERE = """
import sys
sys.path.append(sys.argv[1])
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("me/books", revision="trial", trust_remote_code=True)
assert model.generate(torch.arange(9)[None], max_new_tokens=3, do_sample=False).shape == (1, 12)
assert "hf_recurrent" not in sys.modules
try:
    AutoModelForCausalLM.from_pretrained("me/books", trust_remote_code=True)
except ImportError as error:
    assert "not found in your environment: hf_recurrent. Run `pip install hf_recurrent`" in str(error), error
else:
    sys.exit("loaded")
"""


def test_from_pretrained(hub, folder, run, tmp_path):
    run("push", folder, "me/books")
    run("push", folder, "me/books", "--revision", "trial", "--standalone")
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": "", "PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1])}
    environment |= {"HF_RECURRENT_CACHE": str(tmp_path / "kernels")}
    here = [sys.executable, "-W", "ignore", "-c", HERE, str(tmp_path / "saved"), str(folder)]
    elsewhere = [sys.executable, "-I", "-S", "-c", ELSEWHERE, sysconfig.get_paths()["purelib"]]
    started = [
        subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for command in (here, elsewhere)
    ]
    for process in started:
        error = process.communicate()[1]
        assert process.returncode == 0, error


def test_a_card_of_several_sources():
    sources = [{"data_files": ["/home/somebody/a.txt"], "weight": 2}, {"dataset": "me/prose", "streaming": True}]
    assert card._evaluated_on({"sources": sources}) == "held-out documents of a.txt, me/prose"
    table = card._training({"sources": sources}, Path("/nowhere"))
    assert "| sources | (data_files: a.txt, weight: 2), (dataset: me/prose, streaming: True) |" in table


def test_the_example_converts_and_pushes(hub, folder, tmp_path, monkeypatch, capsys):
    convert(folder, tmp_path / "original", to_format="longhorn")
    example = Path(__file__).parents[2] / "examples" / "convert_and_push.py"
    argv = [tmp_path / "original", tmp_path / "ours", "--tokenizer", "bytes", "--push", "me/books", "--license", "mit"]
    monkeypatch.setattr(sys, "argv", ["convert_and_push.py", *map(str, argv)])
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    assert "longhorn to LonghornForCausalLM" in said and hub.url in said
    branch = hub.repos["me/books"]
    files = branch.commits[branch.resolve("main")]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
