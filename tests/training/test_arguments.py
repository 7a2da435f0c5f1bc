import dataclasses
import math
from typing import get_args

import pytest

from hf_recurrent.cli.parser import CommandLineError
from hf_recurrent.training.arguments import DataArguments, ModelArguments, TrainArguments, flag, parse, to_yaml

ARGUMENTS = (ModelArguments, DataArguments, TrainArguments)


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_flags():
    model, data, train = parse(["--hidden-size", "32", "--data_files", "a", "b", "--learning-rate=1e-2", "--overwrite"])
    assert model.hidden_size == 32 and data.data_files == ["a", "b"]
    assert train.learning_rate == 1e-2 and train.overwrite and not train.resume


def test_a_file_and_flags_that_override_it(config):
    path = config(
        """
        hidden-size: 48
        num_hidden_layers: 2
        learning_rate: 1e-3   # text to YAML 1.1
        mixed_precision: no   # false to YAML 1.1
        data_files: [a.txt, b.txt]
        config_overrides: {candidate: vanilla, norm_eps: 1.0e-5}
        overwrite: true
        max_minutes: null
        """
    )
    model, data, train = parse([path, "--hidden-size", "64"])
    assert (model.hidden_size, model.num_hidden_layers) == (64, 2)
    assert (train.learning_rate, train.mixed_precision, train.overwrite) == (1e-3, "no", True)
    assert data.data_files == ["a.txt", "b.txt"]
    assert model.config_overrides == "candidate=vanilla,norm_eps=1.0e-05"
    assert parse([path, "--data-files", "c", "--seed", "1"])[1].data_files == ["c"]
    assert parse(["--overwrite", path])[0].hidden_size == 48  # the file is not the value of --overwrite
    assert not parse([path, "--overwrite", "false"])[2].overwrite


def test_an_empty_file(config):
    assert parse([config("# nothing\n")]) == parse([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden_size: 3", "unknown key 'hiden_size'; the nearest valid one is hidden_size"),
        ("hidden_size: wide", "--hidden-size: invalid int value: 'wide'"),
        ("hidden_size: 1.5", "--hidden-size: invalid int value: '1.5'"),
        ("hidden_size: [1, 2]", r"hidden_size: got \[1, 2\], expected a whole number"),
        ("tokenizer: {a: 1}", "tokenizer: got .*, expected text"),
        ("data_files: a.txt", "data_files: got 'a.txt', expected a list"),
        ("streaming: perhaps", "--streaming: Truthy value expected"),
        ("language: [en, no]", r"language: got \['en', False\], expected text: YAML reads no, yes, off and on as"),
        ("output_dir: on", "output_dir: got True, expected text"),
        ("mixed_precision: fp8", "--mixed-precision: invalid choice: 'fp8'"),
        ("- a\n- b", "expected `key: value` lines, got a list"),
        ("a: [", "not YAML"),
        ("seed: 1\nhidden_size: 3\nseed: 2", "not YAML: the key 'seed' is given twice in .*, line 3"),
    ],
)
def test_a_file_with_mistakes(config, text, message):
    path = config(text)
    with pytest.raises(CommandLineError, match=f"{path}: {message}"):
        parse([path])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hiden-size", "3"], "unknown flag --hiden-size; the nearest valid one is --hidden-size"),
        (["--hidden", "3"], "unknown flag --hidden; the nearest valid one is --hidden-"),  # no abbreviations
        (["--hidden_sizes=3"], "unknown flag --hidden_sizes; the nearest valid one is --hidden-size"),
        (["a.yaml", "b.yaml"], "unexpected argument 'b.yaml'"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--sequence-length", "1"], "--sequence-length must be at least 2, got 1"),
        (["--validation-share", "1"], "--validation-share must be below 1, got 1.0"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0, got nan"),
        (["--learning-rate", "0"], "--learning-rate must be above 0, got 0.0"),
        (["--learning-rate", "inf"], "--learning-rate must be at most 1e.38, got inf"),
        (["--adam-beta2", "1"], "--adam-beta2 must be below 1"),
        (["--max-minutes", "-1"], "--max-minutes must be above 0"),
        (["--seed", str(2**70)], f"--seed must be at most 2147483647, got {2**70}"),
        (["--seed=-1"], "--seed must be at least 0, got -1"),
        (["--max-documents", str(2**70)], f"--max-documents must be at most 1000000000000, got {2**70}"),
        (["--num-epochs", "inf"], "--num-epochs must be at most 1000000000000, got inf"),
        (["--adam-epsilon", "1e-320"], "--adam-epsilon must be at least 1e-37, got 1e-320"),
        (["--vocab-size", "0"], "--vocab-size must be at least 1, got 0"),
        (["--vocab-size", str(10**10)], "--vocab-size must be at most 16777216, got 10000000000"),
        (["--hidden-size", "0"], "--hidden-size must be at least 1, got 0"),
        (["--hidden-dropout", "1"], "--hidden-dropout must be below 1, got 1.0"),
        (["--dataset", ""], "--dataset: expected a value, got ''"),
        (["--data-files", "a", ""], "--data-files: expected a value, got ''"),
        (["--output-dir", "a\udcff"], r"--output-dir 'a\\udcff': not UTF-8 text"),
        ([""], "CONFIG.yaml: expected a value, got ''"),
        (["--overwrite", "--resume"], "--overwrite and --resume cannot both be given"),
        (["--context-parallel", "0"], "--context-parallel must be at least 1, got 0"),
        (["--context-parallel", "2", "--compile"], "--context-parallel 2 and --compile cannot both be given"),
        (
            ["--context-parallel", "2", "--bptt-chunk", "8"],
            "--context-parallel 2 and --bptt-chunk cannot both be given",
        ),
        (["--dataset", "a", "--data-files", "b"], "--dataset and --data-files cannot both be given"),
        (["--streaming"], "--streaming belongs to --dataset, which is not given"),
        (["--dataset-config", "a"], "--dataset-config belongs to --dataset, which is not given"),
        (
            ["--dataset", "a", "--validation-split", "test", "--validation-share", "0"],
            "--validation-split and --validation-share 0 cannot both be given",
        ),
        (
            ["--sources", "{dataset: a, validation_split: test}", "--validation-files", "b"],
            "--validation-split and --validation-files cannot both be given",
        ),
        (["--vocab-size", "300", "--tokenizer", "bytes"], "--vocab-size belongs to --tokenizer bpe, which is bytes"),
        (
            ["--model", "a", "--hidden-size", "3"],
            "--hidden-size describes a new model and cannot be given with --model",
        ),
        (["--model", "a", "--config-overrides", "b=1"], "--config-overrides describes a new model"),
    ],
)
def test_mistakes(argv, message):
    with pytest.raises(ValueError, match=message):
        parse(argv)


@pytest.mark.parametrize(
    "number",
    [f for dtype in ARGUMENTS for f in dataclasses.fields(dtype) if {int, float} & {f.type, *get_args(f.type)}],
)
def test_every_number_has_bounds(number):
    kind = int if int in (number.type, *get_args(number.type)) else float
    for value in (-1, 2**70) if kind is int else (-1, 1e300, math.inf, math.nan):
        with pytest.raises(
            ValueError, match=f"^{flag(number.name)} must be .*, got {kind(value)}$".replace("+", r"\+")
        ):
            parse([f"{flag(number.name)}={value}"])


def test_files_to_validate_on_have_a_column_of_their_own_beside_several_sources():
    argv = ["--sources", "{data_files: [a.jsonl], text_column: code}", "--text-column", "content"]
    data = parse([*argv, "--validation-files", "b.jsonl"])[1]
    assert data.text_column == "content" and data.parts()[0].text_column == "code"
    with pytest.raises(ValueError, match="--text-column cannot be given beside --sources"):
        parse(argv)


def test_a_missing_file(tmp_path):
    with pytest.raises(IsADirectoryError, match="a folder, expected a file of settings"):
        parse([str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="none.yaml: no such file"):
        parse([str(tmp_path / "none.yaml")])


def test_what_is_saved_can_be_read_again(config):
    argv = ["--data-files", "a b.txt", "é*.txt", "--learning-rate", "1e-5", "--tokenizer", "bytes", "--compile"]
    argv += ["--config-overrides", "candidate=vanilla,norm_eps=1e-5", "--mixed-precision", "no", "--max-minutes", "2.5"]
    arguments = parse([*argv, "--overwrite"])
    text = to_yaml(*arguments)
    assert "overwrite" not in text and "resume" not in text.split("\n", 1)[1]
    assert parse([config(text)]) == parse(argv)


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--hidden-size N" in text and "--hidden_size" not in text and "examples:" in text
