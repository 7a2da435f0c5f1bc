import json
from types import SimpleNamespace

import pytest
from accelerate.tracking import TensorBoardTracker
from runs import forget_the_end
from tensorboardX.proto.event_pb2 import Event

from hf_recurrent import cli
from hf_recurrent.training import trackers

TINY = (
    "--hidden-size 16 --num-hidden-layers 2 --sequence-length 32 --batch-size 4 --log-steps 1 --tokenizer bytes".split()
)
TINY += "--eval-steps 2 --health-steps 2 --cpu".split()


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n} of {n * n}\n" for n in range(200)))
    return ["train", *TINY, "--data-files", str(tmp_path / "text.txt"), "--output-dir", str(tmp_path / "run")]


def records(path):
    """The records of a TFRecord file: a length of 8 bytes, its checksum of 4, the data, their checksum of 4."""
    content, place = path.read_bytes(), 0
    while place < len(content):
        length = int.from_bytes(content[place : place + 8], "little")
        yield content[place + 12 : place + 12 + length]
        place += 16 + length


def events(folder):
    for path in sorted(folder.rglob("events.*")):
        for record in records(path):
            event = Event()
            event.ParseFromString(record)
            yield event


def scalars(folder):
    found = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_a_tracker_that_fails_ends_no_training(flags, monkeypatch, capsys, tmp_path):
    log = TensorBoardTracker.log

    def failing(tracker, values, step=None, **more):
        if step == 2:
            raise ConnectionError("no answer\nand more")
        log(tracker, values, step=step, **more)

    monkeypatch.setattr(TensorBoardTracker, "log", failing)
    assert cli.main([*flags, "--max-steps", "4", "--log-with", "tensorboard"]) == 0
    assert "warning: --log-with tensorboard: gets nothing after step 2: no answer\n" in capsys.readouterr().err
    assert set(scalars(tmp_path / "run" / "trackers")["validation_loss"]) == {0}
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) > 5


def test_a_tracker_that_cannot_be_finished_is_a_warning():
    class Broken(TensorBoardTracker):
        def __init__(self):
            self.finished = False

        def finish(self):
            self.finished = True
            raise ConnectionError("no network")

    both = [Broken(), Broken()]
    with pytest.warns(UserWarning, match="--log-with tensorboard: cannot be finished: no network"):
        trackers.finish_trackers(SimpleNamespace(trackers=both))
    assert all(tracker.finished for tracker in both)


def test_an_interrupt_while_a_tracker_finishes_leaves_the_folder_as_it_should_be(flags, monkeypatch, tmp_path):
    """A run that has failed before it saved anything gives the folder back to the earlier one."""
    assert cli.main([*flags, "--max-steps", "1"]) == 0
    before = (tmp_path / "run" / "model.safetensors").read_bytes()

    def interrupted(tracker):
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorBoardTracker, "finish", interrupted)
    failing = ["--learning-rate", "1e30", "--warmup-steps", "0", "--max-grad-norm", "0", "--max-steps", "9"]
    assert cli.main([*flags, *failing, "--overwrite", "--log-with", "tensorboard"]) == 130
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    assert not list((tmp_path / "run").glob(".unfinished*"))


def test_tensorboard_gets_what_the_metrics_have(flags, tmp_path):
    assert cli.main([*flags, "--max-steps", "4", "--log-with", "tensorboard"]) == 0
    sent = scalars(tmp_path / "run" / "trackers")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "lr", "peak_share", "validation_loss", "memory_16", "memory_1/layer_1", "gates_open"):
        written = {line["step"]: line[name] for line in lines if name in line}
        assert written and sent[name] == pytest.approx(written, rel=1e-6), name
    assert any((tmp_path / "run" / "trackers").rglob("hparams.yml"))


def test_tensorboard_drops_what_a_resumed_run_does_again(flags, tmp_path):
    flags += ["--max-steps", "4", "--log-with", "tensorboard"]
    assert cli.main([*flags, "--save-steps", "3"]) == 0
    forget_the_end(tmp_path / "run")
    assert cli.main([*flags, "--resume"]) == 0
    starts = [event.step for event in events(tmp_path / "run" / "trackers") if event.HasField("session_log")]
    assert starts == [4]


def test_wandb_goes_on_with_the_run(flags, monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags += ["--save-steps", "2", "--log-with", "wandb"]
    assert cli.main([*flags, "--max-steps", "2"]) == 0
    assert cli.main([*flags, "--max-steps", "4", "--resume"]) == 0
    trackers = tmp_path / "run" / "trackers"
    identity = (trackers / "wandb_id").read_text()
    files = sorted(path.name for path in trackers.rglob("*.wandb") if not path.is_symlink())
    assert files == [f"run-{identity}.wandb"] * 2  # which `wandb sync` makes one run of


def test_trackio_goes_on_with_the_run_and_not_with_another_of_its_name(flags, monkeypatch, tmp_path):
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    started = []

    def init(**options):
        run = start(**options)
        started.append(run)
        return run

    start = trackio.init
    monkeypatch.setattr(trackio, "init", init)
    flags += ["--save-steps", "2", "--log-with", "trackio"]
    for more in (["--max-steps", "2"], ["--max-steps", "4", "--resume"], ["--max-steps", "2", "--overwrite"]):
        assert cli.main([*flags, *more]) == 0
    first, resumed, another = (run.id for run in started)
    assert first == resumed != another


@pytest.mark.parametrize(
    ("names", "installed", "message"),
    [
        (["wand"], ["tensorboard"], "--log-with wand: no such tracker; the nearest valid one is wandb"),
        (["tensorboard", "wandb"], ["tensorboard"], "--log-with wandb: it is not installed: pip install wandb"),
        (["comet_ml"], [], "--log-with comet_ml: it is not installed: pip install comet-ml"),
        (["all"], [], "--log-with all: none is installed of aim, "),
    ],
)
def test_what_is_refused(names, installed, message, flags, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: installed)
    assert cli.main([*flags, "--log-with", *names]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_all_that_are_installed(monkeypatch):
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: ["wandb", "tensorboard"])
    assert trackers.check_trackers(["all"]) == ["tensorboard", "wandb"]
    assert trackers.check_trackers(["wandb", "wandb"]) == ["wandb"]


def test_a_tracker_that_cannot_be_started(flags, monkeypatch, capsys, tmp_path):
    def start(self):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(TensorBoardTracker, "start", start)
    assert cli.main([*flags, "--log-with", "tensorboard"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "hf-recurrent: error: --log-with: tensorboard cannot be started: no route to host"
    assert not (tmp_path / "run").exists()
