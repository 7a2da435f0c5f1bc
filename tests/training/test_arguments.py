import pytest

from hf_recurrent.cli import CommandLineError
from hf_recurrent.training.arguments import parse, to_yaml


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
        ("mixed_precision: fp8", "--mixed-precision: invalid choice: 'fp8'"),
        ("- a\n- b", "expected `key: value` lines, got a list"),
        ("a: [", "not YAML"),
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
        (["--validation-share", "1"], "--validation-share must be at least 0 and below 1, got 1.0"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0, got nan"),
        (["--learning-rate", "0"], "--learning-rate must be above 0, got 0.0"),
        (["--adam-beta2", "1"], "--adam-beta2 must be below 1"),
        (["--max-minutes", "-1"], "--max-minutes must be above 0"),
        (["--overwrite", "--resume"], "--overwrite and --resume cannot both be given"),
        (["--dataset", "a", "--data-files", "b"], "--dataset and --data-files cannot both be given"),
        (["--streaming"], "--streaming belongs to --dataset, which is not given"),
        (["--dataset-config", "a"], "--dataset-config belongs to --dataset, which is not given"),
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


def test_a_missing_file(tmp_path):
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
