"""Bad losses: what they do to a run, and what is told of them."""

import json
import math
import operator

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from workers import command_line, finish, start_group

from hf_recurrent import S5Config, S5ForCausalLM, cli
from hf_recurrent.training import arguments, distributed
from hf_recurrent.training.arguments import TrainArguments
from hf_recurrent.training.loop import Run, State
from hf_recurrent.training.loss_policy import FEWEST, LossPolicy, Verdict, spike

TINY = (
    "--hidden-size 16 --num-hidden-layers 2 --sequence-length 32 --batch-size 4 --log-steps 1 --tokenizer bytes".split()
)
TINY += ["--eval-steps", "0", "--cpu"]
TEXTS = [f"document {n} says {n * n} and more of it\n" for n in range(150)]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def run(data, tmp_path):
    """A run and its folder, which has not begun."""

    def prepare(*flags, name="run"):
        argv = [*TINY, "--data-files", data, "--output-dir", tmp_path / name, *flags]
        return Run(*arguments.parse(list(map(str, argv)))), tmp_path / name

    return prepare


def break_steps(run, steps, value=math.nan):
    """Add to the loss of some steps what is not finite, or much."""
    compute = run.model.forward
    run.calls = 0

    def forward(*args, **kwargs):
        outputs = compute(*args, **kwargs)
        if run.model.training:
            run.calls += 1
            if run.calls in steps:
                outputs.loss = outputs.loss * value
        return outputs

    run.model.forward = forward
    return run


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_bad_step_is_skipped_and_named(run, data):
    broken, folder = run("--max-steps", 6, "--on-bad-loss", "skip")
    break_steps(broken, {3, 5}).train()
    [third, fifth] = lines(folder, "bad_batches.jsonl")
    assert (third["step"], third["fault"], third["action"], third["loss"]) == (3, "the loss is nan", "skip", "nan")
    [process] = third["processes"]
    assert process["rank"] == 0 and len(process["rows"]) == 4
    training = list(broken.rows.stream.starts)
    text = data.read_text()
    for row in process["rows"]:
        first, last = row["documents"]
        assert row["source"] == str(data) and 0 <= first <= last < len(training)
        assert row["begins"].split("<|endoftext|>")[0].strip() in text.replace("\\n", "\n")
        ids = broken.rows.take(0, broken.rows.per_epoch)["input_ids"]
        assert row["begins"] in {broken.tokenizer.decode(one) for one in ids}
    metrics = {line["step"]: line for line in lines(folder) if "lr" in line}
    assert "loss" not in metrics[3] and "grad_norm" not in metrics[3] and metrics[4]["loss"] > 0
    assert metrics[3]["skipped_steps"] == metrics[4]["skipped_steps"] == 1 and metrics[6]["skipped_steps"] == 2
    assert fifth["step"] == 5 and all(weight.isfinite().all() for weight in weights(folder).values())


def test_a_skipped_step_changes_nothing(run, monkeypatch):
    broken, _ = run("--max-steps", 3, "--on-bad-loss", "skip", "--hidden-dropout", 0)
    seen = []
    step = Run._step

    def noted(self):
        seen.append([parameter.clone() for parameter in self.model.parameters()])
        return step(self)

    monkeypatch.setattr(Run, "_step", noted)
    break_steps(broken, {2}).train()
    assert all(map(torch.equal, seen[1], seen[2])) and not all(map(torch.equal, seen[0], seen[1]))


def test_running_statistics_are_put_back(run, monkeypatch):
    flags = ["--model-type", "s5", "--config-overrides", "norm=batch", "--max-steps", 3, "--on-bad-loss", "skip"]
    broken, folder = run(*flags)
    buffers = []
    step = Run._step

    def noted(self):
        buffers.append([buffer.clone() for buffer in self.model.buffers()])
        return step(self)

    monkeypatch.setattr(Run, "_step", noted)
    break_steps(broken, {2}).train()
    assert len(buffers[0]) > 0
    assert all(map(torch.equal, buffers[1], buffers[2])) and not all(map(torch.equal, buffers[0], buffers[1]))


def test_running_statistics_are_put_back_after_a_move():
    """As to an accelerator, in the preparation of a run: the model's buffers are others then."""
    model = S5ForCausalLM(S5Config(vocab_size=13, hidden_size=8, num_hidden_layers=1, norm="batch")).train()
    policy = LossPolicy(TrainArguments(on_bad_loss="skip"), Accelerator(cpu=True), model, State())
    model.double()
    policy.before_step()
    before = [buffer.clone() for buffer in model.buffers()]
    ids = torch.randint(13, (2, 8))
    model(ids, labels=ids)
    assert before and not any(map(torch.equal, before, model.buffers()))
    policy.undo()
    assert all(map(torch.equal, before, model.buffers()))


def test_a_stop_for_a_leap_saves_the_step_before(run):
    """As it was, running statistics too; and a resume may skip as many steps as the run could."""
    flags = ["--model-type", "s5", "--config-overrides", "norm=batch", "--save-steps", FEWEST + 1]
    flags += ["--loss-spike-threshold", 20, "--max-steps", FEWEST + 2]
    whole, folder = run(*flags, name="whole")
    whole.train()
    skips = ["--on-loss-spike", "skip", "--max-skipped-steps", 1]
    for name, more in (("stop", ["--on-loss-spike", "stop"]), ("skip", skips)):
        stopping, stopped = run(*flags, *more, name=name)
        with pytest.raises(FloatingPointError, match=f"at step {FEWEST + 2}"):
            break_steps(stopping, {FEWEST + 2}, 3.0).train()
        one, other = (
            torch.load(path / "checkpoints" / f"step-{FEWEST + 1:08d}" / "pytorch_model.bin", weights_only=True)
            for path in (folder, stopped)
        )
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        state = json.loads(next(stopped.glob("checkpoints/*/state.json")).read_text())["state"]
        assert (state["step"], state["skipped"], state["skipped_in_row"]) == (FEWEST + 1, 0, 0)


def test_resuming_remembers_the_losses_and_what_was_skipped(run, tmp_path):
    """A spike is judged by the losses from before the interruption."""
    flags = ["--max-steps", FEWEST + 8, "--on-loss-spike", "skip", "--on-bad-loss", "skip", "--save-steps", FEWEST + 2]
    flags += ["--learning-rate", 1e-3, "--loss-spike-threshold", 20]
    bad = {5, FEWEST, FEWEST + 4}
    whole, folder = run(*flags)
    break_steps(whole, bad, value=3.0).train()
    assert [line["step"] for line in lines(folder, "bad_batches.jsonl")] == [FEWEST + 4]  # the others are too early
    stopped, other = run(*flags, name="other")
    break_steps(stopped, bad, value=3.0)
    with pytest.MonkeyPatch.context() as patch:
        step = Run._step

        def until(self):
            if self.state.step == FEWEST + 6:
                raise OSError("out of luck")
            return step(self)

        patch.setattr(Run, "_step", until)
        with pytest.raises(OSError, match="out of luck"):
            stopped.train()
    assert len(lines(other, "bad_batches.jsonl")) == 1
    resumed, _ = run(*flags, "--resume", name="other")
    break_steps(resumed, {2}, value=3.0).train()  # step FEWEST + 4 again
    assert lines(other, "bad_batches.jsonl") == lines(folder, "bad_batches.jsonl")
    pick = operator.itemgetter("step", "lr")
    assert [pick(line) for line in lines(other) if "lr" in line] == [
        pick(line) for line in lines(folder) if "lr" in line
    ]
    assert all(torch.equal(weight, weights(other)[name]) for name, weight in weights(folder).items())


def test_too_many_in_a_row(run):
    broken, folder = run("--max-steps", 9, "--on-bad-loss", "skip", "--max-skipped-steps", 3, "--save-steps", 1)
    with pytest.raises(FloatingPointError, match="the loss is nan; 3 steps skipped in a row at step 7: try a --lea"):
        break_steps(broken, {2, 3, 5, 6, 7}).train()
    assert [line["action"] for line in lines(folder, "bad_batches.jsonl")] == ["skip"] * 4 + ["stop"]


def test_by_default_the_run_stops_before_the_weights_change(run):
    broken, folder = run("--max-steps", 9, "--save-steps", 2)
    with pytest.raises(FloatingPointError, match="the loss is inf at step 6"):
        break_steps(broken, {6}, math.inf).train()
    assert all(parameter.isfinite().all() for parameter in broken.model.parameters())
    [line] = lines(folder, "bad_batches.jsonl")
    assert (line["step"], line["action"]) == (6, "stop")


def test_a_gradient_that_is_not_finite(run):
    broken, folder = run("--max-steps", 4, "--on-bad-loss", "skip")
    parameter = next(broken.model.parameters())
    calls = []

    def hook(gradient):
        calls.append(0)
        return gradient * math.nan if len(calls) == 2 else gradient

    parameter.register_hook(hook)
    broken.train()
    [line] = lines(folder, "bad_batches.jsonl")
    assert line["fault"] == "the gradient is nan" and line["loss"] > 0 and line["grad_norm"] == "nan"


def test_an_infinite_norm_that_the_loss_scaler_handles_is_left_out(run, monkeypatch):
    monkeypatch.setattr(distributed, "clip_gradients", lambda *_: torch.tensor(math.inf))
    monkeypatch.setattr(LossPolicy, "judge", lambda policy, loss, norm: Verdict(loss.item(), True, None, "update"))
    scaled, folder = run("--max-steps", 2)
    scaled.train()
    assert not any("grad_norm" in line for line in lines(folder))
    assert "Infinity" not in (folder / "metrics.jsonl").read_text()


def test_spikes_are_only_noted_unless_more_is_asked_for(run):
    broken, folder = run("--max-steps", FEWEST + 4, "--loss-spike-threshold", 20)
    break_steps(broken, {FEWEST + 2}, 3.0).train()
    [line] = lines(folder, "bad_batches.jsonl")
    assert (line["step"], line["action"]) == (FEWEST + 2, "update")
    assert "deviations above the latest ones" in line["fault"]
    assert not any("skipped_steps" in line for line in lines(folder))
    flags = ("--on-loss-spike", "stop", "--loss-spike-threshold", 20)
    stopping, folder = run("--max-steps", FEWEST + 4, *flags, name="other")
    with pytest.raises(FloatingPointError, match=f"deviations above the latest ones at step {FEWEST + 2}"):
        break_steps(stopping, {FEWEST + 2}, 3.0).train()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{FEWEST + 1:08d}"]  # nothing is lost


def test_what_a_spike_is():
    losses = [3 + 0.1 * math.sin(n) for n in range(100)]
    deviation = 1.4826 * sorted(abs(one - 3) for one in losses)[50]
    assert spike(losses, 4.0) == pytest.approx(1 / deviation, rel=0.05)
    assert spike(losses[: FEWEST - 1], 100.0) == 0
    assert spike([2.0] * 64, 2.1) == pytest.approx(5)  # by the least deviation
    assert spike(losses, 1.0) < 0


def test_two_processes_skip_alike(data, tmp_path):
    """The learning rate ruins the weights; which step that is, and that it is skipped, both processes agree on."""
    folder = tmp_path / "run"
    flags = [*TINY, "--data-files", data, "--output-dir", folder, "--learning-rate", "1e30", "--warmup-steps", 0]
    flags += ["--max-grad-norm", 0, "--max-steps", 9, "--on-bad-loss", "skip", "--max-skipped-steps", 4]
    flags += ["--save-steps", 1, "--no-token-cache"]
    group = start_group(command_line, "train", *flags, processes=2, log=tmp_path / "log")
    assert finish(group) == [2, 2]
    for rank in range(2):
        assert "4 steps skipped in a row at step 5" in (tmp_path / f"log.{rank}").read_text()
    bad = lines(folder, "bad_batches.jsonl")
    assert [line["step"] for line in bad] == [2, 3, 4, 5]
    for line in bad:
        assert [process["rank"] for process in line["processes"]] == [0, 1]
        rows = [row["row"] for process in line["processes"] for row in process["rows"]]
        assert len(rows) == 8


def test_a_resumed_run_forgets_later_bad_batches(run, data, tmp_path):
    broken, folder = run("--max-steps", 9, "--save-steps", 2)
    with pytest.raises(FloatingPointError):
        break_steps(broken, {5}).train()
    argv = [
        "train",
        *TINY,
        "--data-files",
        data,
        "--output-dir",
        folder,
        "--max-steps",
        9,
        "--save-steps",
        2,
        "--resume",
    ]
    assert cli.main(list(map(str, argv))) == 0
    assert not (folder / "bad_batches.jsonl").exists()
