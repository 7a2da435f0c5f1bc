"""A sequence over 2 and 4 processes gives what one process computes: outputs, loss, and every gradient."""

import contextlib
import math
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from workers import finish, start_group

import hf_recurrent
from hf_recurrent.parallel import context_parallel, part, sum_gradients
from hf_recurrent.scan import linear_scan, longhorn_scan, split

SHARED = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "initializer_range": 0.4}
CONFIGS = [
    hf_recurrent.MinGRUConfig(**SHARED, candidate="positive"),
    hf_recurrent.MinGRUConfig(**SHARED, candidate="vanilla", conv_kernel=0),
    hf_recurrent.MinLSTMConfig(**SHARED, candidate="vanilla", conv_kernel=6),
    hf_recurrent.LonghornConfig(**SHARED, state_size=3),
    hf_recurrent.GateLoopConfig(**SHARED, conv_kernel=3),
    hf_recurrent.GateLoopConfig(**SHARED, num_heads=2, post_norm=True),
    hf_recurrent.GateLoopConfig(**SHARED, transition="cartesian", complex_transition=False, data_controlled=False),
    hf_recurrent.S5Config(**SHARED, state_size=8, num_blocks=2, conv_kernel=2),
]
LENGTH = 29  # parts of 15 and 14, of 8, 7, 7 and 7


def texts(kind):
    """The whole batch, and how long each part is (None: as even as it goes)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 31, (3, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -100, ids)}
    if kind in ("packed", "padded"):  # documents that end at borders, before and after them, and not at all
        starts = torch.zeros(ids.shape, dtype=torch.bool)
        starts[0, [0, 8, 15, 28]] = starts[1, [7, 9, 16, 23]] = True
        columns = torch.arange(LENGTH).expand_as(ids)
        batch["position_ids"] = columns - torch.where(starts, columns, 0).cummax(1).values
    if kind == "padded":  # on the left beyond a whole part of four, on the right, and amid the row
        mask = torch.ones_like(ids)
        mask[0, :9] = mask[1, 20:] = mask[2, 7:16] = 0
        batch["attention_mask"] = mask
        # Outputs at padding mean nothing, so that nothing after it is predicted from them.
        predicted = mask.bool() & mask.roll(1, 1).bool()
        batch["labels"] = torch.where(predicted, batch["labels"], -100)
    if kind == "numbered":
        batch["seq_idx"] = torch.tensor([0] * 8 + [1] * 7 + [2] * 14).repeat(3, 1)
    return batch, {"uneven": {2: [27, 2], 4: [1, 20, 2, 6]}}.get(kind)


def shares(x, lengths):
    return part(x) if lengths is None else x.split(lengths[dist.get_world_size()], 1)[dist.get_rank()]


def compare(config, kind, checkpointing=False):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().train()
    batch, lengths = texts(kind)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    # The loss, which Transformers computes in float32, compares no further than that: gradients are of all logits.
    weights = torch.where(real[..., None], torch.randn(*real.shape, config.vocab_size, dtype=torch.float64), 0)
    whole = model(**batch, use_cache=False)
    (whole.logits.sin() * weights).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    calls = []
    if checkpointing:
        model.gradient_checkpointing_enable()
        for layer in model.base_model.layers:
            layer.mixer.register_forward_pre_hook(lambda *_: calls.append(1))
    with context_parallel(model):
        parts = {name: shares(x, lengths) for name, x in batch.items()}
        mine = model(**parts)
        (mine.logits.sin() * shares(weights, lengths)).sum().backward()
        assert len(calls) == (2 * config.num_hidden_layers if checkpointing else 0)
        alone = model(**parts, skip_logits=True).loss.detach()
    sum_gradients(model)
    loss = mine.loss.detach()
    torch.testing.assert_close(alone, loss, rtol=1e-6, atol=1e-7)
    dist.all_reduce(loss)
    exactly, mask = {"rtol": 1e-10, "atol": 1e-12}, shares(real, lengths)
    torch.testing.assert_close(mine.logits[mask], shares(whole.logits, lengths)[mask], **exactly)
    torch.testing.assert_close(loss, whole.loss.detach(), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], **exactly, msg=lambda m, name=name: f"{name}: {m}")
    assert model.base_model.context_group is None and split.current_group() is None


def arguments():
    """The loss is the same however the call gives the labels, and by whichever number it leaves some out."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_recurrent.MinGRUConfig(**SHARED))
    ids = torch.randint(4, SHARED["vocab_size"], (2, 11), generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids % 3 == 0, 3, ids)
    whole = model(ids, labels=labels, ignore_index=3).loss
    with context_parallel(model):
        named = model(part(ids), labels=part(labels), ignore_index=3).loss
        placed = model(part(ids), None, None, None, None, part(labels), ignore_index=3).loss
        states = model.base_model(part(ids), None, None, None, None, False).last_hidden_state
    assert placed == named
    torch.testing.assert_close(states, part(model.base_model(ids).last_hidden_state))
    dist.all_reduce(named)
    torch.testing.assert_close(named, whole, rtol=1e-6, atol=0)


def every_family():
    for config in CONFIGS:
        for kind in ("plain", "packed", "padded", "numbered", "uneven"):
            print(config.model_type, kind, flush=True)
            compare(config, kind)
        compare(config, "packed", checkpointing=True)


def scans():
    """The operators alone, with every backend, in the precision of training."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    x, dt, k, q = random(2, 16, 5), random(2, 16, 5), random(2, 16, 3), random(2, 16, 3)
    a, b = torch.polar(torch.sigmoid(random(2, 16, 5)), random(2, 16, 5)), torch.complex(random(2, 16, 5), dt)
    for backend in ("reference", "chunked", "cpu"):
        for scan, inputs in ((longhorn_scan, (x, dt, k, q)), (linear_scan, (a, b)), (linear_scan, (a[:1, :1], b))):
            whole, final = scan(*inputs, backend=backend)
            split.enter(dist.group.WORLD)
            mine, last = scan(*(i if i.shape[1] == 1 else part(i) for i in inputs), backend=backend)
            split.leave()
            torch.testing.assert_close(mine, part(whole), rtol=1e-5, atol=1e-6)
            if rank == size - 1:
                torch.testing.assert_close(last, final, rtol=1e-5, atol=1e-6)


def dropout():
    """S5 drops channels of whole rows, whoever has them."""
    model = AutoModelForCausalLM.from_config(hf_recurrent.S5Config(**SHARED, state_size=4, num_blocks=1))
    dropped = model.base_model.layers[0].dropout.train()
    dropped.p = 0.5
    torch.manual_seed(dist.get_rank())
    for split_context in (True, False):
        with context_parallel(model) if split_context else contextlib.nullcontext():
            everywhere = split.gather(dropped(torch.ones(4, 3, 64)), dist.group.WORLD)
        assert bool((everywhere == everywhere[0]).all()) == split_context


def exchanges():
    """As many as the logarithm of the ranks says, of two states each."""
    sizes = []
    original = dist.batch_isend_irecv

    def counted(operations):
        sizes.append([o.tensor.numel() for o in operations if o.op is dist.isend])
        return original(operations)

    dist.batch_isend_irecv = counted
    split.entering(torch.rand(2, 3), torch.rand(2, 3), dist.group.WORLD)
    dist.batch_isend_irecv = original
    assert len(sizes) <= 1 + math.ceil(math.log2(dist.get_world_size()))
    assert all(size in ([], [12]) for size in sizes)


def refusals():
    def refused(kind, words, call):
        with pytest.raises(kind, match=words):
            call()

    config = CONFIGS[0]
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.ones(1, 8, dtype=torch.long)
    with context_parallel(model) as context:
        with context.suspended():  # each rank's own text, whatever the others do
            text = torch.ones(1, 8 + dist.get_rank(), dtype=torch.long)
            assert model(text, labels=text).loss.isfinite()
        refused(ValueError, "split already", lambda: context_parallel(model))
        refused(ValueError, "has no cache", lambda: model(ids, use_cache=True))
        refused(ValueError, "give seq_idx", lambda: model(ids, cu_seq_lens_q=torch.tensor([0, 8])))
    assert model(ids, use_cache=True).past_key_values is not None
    refused(
        TypeError, "a causal language model or a backbone",
        lambda: context_parallel(AutoModelForSequenceClassification.from_config(config)),
    )  # fmt: skip
    learned = AutoModelForCausalLM.from_config(hf_recurrent.MinGRUConfig(**SHARED, learned_initial_state=True))
    refused(ValueError, "learned_initial_state=False", lambda: context_parallel(learned))
    for options, words in (({"bidirectional": True}, "needs a causal model"), ({"norm": "batch"}, "norm='batch'")):
        s5 = AutoModelForCausalLM.from_config(hf_recurrent.S5Config(**SHARED, state_size=4, num_blocks=1))
        for name, value in options.items():
            setattr(s5.config, name, value)
        refused(ValueError, words, lambda s5=s5: context_parallel(s5))
    split.enter(dist.group.WORLD)
    refused(ValueError, "initial_state must be None", lambda: linear_scan(*torch.rand(2, 1, 3, 2), torch.rand(1, 2)))
    refused(ValueError, "reverse must be False", lambda: linear_scan(*torch.rand(2, 1, 3, 2), reverse=True))
    split.leave()


def in_group(names):
    dist.init_process_group("gloo")
    try:
        for name in names:
            globals()[name]()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.exit(1)
    dist.destroy_process_group()


@pytest.mark.parametrize("processes", [2, 4])
def test_parts_equal_the_whole(tmp_path, processes):
    log = tmp_path / "log"
    checks = ["exchanges", "refusals", "scans", "dropout", "arguments", "every_family"]
    group = start_group(in_group, checks, processes=processes, log=log)
    assert finish(group, timeout=240) == [0] * processes, "\n".join(
        p.read_text() for p in sorted(tmp_path.glob("log.*"))
    )
