"""Rows in chunks: gradients of one call where they should be, and of the chunk alone where they should not."""

import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from hf_recurrent import RecurrentCache, cli
from hf_recurrent.modeling.model import IGNORED
from hf_recurrent.training import TrainArguments
from hf_recurrent.training.bptt import backward_in_chunks, chunks

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))
from families import FIRST, causal_lm, token_ids  # noqa: E402

CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # the model is in float64, Transformers' loss in float32


@pytest.fixture(params=[False, True], ids=["", "learned"])
def model(request, name):
    config_class, options = FIRST[name]
    return causal_lm(config_class(**options, learned_initial_state=request.param)).train()


@pytest.fixture
def batch(model):
    """Two rows of packed documents, as `pack` makes them."""
    input_ids = token_ids(model.config, 2, 12)
    position_ids = torch.cat([torch.arange(n) for n in (5, 1, 6, 9, 3)]).view(2, 12)
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "labels": torch.where(position_ids == 0, IGNORED, input_ids),
    }


def gradients(model) -> list[torch.Tensor]:
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return grads


def whole_rows(model, batch, targets):
    loss = model(**batch, num_items_in_batch=targets, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


each_family = pytest.mark.parametrize("name", FIRST)


@each_family
@pytest.mark.parametrize("size, carry", [(12, False), (12, True), (5, True), (1, True)])
def test_gradients_of_one_call(model, batch, size, carry):
    accelerator, targets = Accelerator(cpu=True), torch.tensor(19)
    expected_loss, expected = whole_rows(model, batch, targets)
    loss = backward_in_chunks(accelerator, model, batch, targets, size, carry)
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    torch.testing.assert_close(gradients(model), expected, **CLOSE)


@each_family
def test_gradients_stop_at_a_border_where_the_state_does_not(model, batch):
    """As if the state before each chunk were given."""
    accelerator, targets = Accelerator(cpu=True), torch.tensor(19)
    expected_loss, carried = whole_rows(model, batch, targets)
    model.gradient_checkpointing_enable()
    loss = backward_in_chunks(accelerator, model, batch, targets, 4, loss_options={"skip_logits": True})
    model.gradient_checkpointing_disable()
    got = gradients(model)
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    for number, part in enumerate(chunks(batch, 4)):
        cache = RecurrentCache(model.config)
        if number:
            with torch.no_grad():
                before = {key: batch[key][:, : 4 * number] for key in ("input_ids", "position_ids")}
                cache = model(**before, past_key_values=cache, use_cache=True).past_key_values
        model(**part, num_items_in_batch=targets, past_key_values=cache, use_cache=True).loss.backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    torch.testing.assert_close(got, expected, **CLOSE)
    assert not all(torch.allclose(x, y) for x, y in zip(got, carried, strict=True))


def test_the_command_line(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{n}(x):\n    return x + {n * n}\n\n\n" for n in range(120)))
    flags = "--hidden-size 16 --num-hidden-layers 2 --sequence-length 32 --batch-size 4 --tokenizer bytes".split()
    flags += ["--config-overrides", "learned_initial_state=true", "--data-files", str(text), "--max-steps", "3"]
    losses = []
    for name, more in (("whole", []), ("same", ["--bptt-chunk", "32"]), ("chunks", ["--bptt-chunk", "7"])):
        assert cli.main(["train", *flags, *more, "--log-steps", "1", "--output-dir", str(tmp_path / name)]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([line.split('"loss": ')[1].split(",")[0] for line in lines if '"loss"' in line])
    assert losses[0] == losses[1] != losses[2] and losses[0][0][:7] == losses[2][0][:7]
    capsys.readouterr()
    assert cli.main(["train", *flags, "--bptt-chunk", "33", "--output-dir", str(tmp_path / "none")]) == 2
    assert "--bptt-chunk must be at most --sequence-length 32, got 33" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--bptt-carry-gradients belongs to --bptt-chunk, which is not given"):
        TrainArguments(bptt_carry_gradients=True)
