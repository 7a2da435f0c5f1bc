import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

import hf_recurrent
from hf_recurrent import cli
from hf_recurrent.cli import generate
from hf_recurrent.training.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model of random weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = hf_recurrent.MinGRUConfig(
        hidden_size=16, num_hidden_layers=2, vocab_size=257, eos_token_id=256, pad_token_id=256, initializer_range=0.5
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(capsys):
    """Run a command; returns what it printed. A refused or interrupted one leaves one line, which is returned."""

    def call(*argv, status=0):
        assert cli.main(list(map(str, argv))) == status
        out, err = capsys.readouterr()
        if status == 0:
            return out
        start = "interrupted" if status == 130 else "error: "
        assert out == "" and err.startswith(f"hf-recurrent: {start}") and err.count("\n") == 1
        return err

    return call


# ---- the program -----------------------------------------------------------------------------------------------------


def test_help_and_version(run):
    assert run("--help") == run() == run("help")
    for command in cli.COMMANDS:
        assert f"  {command} " in run("--help")
    assert run("--version") == f"hf-recurrent {hf_recurrent.__version__}\n"


@pytest.mark.parametrize("command", [*cli.COMMANDS, "evaluate lm", "evaluate perplexity"])
def test_help_of_each_command(command, capsys):
    try:
        status = cli.main([*command.split(), "--help"])
    except SystemExit as left:
        status = left.code
    text = capsys.readouterr().out
    assert status == 0
    assert f"usage: hf-recurrent {command}" in text and f"examples:\n  hf-recurrent {command}" in text


def test_help_on_tasks_without_a_name(capsys):
    for argv in (["train", "--task", "--help"], ["train", "--task", "listops", "--help"]):
        with pytest.raises(SystemExit) as left:
            cli.main(argv)
        assert left.value.code == 0 and "usage: hf-recurrent train --task NAME" in capsys.readouterr().out


def test_mistakes(run, model, tmp_path):
    assert "unknown command trian; the nearest valid one is train" in run("trian", status=2)
    assert "unknown command xyz; expected one of train, generate, plot," in run("xyz", status=2)
    assert "unknown flag --modle; the nearest valid one is --model" in run("generate", "--modle", "x", status=2)
    assert "unknown flag --jsn; the nearest valid one is --json" in run("info", "--jsn", status=2)
    assert "required: --prompt" in run("generate", "--model", model, status=2)
    assert "unexpected argument 'x'" in run("info", "x", status=2)
    assert "recipe.yaml: no such file" in run("train", tmp_path / "recipe.yaml", status=2)


def test_debug_shows_where(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError):
        cli.main(["train", str(tmp_path / "none.yaml"), "--debug"])
    monkeypatch.setenv("HF_RECURRENT_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        cli.main(["train", str(tmp_path / "none.yaml")])
    monkeypatch.setenv("HF_RECURRENT_DEBUG", "0")
    assert cli.main(["train", str(tmp_path / "none.yaml")]) == 2


def test_a_fault_of_the_program_shows_its_traceback(monkeypatch):
    def broken(argv):
        raise KeyError("bug")

    monkeypatch.setattr("hf_recurrent.cli.info.run", broken)
    with pytest.raises(KeyError):
        cli.main(["info"])


def test_warnings_are_one_line(monkeypatch, capsys):
    import warnings

    def warn(argv):
        warnings.warn("no compiler:\n  slower", stacklevel=1)
        return 0

    monkeypatch.setattr("hf_recurrent.cli.info.run", warn)
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().err == "hf-recurrent: warning: no compiler: slower\n"


def test_as_a_module():
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1])}
    command = [sys.executable, "-m", "hf_recurrent", "generate", "--model", "nowhere", "--prompt", ""]
    done = subprocess.run(command, env=env | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("hf-recurrent: error: --model nowhere: no such folder") and done.stdout == ""


def program(path, script, **variables):
    """A program of this name, in a process of its own."""
    path.write_text("import os, signal, sys\n" + script)
    env = os.environ | {"PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1])} | variables
    return subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True)


INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored

class Interrupted:
    def find_spec(name, path, target):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted)
"""


def test_ctrl_c_during_the_imports(tmp_path):
    done = program(
        tmp_path / "hf-recurrent", INTERRUPTED + "from hf_recurrent.cli import main; sys.exit(main(['info']))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hf-recurrent: interrupted\n")
    done = program(tmp_path / "module", INTERRUPTED + "sys.argv[0] = '-m'; import hf_recurrent.training")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    # A program that imports the package has its own way with a KeyboardInterrupt.
    done = program(tmp_path / "another", INTERRUPTED + "import hf_recurrent")
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr


def test_ctrl_c_that_an_import_catches(tmp_path):
    """As NumPy does, which torch imports."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    code = f"sys.path.insert(0, {str(tmp_path)!r}); from hf_recurrent.cli import main; sys.exit(main(['info']))"
    done = program(tmp_path / "hf-recurrent", "import sys\n" + code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "hf-recurrent: interrupted\n")


def test_help_and_wrong_flags_need_no_torch(tmp_path):
    """They are there at once; importing torch takes seconds."""
    commands = [*cli.COMMANDS, "train --task digits", "evaluate lm", "evaluate perplexity", ""]
    script = """
from hf_recurrent.cli import main
for words in %r:
    try:
        main([*words, "--help"])
    except SystemExit as left:
        assert not left.code
    assert main([*words, "--no-such-flag"]) == 2
    assert "torch" not in sys.modules, words
"""
    done = program(tmp_path / "hf-recurrent", script % [command.split() for command in commands])
    assert done.returncode == 0, done.stderr


def test_names_in_the_command_line(tmp_path):
    """What the package gives out is there for who asks, and families are registered."""
    script = """
import hf_recurrent
assert "torch" not in sys.modules
from hf_recurrent import MinGRUConfig, linear_scan
from transformers import AutoConfig
assert hf_recurrent.MinGRUConfig is MinGRUConfig and type(AutoConfig.for_model("mingru")) is MinGRUConfig
try:
    hf_recurrent.another
except AttributeError as error:
    print(error)
"""
    done = program(tmp_path / "hf-recurrent", script)
    assert done.stdout == "module 'hf_recurrent' has no attribute 'another'\n", done.stderr


def test_commands_find_what_they_import_late(tmp_path, model):
    """Each as the first command of its process, where no model's class has been imported."""
    text = tmp_path / "text.txt"
    text.write_text("def f(x): return x\n" * 40)
    commands = [
        f"generate --model {model} --prompt a --max-new-tokens 2 --cpu",
        f"evaluate perplexity --model {model} --data-files {text} --cpu",
        f"info --model {model}",
        f"export {model} {tmp_path / 'exported'} --standalone",
        f"push {model} me/model",
        f"train --model {model} --data-files {text} --sequence-length 16 --no-token-cache --cpu --dry-run",
    ]
    script = """
import transformers.trainer  # which takes seconds, and all of them will use
from hf_recurrent.cli import main
for command in %r:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, command
        continue
    assert "hf_recurrent.modeling" not in sys.modules
    status = main(command.split())
    sys.stdout.flush()
    os._exit(status if command.split()[0] != "push" else status - 2)
"""
    done = program(tmp_path / "hf-recurrent", script % commands, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "me/model: HF_HUB_OFFLINE is set" in done.stderr  # which is said when the folder has been read
    assert (tmp_path / "exported" / "modeling_mingru.py").is_file()


# ---- generate --------------------------------------------------------------------------------------------------------


def expected(model, prompt, **options):
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer(prompt, return_tensors="pt")
    return tokenizer.decode(loaded.generate(**ids, **options)[0], skip_special_tokens=True) + "\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_goes_on_in_another_process(run, model, tmp_path, stream):
    """As if it had never stopped: the state goes from one call to the next, in a file."""
    flags = ["--model", model, "--temperature", 0, *(["--stream"] if stream else [])]
    whole = run("generate", *flags, "--prompt", "def fé", "--max-new-tokens", 24)
    state = tmp_path / "state"
    parts = run("generate", *flags, "--prompt", "def fé", "--max-new-tokens", 5, "--state-out", state)
    for number in (7, 12):
        more = ["--max-new-tokens", number, "--state-in", state, "--state-out", state]
        parts = parts.removesuffix("\n") + run("generate", *flags, *more)
    # What may be the beginning of a character is printed with the part that ends it.
    assert parts.rstrip("\ufffd\n") == whole.rstrip("\ufffd\n")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_characters_of_several_tokens_between_two_processes(run, model, tmp_path, monkeypatch, stream):
    """A character whose bytes are generated by two processes is printed once and whole."""
    text = "aé€😀b😀é\n€"
    said = AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"]
    steps, load = iter(said), generate.load_model_and_tokenizer

    def speaking(args):
        loaded, tokenizer = load(args)
        size = loaded.config.vocab_size
        loaded.lm_head.register_forward_hook(
            lambda *_: torch.nn.functional.one_hot(torch.tensor([[next(steps)]]), size).float()
        )
        return loaded, tokenizer

    monkeypatch.setattr(generate, "load_model_and_tokenizer", speaking)
    state = tmp_path / "state"
    flags = ["generate", "--model", model, "--temperature", 0, *(["--stream"] if stream else []), "--state-out", state]
    parts, left = run(*flags, "--prompt", "x", "--max-new-tokens", 2).removesuffix("\n"), len(said) - 2
    for number in itertools.cycle((1, 2, 3)):
        more = ["--state-in", state, "--max-new-tokens", min(number, left)]
        parts += run(*flags, *more).removesuffix("\n")
        left -= min(number, left)
        if not left:
            break
    assert parts == "x" + text


def test_a_prompt_after_a_state_and_from_standard_input(run, model, tmp_path, monkeypatch):
    flags = ["generate", "--model", model, "--temperature", 0, "--max-new-tokens", 6]
    monkeypatch.setattr("hf_recurrent.cli.generate.PREFILL_TOKENS", 8)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"import os, sys, json")))
    first = run(*flags, "--prompt", "-", "--state-out", tmp_path / "state")
    assert first == run(*flags, "--prompt", "import os, sys, json")
    second = run(*flags, "--prompt", ", and", "--state-in", tmp_path / "state")
    assert second == run(*flags, "--prompt", first.removesuffix("\n") + ", and").removeprefix(first.removesuffix("\n"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "standard input is not UTF-8 text (byte 0)" in run(*flags, "--prompt", "-", status=2)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "tokenises to nothing" in run(*flags, "--prompt", "-", status=2)


def test_special_tokens_that_are_written_in_a_text(run, model, monkeypatch):
    """In a prompt they are tokens, which are not shown; in a text that is piped in, characters, as in training."""
    flags = ["generate", "--model", model, "--temperature", 0, "--max-new-tokens", 1]
    text = "a<|endoftext|>b"
    assert run(*flags, "--prompt", text).startswith("ab")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run(*flags, "--prompt", "-").startswith(text)


class Interrupted(io.BytesIO):
    """A standard input at whose end Ctrl-C is pressed."""

    def read1(self, size=-1):
        data = super().read1(size)
        if not data:
            raise KeyboardInterrupt
        return data


def test_ctrl_c_keeps_the_state_of_what_was_read(run, model, tmp_path, monkeypatch):
    flags = ["generate", "--model", model, "--temperature", 0, "--max-new-tokens", 6]
    expected = run(*flags, "--prompt", "import os, sys and so on")
    for text in (b"import os, sys", b"import os, sys\xc3"):  # half a character
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Interrupted(text)))
        run(*flags, "--prompt", "-", "--state-out", tmp_path / "state", status=130)
        text = run(*flags, "--prompt", " and so on", "--state-in", tmp_path / "state")
        assert text == expected.removeprefix("import os, sys")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Interrupted(b"import")))
    run(*flags, "--prompt", "-", status=130)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Interrupted(b"")))
    run(*flags, "--prompt", "-", "--state-out", tmp_path / "nothing", status=130)
    assert not (tmp_path / "nothing").exists()


def test_sigterm_keeps_the_state_of_what_was_read(model, tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "hf_recurrent", "generate", "--model", model, "--cpu", "--stream", "--prompt", "-"]
    with subprocess.Popen(
        [*command, "--state-out", tmp_path / "state"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as process:
        process.stdin.write(b"import os")
        process.stdin.flush()
        assert process.stdout.read(9) == b"import os"  # it has been read
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert (tmp_path / "state").is_file()


def test_the_state_of_another_model(run, model, tmp_path, capsys):
    """Of the same sizes: it may be meant, and is said."""
    torch.manual_seed(1)
    config = hf_recurrent.MinGRUConfig.from_pretrained(model)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    flags = ["--temperature", 0, "--max-new-tokens", 3, "--prompt", "abc"]
    run("generate", "--model", model, *flags, "--state-out", tmp_path / "state")
    for name, warnings in ((model, 0), (other, 1)):
        arguments = ["generate", "--model", name, *flags, "--state-in", tmp_path / "state"]
        assert cli.main(list(map(str, arguments))) == 0
        assert capsys.readouterr().err.count("holds the state of a model with other weights") == warnings


def test_standard_input_without_a_text(run, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert "--prompt -: standard input is closed" in run("generate", "--model", model, "--prompt", "-", status=2)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    message = run("generate", "--model", model, "--prompt", "-", status=2)
    assert "--prompt -: standard input tokenises to nothing" in message


@pytest.mark.parametrize("stream", [False, True])
def test_standard_input_of_any_length(run, model, tmp_path, monkeypatch, stream):
    """It is read in pieces, of which no more than two are held; the text goes on as if it had come at once."""
    flags = ["generate", "--model", model, "--temperature", 0, "--max-new-tokens", 6, *(["--stream"] if stream else [])]
    text = "".join(f"def fé{n}(x):\n    return {n}\n\n" for n in range(40)) + "x" * 300 + " y\n"
    whole = run(*flags, "--prompt", text, "--state-out", tmp_path / "whole")
    monkeypatch.setattr("hf_recurrent.cli.generate.PIECE", 64)
    monkeypatch.setattr("hf_recurrent.cli.generate.PREFILL_TOKENS", 8)
    fed = []
    read = generate._read

    def counted(model, ids, cache):
        fed.append(len(ids))
        read(model, ids, cache)

    monkeypatch.setattr("hf_recurrent.cli.generate._read", counted)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run(*flags, "--prompt", "-", "--state-out", tmp_path / "pieces") == whole
    assert len(fed) > len(text) / 64 - 2 and max(fed) <= 2 * 64 + 1
    load = hf_recurrent.RecurrentCache.load
    config = AutoModelForCausalLM.from_pretrained(model).config
    one, other = (load(tmp_path / name, config) for name in ("whole", "pieces"))
    assert one.get_seq_length() == other.get_seq_length() > len(text)
    more = [*flags, "--prompt", "-", "--state-out", tmp_path / "again"]
    outputs = []
    for name in ("whole", "pieces"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"and\xc3\xa9 then")))
        outputs.append(run(*more, "--state-in", tmp_path / name))
    assert outputs[0] == outputs[1] and "ané then"[2:] in outputs[0]
    assert load(tmp_path / "again", config).get_seq_length() > one.get_seq_length() + 6


def test_pieces_of_standard_input(monkeypatch):
    """They are cut before an end of line and the blanks before that, else at a space, also in lines after the first."""
    monkeypatch.setattr("hf_recurrent.cli.generate.PIECE", 8)
    for text, pieces in (
        ("one  \n two\nthree", ["one", "  \n two", "\nthree"]),
        ("one two three", ["one two", " three"]),
        ("one\ntwo three four", ["one", "\ntwo", " three", " four"]),
        ("one" + 20 * " " + "two", ["one", 8 * " ", 8 * " ", "    two"]),
        (20 * "x", [8 * "x", 8 * "x", 4 * "x"]),
    ):
        assert list(generate._pieces(iter([text]))) == pieces


def test_a_long_run_of_blanks_takes_no_time():
    before = time.process_time()
    assert len(list(generate._pieces(iter(["word" + 60_000 * " " + 14_000 * "word "])))) > 1
    assert time.process_time() - before < 1


def test_standard_input_that_ends_inside_a_character(monkeypatch):
    monkeypatch.setattr("hf_recurrent.cli.generate.PIECE", 4)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\xc3\xa9 def \xc3")))
    with pytest.raises(cli.parser.CommandLineError, match=r"standard input is not UTF-8 text \(byte 10\)"):
        list(generate._standard_input(echo=False))


def test_standard_input_is_followed(model, tmp_path):
    """A line is printed when it has come, not when all has."""
    command = [sys.executable, "-m", "hf_recurrent", "generate", "--model", str(model), "--temperature", "0", "--cpu"]
    env = os.environ | {"PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [*command, "--prompt", "-", "--stream", "--max-new-tokens", "2"], env=env, **pipes
    ) as process:
        for line in (b"def f(x):\n", b"    return x\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.read(len(line)) == line
        process.stdin.close()
        assert process.stdout.read() != b"" and process.wait() == 0


def test_states_that_cannot_be(run, model, tmp_path):
    flags = ["generate", "--model", model, "--prompt", "a"]
    assert "there is no state file" in run(*flags, "--state-in", tmp_path / "none", status=2)
    (tmp_path / "broken").write_bytes(b"12345678")
    assert "is not a whole safetensors file" in run(*flags, "--state-in", tmp_path / "broken", status=2)
    other = hf_recurrent.MinGRUConfig(hidden_size=8, num_hidden_layers=2, vocab_size=257)
    hf_recurrent.RecurrentCache(other).save(tmp_path / "other")
    assert "saved by a model with hidden_size = 8, this one has 16" in run(
        *flags, "--state-in", tmp_path / "other", status=2
    )
    assert "cannot be written" in run(*flags, "--state-out", tmp_path / "none" / "state", status=2)
    assert "cannot be combined with --num-beams" in run(*flags, "--state-out", "s", "--num-beams", 2, status=2)


def test_greedy_and_beams(run, model):
    common = ("generate", "--model", model, "--prompt", "def ", "--max-new-tokens", 20)
    assert run(*common, "--temperature", 0) == expected(model, "def ", max_new_tokens=20, do_sample=False)
    beams = expected(model, "def ", max_new_tokens=20, do_sample=False, num_beams=3)
    assert run(*common, "--num-beams", 3) == beams


def test_beams_after_what_was_read_before(run, model, tmp_path, monkeypatch):
    flags = ["generate", "--model", model, "--temperature", 0, "--max-new-tokens", 12]
    first = run(*flags, "--prompt", "import os, sys", "--state-out", tmp_path / "state").removesuffix("\n")
    beams = [*flags, "--num-beams", 3]
    for prompt in ([], ["--prompt", ", json and"]):
        whole = run(*beams, "--prompt", first + "".join(prompt[1:]))
        assert run(*beams, *prompt, "--state-in", tmp_path / "state") == whole.removeprefix(first)
    monkeypatch.setattr("hf_recurrent.cli.generate.PIECE", 16)
    monkeypatch.setattr("hf_recurrent.cli.generate.PREFILL_TOKENS", 8)
    text = "def f(x):\n    return x\n" * 4
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run(*beams, "--prompt", "-") == run(*beams, "--prompt", text)


def test_sampling(run, model):
    common = ("generate", "--model", model, "--prompt", "def ", "--max-new-tokens", 20)
    first = run(*common, "--seed", 1)
    assert first == run(*common, "--seed", 1) != run(*common, "--seed", 2)
    assert run(*common, "--seed", 1, "--top-k", 1) == run(*common, "--temperature", 0)
    assert run(*common, "--seed", 1, "--top-p", 1e-9) == run(*common, "--temperature", 0)
    assert run(*common, "--seed", 1, "--temperature", 1e-4) == run(*common, "--temperature", 0)


def test_streaming_prints_the_same(run, model):
    common = ("generate", "--model", model, "--prompt", "import os\n", "--max-new-tokens", 30, "--temperature", 0)
    assert run(*common, "--stream") == run(*common)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "--prompt '' tokenises to nothing: give at least one character"),
        (["--prompt", "a\udcff"], "--prompt 'a\\udcff': not UTF-8 text"),
        (["--prompt", "a", "--temperature", -1], "--temperature: must be 0 or between 1e-30 and 1000000000000, got -1"),
        (["--prompt", "a", "--temperature", "1e-40"], "--temperature: must be 0 or between 1e-30 and 1000000000000"),
        (["--prompt", "a", "--temperature", "inf"], "--temperature: must be 0 or between 1e-30 and 1000000000000"),
        (["--prompt", "-x"], "--prompt: expected one argument; one that begins with a dash is given as --prompt=-"),
        (["--prompt", "--x"], "--prompt: expected one argument; one that begins with a dash is given as --prompt=-"),
        (["--prompt", "a", "--num-beams", 2**70], f"--num-beams: must be between 1 and 1000000000000, got {2**70}"),
        (["--prompt", "a", "--num-beams", 10**12], "not enough memory: try fewer --num-beams or a smaller model ("),
        (["--prompt", "a", "--top-p", 2], "--top-p: must be between 0 and 1, got 2"),
        (["--prompt", "a", "--max-new-tokens", 0], "--max-new-tokens: must be at least 1, got 0"),
        (["--prompt", "a", "--seed", 2**32], "--seed: must be between 0 and 4294967295, got 4294967296"),
        (["--prompt", "a", "--num-beams", "x"], "--num-beams: invalid int value: 'x'"),
        (["--prompt", "a", "--num-beams", 2, "--stream"], "--stream cannot be combined with --num-beams"),
    ],
)
def test_what_generate_refuses(run, model, flags, message):
    assert message in run("generate", "--model", model, *flags, status=2)


def test_models_that_are_refused(run, model, tmp_path, monkeypatch):
    def refusal(folder):
        return run("generate", "--model", folder, "--prompt", "a", status=2)

    assert "nowhere/at/all: no such folder" in refusal(tmp_path / "nowhere/at/all")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("demo", "runs/demo", "./demo"):  # none of them is taken for a name on the Hub
        assert refusal(name) == f"hf-recurrent: error: --model {name}: no such folder\n"
    assert "the folder has no config.json" in refusal(tmp_path)
    assert f"{Path(model) / 'config.json'}: not a folder" in refusal(Path(model) / "config.json")
    GPT2Config().save_pretrained(tmp_path)
    assert "is of type 'gpt2'; this package knows " in refusal(tmp_path)
    assert "is of type 'gpt2'" in run("info", "--model", tmp_path, status=2)
    (tmp_path / "config.json").write_text("{")
    assert f"--model {tmp_path}: its config.json cannot be used" in refusal(tmp_path)


@pytest.mark.parametrize("part", ["AutoConfig", "AutoTokenizer"])
def test_code_of_a_folder_is_never_run(model, tmp_path, part):
    """Nor is it asked about: what standard input holds is the prompt."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    name, kind = ("config.json", {"model_type": "foo"}) if part == "AutoConfig" else ("tokenizer_config.json", {})
    settings = json.loads((folder / name).read_text())
    code = "theirs.C" if part == "AutoConfig" else ["theirs.C", "theirs.C"]
    settings |= {"auto_map": {part: code}, **kind}
    if part == "AutoTokenizer":
        settings["tokenizer_class"] = "C"
    (folder / name).write_text(json.dumps(settings))
    env = os.environ | {"PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1])}
    for command in (["info"], ["generate", "--prompt", "-", "--cpu"]):
        if command == ["info"] and part == "AutoTokenizer":
            continue
        done = subprocess.run(
            [sys.executable, "-m", "hf_recurrent", command[0], "--model", folder, *command[1:]],
            input="y\ny\n",
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.stdout == "" and done.stderr.count("\n") == 1 and done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"hf-recurrent: error: --model {folder}: ")
        assert ("is of type 'foo'" if part == "AutoConfig" else "its tokenizer cannot be loaded") in done.stderr
    assert not (tmp_path / "ran").exists()


def test_tokenizers_that_are_refused(run, model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    flags = ["generate", "--model", folder, "--prompt", "a"]
    whole = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(whole[:100])
    message = run(*flags, status=2)
    assert f"--model {folder}: its tokenizer cannot be loaded: tokenizer.json: " in message
    (folder / "tokenizer.json").unlink()
    assert "cannot be loaded: there is none in tokenizer.json, nor in files of another kind" in run(*flags, status=2)


def test_weights_that_are_refused(run, model, tmp_path):
    def refusal(change):
        folder = tmp_path / "changed"
        shutil.copytree(model, folder)
        weights = load_file(folder / "model.safetensors")
        change(folder, weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        message = run("generate", "--model", folder, "--prompt", "a", status=2)
        shutil.rmtree(folder)
        return message.removeprefix(f"hf-recurrent: error: --model {folder}: its weights ")

    def wider(folder, weights):
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))

    assert refusal(lambda _, weights: weights.pop("model.norm.weight")) == "lack model.norm.weight\n"
    assert refusal(lambda _, weights: weights["model.norm.weight"].fill_(torch.nan)) == (
        "are not finite: model.norm.weight\n"
    )
    assert refusal(lambda _, weights: weights.update(more=torch.zeros(1))) == (
        "hold what its configuration has no place for: more\n"
    )
    assert refusal(wider).startswith("have another shape than its configuration gives them: lm_head.weight, ")


def test_a_terminal_without_utf_8(model):
    env = os.environ | {"PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1]), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "hf_recurrent", "train", "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "AdamW's ?" in done.stdout and done.stderr == ""


def test_a_tokenizer_beyond_the_vocabulary(run, tmp_path):
    config = hf_recurrent.MinGRUConfig(hidden_size=16, num_hidden_layers=1, vocab_size=100)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    message = run("generate", "--model", tmp_path, "--prompt", "A~", status=2)
    assert "token id 126 is outside the model's vocabulary of 100" in message


# ---- info ------------------------------------------------------------------------------------------------------------


def test_info(run, model):
    facts = json.loads(run("info", "--model", model, "--json"))
    assert facts["versions"]["hf_recurrent"] == hf_recurrent.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert "logical cores" in facts["devices"]["cpu"]
    assert facts["backends"]["report"] == hf_recurrent.backend_report()
    assert facts["backends"]["used"]["cpu tensors"] in hf_recurrent.available_backends()
    assert facts["cache"].keys() == {"folder", "token streams", "token bytes"}
    loaded = AutoModelForCausalLM.from_pretrained(model)
    cache = loaded(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values
    assert facts["model"] == {
        "folder": model,
        "family": "mingru",
        "layers": 2,
        "hidden size": 16,
        "vocabulary": 257,
        "parameters": sum(parameter.numel() for parameter in loaded.parameters()),
        "parameters in embeddings": 2 * 257 * 16,
        "dtype": "float32",
        "state bytes per sequence": cache.nbytes,
    }
    text = run("info", "--model", model)
    for word in ("versions", "devices", "scan backends", "chunked", "mingru", "state bytes per sequence"):
        assert word in text
    assert "mingru" not in run("info")


# What the papers and the authors' programs say, where they do.
PAPERS_COUNTS = {
    "longhorn-125m": 125e6,
    "longhorn-350m": 350e6,
    "longhorn-1.3b": 1.3e9,
    "gateloop-wikitext103-125m": 125e6,
    "s5-speech35": 280e3,
    "vision-longhorn-tiny": 7e6,
    "vision-longhorn-small": 26e6,
}
PRESETS = {name: config_class for config_class in hf_recurrent.FAMILIES for name in config_class.presets}


def test_info_on_a_classifier(run, tmp_path):
    """It is of the class that it was saved with."""
    config = hf_recurrent.S5Config(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, state_size=4, num_blocks=1, num_labels=3, pooling="mean"
    )
    hf_recurrent.S5ForSequenceClassification(config).save_pretrained(tmp_path)
    facts = json.loads(run("info", "--model", tmp_path, "--json"))["model"]
    assert facts["family"] == "s5" and facts["layers"] == 1


def test_every_family_has_presets_under_its_own_name():
    assert set(PAPERS_COUNTS) < set(PRESETS)
    for config_class in hf_recurrent.FAMILIES:
        assert config_class.presets and all(config_class.model_type in name for name in config_class.presets)


@pytest.mark.parametrize("name", PRESETS)
def test_info_on_presets(run, name):
    facts = json.loads(run("info", "--preset", name, "--json"))["model"]
    config = PRESETS[name].from_preset(name)
    assert (facts["preset"], facts["family"]) == (name, config.model_type)
    assert (facts["layers"], facts["hidden size"]) == (config.num_hidden_layers, config.hidden_size)
    kinds = {"input features": "input_size", "image size": "image_size", "vocabulary": "vocab_size"}
    reads = {kind: getattr(config, field, None) for kind, field in kinds.items()}
    kind = next(kind for kind, size in reads.items() if size is not None)
    assert facts[kind] == reads[kind] and len(set(kinds) & set(facts)) == 1
    if name in PAPERS_COUNTS:
        assert facts["parameters"] == pytest.approx(PAPERS_COUNTS[name], rel=0.06)
    if "state bytes per sequence" not in facts:
        assert config.bidirectional
        return
    one_layer = PRESETS[name].from_preset(name, num_hidden_layers=1, vocab_size=7, input_size=None)
    model = AutoModelForCausalLM.from_config(one_layer)
    cache = model(torch.ones(1, 1, dtype=torch.long), use_cache=True).past_key_values
    assert facts["state bytes per sequence"] == cache.nbytes * config.num_hidden_layers


def test_info_on_what_is_no_preset(run, model):
    refusal = run("info", "--preset", "longhorn-120m", status=2)
    assert "--preset longhorn-120m: no such preset; the nearest valid one is longhorn-1" in refusal
    assert all(name in refusal for name in PRESETS)
    assert "--preset xyz: no such preset; known: " in run("info", "--preset", "xyz", status=2)
    assert "--preset: not allowed with argument --model" in run("info", "--model", model, "--preset", "x", status=2)


# ---- bench -----------------------------------------------------------------------------------------------------------


def bench(*argv):
    """In a process of its own, whose memory it arranges."""
    command = [sys.executable, "-m", "hf_recurrent", "bench", "--cpu", *map(str, argv)]
    env = os.environ | {"PYTHONPATH": str(Path(hf_recurrent.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


def test_bench(tmp_path):
    figures = tmp_path / "bench.json"
    done = bench("--shape", 2, 8, 4, "--repeats", 1, "--output", figures)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(figures.read_text())
    names = {row["name"] for row in document["results"]}
    assert {"linear_scan", "minGRU cell", "minLSTM cell, positive", "Longhorn cell, m = 16", "plain loop"} <= names
    assert all(name in done.stdout for name in names)
    assert {(row["dtype"], row["pass"]) for row in document["results"] if row["name"] == "linear_scan"} == {
        (dtype, kind) for dtype in ("float32", "bfloat16") for kind in ("forward", "backward")
    }
    assert all(row["ratio"] > 0 and row["shape"] == [2, 8, 4] for row in document["results"])
    assert document["command"].startswith("hf-recurrent bench --cpu --shape 2 8 4")


def test_bench_mistakes(run, tmp_path):
    assert "--shape: must be between 1 and 2147483648, got 0" in run("bench", "--shape", 0, 1, 1, status=2)
    refusal = run("bench", "--only", "x9", status=2)
    assert "--only x9: no such name; known: linear_scan; minGRU cell; minGRU cell, positive; " in refusal
    assert "; plain loop" in refusal
    missing = tmp_path / "none" / "x.json"
    assert f"--output {missing}: cannot be written" in run("bench", "--output", missing, status=2)
    done = bench("--shape", 2**20, 2**20, 64, "--only", "minGRU")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "not enough memory: try a smaller --shape" in done.stderr
