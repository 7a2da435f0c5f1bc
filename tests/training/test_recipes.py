"""Every recipe of examples/recipes, as `--dry-run` sees it: without data, without network, without training."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM

import hf_recurrent
from hf_recurrent import cli
from hf_recurrent.training import arguments
from hf_recurrent.training.costs import flops_per_token
from hf_recurrent.training.dryrun import count, dry_run, duration

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yaml"))
# Parameters: of the papers, as far as they are told.
MILLIONS = {"openwebtext_longhorn_125m": 125, "openwebtext_longhorn_350m": 350, "slimpajama_longhorn_1.3b": 1300}
MILLIONS |= {"wikitext103_gateloop_125m": 125}


def test_all_are_there():
    names = {f"shakespeare_char_{config.model_type}" for config in hf_recurrent.FAMILIES}
    assert {recipe.stem for recipe in RECIPES} == names | set(MILLIONS) | {"stdlib_mingru"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_valid(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parsed = arguments.parse([str(recipe), "--dry-run"])
    result = dry_run(*parsed)
    out = capsys.readouterr().out
    assert f"{result['parameters']:,}" in out and "GiB" in out and "time of the matrix products" in out
    assert not list(tmp_path.iterdir())
    assert recipe.stem in recipe.read_text() and parsed[2].output_dir in (f"runs/{recipe.stem}", "runs/demo")
    if recipe.stem in MILLIONS:
        assert result["parameters"] == pytest.approx(MILLIONS[recipe.stem] * 1e6, rel=0.12)


def test_counts_by_hand():
    config = hf_recurrent.MinGRUConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, expansion=1, conv_kernel=0, mlp_ratio=2
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counts = count(model, 3, 5)
    matrices = 2 * (8 * 16 + 8 * 16 + 16 * 8) + 8 * 11
    assert counts.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert counts.flops == 2 * matrices * 3 * 5
    assert 3 * 5 * 11 * 4 < counts.activations < 2**16
    model.gradient_checkpointing_enable()
    assert count(model.train(), 3, 5).activations < counts.activations


@pytest.mark.parametrize(
    ("config_class", "options"),
    [(config_class, {}) for config_class in hf_recurrent.FAMILIES]
    + [(hf_recurrent.S5Config, {"conj_sym": False}), (hf_recurrent.S5Config, {"bidirectional": True})],
)
def test_products_of_a_token_are_those_that_pytorch_counts(config_class, options):
    config = config_class(vocab_size=33, hidden_size=16, num_hidden_layers=2, **options)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(3, 40, dtype=torch.long))
    convolutions = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Conv1d))
    # Backward, each product is two.
    assert flops_per_token(model) == 3 * counter.get_total_flops() / (3 * 40) - 6 * convolutions


def test_checkpointing_keeps_less_for_more_products(capsys):
    flags = "--tokenizer bytes --dry-run --max-steps 10 --hidden-size 32 --sequence-length 64".split()
    plain = dry_run(*arguments.parse(flags))
    checkpointed = dry_run(*arguments.parse([*flags, "--gradient-checkpointing"]))
    assert checkpointed["activation_bytes"] < 0.6 * plain["activation_bytes"]
    head = 2 * 16 * 64 * 32 * 257
    assert checkpointed["flops_per_step"] == plain["flops_per_step"] * 4 // 3 - head
    assert plain["steps"] == 10 and plain["tokens_per_step"] == 16 * 64 and plain["seconds"] > 0


def test_a_context_over_processes_is_counted_for_one_of_them(capsys):
    flags = "--tokenizer bytes --batch-size 2 --max-steps 1 --sequence-length 64".split()
    whole = dry_run(*arguments.parse(flags))
    part = dry_run(*arguments.parse([*flags, "--context-parallel", "4"]))
    assert part["tokens_per_step"] == whole["tokens_per_step"] and part["state_bytes"] == whole["state_bytes"]
    assert part["flops_per_step"] * 4 == pytest.approx(whole["flops_per_step"], rel=0.05)
    assert part["activation_bytes"] < whole["activation_bytes"] / 3
    assert "step, on 4 processes" in capsys.readouterr().out
    learned = "--context-parallel 2 --config-overrides learned_initial_state=true".split()
    with pytest.raises(ValueError, match="learned_initial_state=False, got True"):
        dry_run(*arguments.parse([*flags, *learned]))


def test_the_estimate_is_for_the_device_of_the_run(monkeypatch):
    monkeypatch.setattr("hf_recurrent.training.dryrun.matrix_rate", lambda device: 1e9 if device == "cpu" else 1e12)
    flags = "--tokenizer bytes --dry-run --hidden-size 8 --sequence-length 16 --max-steps 10".split()
    seconds = [dry_run(*arguments.parse([*flags, *more]))["seconds"] for more in ([], ["--cpu"])]
    assert seconds[1] == pytest.approx(1000 * seconds[0])


def test_truncated_backpropagation_keeps_a_chunk():
    flags = "--tokenizer bytes --dry-run --hidden-size 32 --sequence-length 64 --bptt-chunk 16".split()
    chunk = dry_run(*arguments.parse(flags))
    carried = dry_run(*arguments.parse([*flags, "--bptt-carry-gradients"]))
    assert chunk["activation_bytes"] < 0.3 * carried["activation_bytes"]
    assert chunk["flops_per_step"] == carried["flops_per_step"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model-type", "mingrru"], "no such family; the nearest valid one is mingru"),
        (["--conv-kernel", "1"], "--conv-kernel: expected 0 (no convolution) or at least 2 taps, got 1"),
        (["--tokenizer", "./nowhere"], "--tokenizer ./nowhere: no such folder"),
        (["--total-batch-size", "4", "--gradient-accumulation-steps", "2"], "cannot both be given"),
        (["--bptt-chunk", "300"], "--bptt-chunk must be at most --sequence-length 256, got 300"),
        (["--vocab-size", "100"], "--vocab-size 100 is smaller than the byte alphabet"),
        (["--vocab-size", "300", "--model", "a"], "--vocab-size belongs to a new tokenizer"),
        (["--dataset", "a/b", "--streaming"], "with --streaming give --max-steps or --max-minutes"),
        (
            ["--sources", "{dataset: a/b, streaming: true}", "--num-epochs", "2", "--max-steps", "9"],
            "with --streaming give --max-steps or --max-minutes instead of --num-epochs",
        ),
        (["--log-with", "tensorbord"], "--log-with tensorbord: no such tracker; the nearest valid one is tensorboard"),
        (["--mixed-precision", "fp16", "--cpu"], "--mixed-precision fp16: Accelerate has it on accelerators only"),
    ],
)
def test_what_is_refused(flags, message, capsys):
    assert cli.main(["train", "--dry-run", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_tokenizer_that_does_not_fit_the_model(tmp_path, capsys):
    hf_recurrent.MinGRUConfig(vocab_size=11).save_pretrained(tmp_path)
    assert cli.main(["train", "--dry-run", "--model", str(tmp_path), "--tokenizer", "bytes"]) == 2
    assert "the tokenizer does not fit the model: it has 257 tokens" in capsys.readouterr().err


def test_durations():
    assert [duration(s) for s in (0.031, 59, 90, 4000, 250 * 86400)] == [
        "0.031 s",
        "59 s",
        "1.5 min",
        "1.1 h",
        "250 days",
    ]


def test_the_recurrence_has_its_own_learning_rate(tmp_path):
    from hf_recurrent.training.optimizer import create_optimizer

    config = hf_recurrent.GateLoopConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1)
    _, _, train = arguments.parse(["--learning-rate", "0.2", "--recurrence-learning-rate", "0.1"])
    optimizer = create_optimizer(AutoModelForCausalLM.from_config(config), train, torch.device("cpu"))
    assert {group["lr"] for group in optimizer.param_groups} == {0.1, 0.2}
