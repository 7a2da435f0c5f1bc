"""What does not fit is refused in one line, before anything is written; what was there stays."""

import json
import sys

import pytest
import torch
from minGRU_pytorch.minLM import minLM
from references import longhorn_checkpoint, longhorn_config, s5_checkpoint
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

import hf_recurrent
from hf_recurrent import cli
from hf_recurrent.conversion import FORMATS, convert
from hf_recurrent.conversion.flax_msgpack import write_msgpack


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run `convert` in tmp_path; returns what it printed. A refused one leaves one line and no file."""
    monkeypatch.chdir(tmp_path)

    def call(*argv, status=0):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        assert cli.main(["convert", *map(str, argv)]) == status
        out, err = capsys.readouterr()
        if status == 0:
            return out
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        assert out == "" and err.startswith("hf-recurrent: error: ") and err.count("\n") == 1
        return err

    return call


@pytest.fixture
def minlm(tmp_path):
    """The state dict of a minLM with 300 tokens, in minlm.pt."""
    tensors = minLM(num_tokens=300, dim=8, depth=2).state_dict()
    torch.save(tensors, tmp_path / "minlm.pt")
    return tensors


@pytest.fixture
def s5(tmp_path):
    write_msgpack(tmp_path / "s5.msgpack", s5_checkpoint())


def test_the_whole_way(run, minlm, tmp_path):
    out = run("minlm.pt", "ours", "--tokenizer", "bytes")
    assert "mingru-pytorch -> MinGRUForCausalLM: " in out and "model.safetensors" in out
    assert len(AutoTokenizer.from_pretrained(tmp_path / "ours")) == 257
    assert GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id == 256
    assert AutoConfig.from_pretrained(tmp_path / "ours").dtype == torch.float32
    out = run("ours", "back.pt", "--to", "mingru-pytorch")
    assert "MinGRUForCausalLM -> mingru-pytorch" in out and "Written: back.pt" in out


def test_the_report_of_a_warm_start(run, tmp_path):
    config = MambaConfig(vocab_size=9, hidden_size=8, state_size=2, num_hidden_layers=2)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    assert "--from transformers-mamba makes it the warm start" in run("mamba", "ours", status=2)
    out = run("mamba", "ours", "--from", "transformers-mamba")
    assert "Initialised: model.layers.*.mixer.dt_head.weight, model.layers.*.mixer.dt_head.bias\n" in out
    assert "Dropped: backbone.layers.*.mixer.A_log, backbone.layers.*.mixer.dt_proj.weight" in out
    assert "has to be trained" in out
    assert "cannot become a Mamba" in run("ours", "back", "--to", "transformers-mamba", status=2)


def test_formats(run, minlm, s5, tmp_path):
    assert "no such format; the nearest valid one is mingru-pytorch" in run(
        "minlm.pt", "x", "--from", "mingru", status=2
    )
    assert all(name in run("minlm.pt", "x", "--from", "nonsense", status=2) for name in FORMATS)
    message = run("minlm.pt", "x", "--from", "gateloop-transformer", status=2)
    assert "not those of Transformer of gateloop-transformer; they are those of minLM" in message
    torch.save({"x": torch.ones(2)}, tmp_path / "x.pt")
    assert "of no format that is known" in run("x.pt", "y", status=2)
    assert "it holds x" in run("x.pt", "y", status=2)
    assert "no such file or folder" in run("none.pt", "x", status=2)
    assert "--to needs a folder with a model of this package" in run("minlm.pt", "x.pt", "--to", "longhorn", status=2)
    run("minlm.pt", "ours")
    assert "--to names the format to write" in run("ours", "x", status=2)
    assert "takes a GateLoopForCausalLM, got a MinGRUForCausalLM" in run(
        "ours", "y.pt", "--to", "gateloop-transformer", status=2
    )
    assert "must be a file named *.pt or *.pth" in run("ours", "x", "--to", "mingru-pytorch", status=2)
    assert "cannot be combined" in run("ours", "x.pt", "--to", "mingru-pytorch", "--tokenizer", "bytes", status=2)
    assert "cannot be combined" in run("ours", "x.pt", "--to", "mingru-pytorch", "--activation", "x", status=2)


def test_what_a_checkpoint_does_not_say(run, s5):
    message = run("s5.msgpack", "x", status=2)
    for name in ("activation", "conj-sym", "discretization", "clip-eigs", "prenorm", "pooling"):
        assert f"--{name} " in message
    assert "--norm " not in message and "--assume-defaults" in message
    given = "--conj-sym true --discretization zoh --clip-eigs false --prenorm true --pooling mean".split()
    assert "does not say what the model needs: --activation half_glu1|half_glu2" in run(
        "s5.msgpack", "x", *given, status=2
    )
    assert "--activation must be one of half_glu1, half_glu2, got 'relu'" in run(
        "s5.msgpack", "x", *given, "--activation", "relu", status=2
    )
    assert "--liquid has no meaning for this checkpoint" in run(
        "s5.msgpack", "x", "--assume-defaults", "--liquid", "false", status=2
    )
    out = run("s5.msgpack", "x", "--activation", "half_glu2", "--assume-defaults")
    assert "Assumed, as the checkpoint does not say: conj-sym true, discretization zoh" in out
    assert "reads features, not tokens" in run("s5.msgpack", "y", "--assume-defaults", "--tokenizer", "bytes", status=2)


def test_an_option_of_another_source(run, minlm):
    assert "--activation has no meaning for this checkpoint" in run("minlm.pt", "x", "--activation", "gelu", status=2)


def test_half_a_checkpoint_and_too_much(run, minlm, tmp_path):
    def save(tensors):
        torch.save(tensors, tmp_path / "x.pt")

    for lost in ("norm.weight", "token_emb.weight", "layers.1.4.2.bias", "layers.0.4.0.weight"):
        save({name: x for name, x in minlm.items() if name != lost})
        assert f"half a checkpoint: it lacks {lost}" in run("x.pt", "y", status=2)
    save({name: x for name, x in minlm.items() if not name.startswith("layers.0.")})
    run("x.pt", "y", status=2)
    save({name.replace("layers.1.", "layers.2."): x for name, x in minlm.items()})
    assert "half a checkpoint: it lacks layers.1" in run("x.pt", "y", status=2)
    save(minlm | {f"extra.{i}": torch.ones(1) for i in range(7)})
    assert "no place for: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more" in run("x.pt", "y", status=2)
    save(minlm | {"norm.weight": torch.ones(9)})
    assert "norm.weight must have the shape (8,), got (9,)" in run("x.pt", "y", status=2)
    save(minlm | {"token_emb.weight": torch.ones(8)})
    assert "token_emb.weight must have 2 dimensions, got (8,)" in run("x.pt", "y", status=2)
    save(minlm | {"layers.0.2.to_hidden_and_gate.weight": torch.ones(25, 8)})
    assert "must have a multiple of 2 rows, got 25" in run("x.pt", "y", status=2)
    save(minlm | {"norm.weight": torch.ones(8, dtype=torch.int64)})
    assert "norm.weight must hold floats of 16, 32 or 64 bits, got int64" in run("x.pt", "y", status=2)


def test_mixed_dtypes(run, minlm, tmp_path):
    torch.save(minlm | {"norm.weight": torch.ones(8, dtype=torch.bfloat16)}, tmp_path / "x.pt")
    assert "mixed dtypes, bfloat16 and float32: --dtype says which" in run("x.pt", "y", status=2)
    assert "float32" in run("x.pt", "y", "--dtype", "float32")
    assert "no such dtype; the nearest valid one is float16" in run("x.pt", "z", "--dtype", "float1", status=2)
    torch.save(minlm | {"norm.weight": torch.full((8,), 1e6)}, tmp_path / "x.pt")
    assert "model.norm.weight, as float16: is not finite" in run("x.pt", "z", "--dtype", "float16", status=2)


def test_longhorns_biases_and_ties(run, tmp_path):
    folder = tmp_path / "longhorn"
    folder.mkdir()
    tensors = longhorn_checkpoint(bias=True)
    tensors["backbone.layers.1.mixer.in_proj.bias"][0] = 1
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(longhorn_config()))
    assert "in_proj.bias is not zero, but the original's forward pass leaves it out" in run("longhorn", "x", status=2)
    tensors = longhorn_checkpoint()
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    torch.save(tensors, folder / "pytorch_model.bin")
    assert "are tied, but hold different weights" in run("longhorn", "x", status=2)


def test_what_a_format_cannot_say(run, tmp_path):
    def save(**fields):
        config = hf_recurrent.MinGRUConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, **fields)
        hf_recurrent.MinGRUForCausalLM(config).save_pretrained(tmp_path / "ours")
        return run("ours", "x.pt", "--to", "mingru-pytorch", status=2)

    fields = {"conv_kernel": 0, "use_mlp_bias": True, "norm_eps": torch.finfo(torch.float32).eps}
    assert "cannot say norm_eps = 1e-06" in save(**fields | {"norm_eps": 1e-6})
    assert "cannot say candidate = 'vanilla'" in save(**fields, candidate="vanilla")
    assert "cannot say hidden_act = 'relu'" in save(**fields, hidden_act="relu")
    assert "they differ in" in save(**fields | {"conv_kernel": 4})
    assert "they differ in" in save(**fields, use_bias=True)
    assert "they differ in" in save(**fields, tie_word_embeddings=True)
    assert "they differ in" in save(**fields | {"mlp_ratio": 0})


def test_a_bare_s5_layer(run, tmp_path):
    from s5.s5_model import S5

    torch.save(S5(4, 4).state_dict(), tmp_path / "s5.pt")
    assert "an S5 layer without a block" in run("s5.pt", "x", status=2)


def test_destinations(run, minlm, tmp_path):
    run("minlm.pt", "ours")
    assert "exists: replace it by --overwrite" in run("minlm.pt", "ours", status=2)
    run("minlm.pt", "ours", "--overwrite", "--dtype", "bfloat16")
    assert AutoConfig.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16
    torch.save(minlm | {"norm.weight": torch.full((8,), float("nan"))}, tmp_path / "x.pt")
    assert "is not finite" in run("x.pt", "ours", "--overwrite", status=2)  # and the earlier one is as it was
    (tmp_path / "home" / "photos").mkdir(parents=True)
    assert "no model's folder" in run("minlm.pt", "home", "--overwrite", status=2)
    assert "there is no folder" in run("minlm.pt", "no/such/folder", status=2)
    assert "a file of that name is in the way" in run("minlm.pt", "x.pt", "--overwrite", status=2)
    assert "must lie apart" in run("ours", "ours", "--to", "longhorn", "--overwrite", status=2)
    (tmp_path / "empty").mkdir()
    run("minlm.pt", "empty")
    (tmp_path / "back.pt").write_text("before")
    assert "exists" in run("ours", "back.pt", "--to", "mingru-pytorch", "--dtype", "float32", status=2)
    run("ours", "back.pt", "--to", "mingru-pytorch", "--dtype", "float32", "--overwrite")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_destinations_by_other_names(run, minlm, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    run("minlm.pt", "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").is_file()
    for name in (".", "../real"):  # the folder that the command is run in
        monkeypatch.chdir(tmp_path / "real")
        assert cli.main(["convert", str(tmp_path / "minlm.pt"), name, "--overwrite"]) == 0
        assert (tmp_path / "real" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "minlm.pt", "real"]


def test_sizes_of_shards(run, minlm):
    for size in ("banana", "5", "0GB"):
        assert "--max-shard-size: must be a size such as 500MB" in run(
            "minlm.pt", "x", "--max-shard-size", size, status=2
        )


def test_odd_configurations(run, tmp_path):
    folder = tmp_path / "longhorn"
    folder.mkdir()
    torch.save(longhorn_checkpoint(), folder / "pytorch_model.bin")  # one matrix under two names
    (folder / "config.json").write_text(json.dumps(longhorn_config(tie_embeddings=False)))
    run("longhorn", "untied")
    assert AutoConfig.from_pretrained(tmp_path / "untied").tie_word_embeddings is False
    (folder / "config.json").write_text(json.dumps(longhorn_config() | {"model_type": ["x"]}))
    run("longhorn", "other")


def test_complex_tensors_have_no_bfloat16(run, tmp_path):
    from s5.s5_model import S5Block

    torch.save(S5Block(4, 4, False).state_dict(), tmp_path / "s5.pt")
    run("s5.pt", "ours", "--assume-defaults", "--dtype", "bfloat16")
    assert "cannot be of bfloat16: --dtype float32" in run("ours", "back.pt", "--to", "s5-pytorch", status=2)
    run("ours", "back.pt", "--to", "s5-pytorch", "--dtype", "float32")


def test_a_tokenizer_that_does_not_fit(run, tmp_path):
    torch.save(minLM(num_tokens=255, dim=8, depth=1).state_dict(), tmp_path / "x.pt")
    message = run("x.pt", "y", "--tokenizer", "bytes", status=2)
    assert "has 257 tokens, the checkpoint's vocabulary 255" in message
    words = Tokenizer(models.WordLevel({"a": 0, "b": 5000, "<s>": 1}, unk_token="<s>"))  # ids with gaps
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<s>").save_pretrained(tmp_path / "words")
    assert "has 5,001 tokens" in run("x.pt", "y", "--tokenizer", "words", status=2)


def test_a_model_of_bytes_alone_writes_and_is_measured(run, tmp_path, capsys):
    """As the original's own training makes it, of enwik8; no token of it ends a text."""
    torch.save(minLM(num_tokens=256, dim=8, depth=1).state_dict(), tmp_path / "x.pt")
    run("x.pt", "y", "--tokenizer", "bytes")
    model, text = ["--model", str(tmp_path / "y"), "--cpu"], "naïve — 日本語<|endoftext|>\n"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "y")
    assert len(tokenizer) == 256 and tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode()), skip_special_tokens=True) == text
    config = AutoConfig.from_pretrained(tmp_path / "y")
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(tokenizer, token) is None and getattr(config, token) is None
    (tmp_path / "text.txt").write_text(text)
    assert cli.main(["evaluate", "perplexity", *model, "--data-files", str(tmp_path / "text.txt")]) == 0
    assert f"over {len(text.encode())} bytes" in capsys.readouterr().out
    assert cli.main(["generate", *model, "--prompt", "naïve", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("naïve")
    assert cli.main(["train", *model, "--data-files", str(tmp_path / "text.txt"), "--max-steps", "1"]) == 2
    assert "y: its tokenizer has no end-of-sequence token to mark where documents end" in capsys.readouterr().err
    flags = ["--tokenizer", "bytes", "--data-files", str(tmp_path / "text.txt"), "--max-steps", "1"]
    assert cli.main(["train", *model, *flags]) == 2
    assert "of 256 bytes alone, and training needs <|endoftext|> beside them" in capsys.readouterr().err


def test_the_command_knows_every_option():
    from hf_recurrent.cli.convert import OPTIONS, _parser

    assert set(OPTIONS) == {option.name for source in FORMATS.values() for option in source.options}
    assert all(f"\n  {name} " in _parser().format_help() for name in FORMATS)


def test_a_full_disk_or_a_locked_folder(minlm, tmp_path, monkeypatch):
    """Whatever fails while files are written leaves what was there."""
    convert(tmp_path / "minlm.pt", tmp_path / "ours")
    before = (tmp_path / "ours" / "model.safetensors").read_bytes()
    folder = tmp_path / "ours"
    inode = folder.stat().st_ino

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["hf_recurrent.conversion.to_ours"], "save_file", full)
    with pytest.raises(OSError, match="No space left on device; what was saved before is untouched"):
        convert(tmp_path / "minlm.pt", folder, overwrite=True, dtype="float64")
    assert folder.stat().st_ino == inode and (folder / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["minlm.pt", "ours"]
