"""The loss without logits: value and gradients of the loss beside them, and what is refused."""

import pytest
import torch
from families import FIRST, TINY, causal_lm, each_family, each_variant, token_ids
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import fixed_cross_entropy

from hf_recurrent.modeling import head
from hf_recurrent.modeling.head import LanguageModelHead, number_of_chunks

EXACTLY = {"rtol": 1e-12, "atol": 1e-12}
WIDE = {"vocab_size": 301}  # four pieces at TINY's hidden_size


def loss_in_float64(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None):
    """Transformers' loss, which is in float32, without its cast."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1)
    return fixed_cross_entropy(logits.reshape(-1, vocab_size), targets, num_items_in_batch, ignore_index)


def step(model, **inputs):
    """The loss, and all gradients by name."""
    model.zero_grad()
    out = model(**inputs)
    assert (out.logits is None) == inputs.get("skip_logits", False)
    out.loss.backward()
    return out.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, close=EXACTLY, **inputs):
    expected_loss, expected = step(model, **inputs)
    loss, found = step(model, **inputs, skip_logits=True)
    torch.testing.assert_close(loss, expected_loss, **close)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **close, msg=lambda m, name=name: f"{name}: {m}")


def packed(config, rows=3, length=14):
    """Rows with padding, documents that end inside of them, and labels that are left out."""
    ids = token_ids(config, rows, length)
    mask, places = torch.ones_like(ids), torch.arange(length).repeat(rows, 1)
    mask[0, :3] = mask[1, 11:] = 0
    places[2] = torch.arange(length) % 5
    labels = ids.masked_fill((mask == 0) | (places == 0), -100)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places, "labels": labels}


@each_variant
def test_value_and_gradients(config):
    config.vocab_size, config.hidden_dropout = 301, 0.0
    model = causal_lm(config).train()
    model.loss_function = loss_in_float64
    batch = packed(config)
    assert_same(model, **batch)
    assert_same(model, **batch, num_items_in_batch=torch.tensor(17))
    model.gradient_checkpointing_enable()
    assert_same(model, **batch, num_items_in_batch=9)


@each_family
def test_precisions(config):
    config.vocab_size, config.hidden_dropout = 301, 0.0
    model = causal_lm(config, torch.float32).train()
    batch = packed(config)
    assert_same(model, {"rtol": 2e-5, "atol": 1e-6}, **batch)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            loss, found = step(model, **batch, skip_logits=True)
            expected_loss, expected = step(model, **batch)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        for name, gradient in found.items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < 4 * torch.finfo(dtype).eps, name


def model_of(**options):
    config_class, tiny = FIRST["mingru"]
    return causal_lm(config_class(**{**tiny, **WIDE, **options})).train()


def test_what_the_loss_takes():
    """Other ignored labels, labels that are shifted already, some positions, no targets, a cache, and inputs_embeds."""
    model = model_of()
    model.loss_function = loss_in_float64
    batch = packed(model.config)
    labels = batch["labels"].masked_fill(batch["labels"] == -100, 5)
    assert_same(model, **batch | {"labels": labels}, ignore_index=5)
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    assert_same(model, **batch | {"labels": None}, shift_labels=shifted)
    assert_same(model, **batch | {"labels": batch["labels"][:, -4:]}, logits_to_keep=4)
    chosen = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(0)) < 0.5
    assert_same(model, **batch | {"labels": batch["labels"][chosen]}, logits_to_keep=chosen)
    embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    assert_same(model, **batch, inputs_embeds=embeds)
    assert_same(model, input_ids=token_ids(model.config, 1, 2), labels=token_ids(model.config, 1, 2))
    nothing = torch.full((2, 5), -100)
    ids = token_ids(model.config, 2, 5)
    assert model(ids, labels=nothing, skip_logits=True).loss.isnan() and model(ids, labels=nothing).loss.isnan()
    first = model(ids[:, :3], labels=ids[:, :3], skip_logits=True, use_cache=True)
    assert first.past_key_values.get_seq_length() == 3
    assert model(ids, labels=ids, skip_logits=True, use_cache=False, return_dict=False)[0].ndim == 0


def test_frozen_parts():
    model = model_of()
    batch = packed(model.config)
    model.lm_head.requires_grad_(False)
    assert_same(model, {"rtol": 1e-5, "atol": 1e-7}, **batch)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert_same(model, {"rtol": 1e-5, "atol": 1e-7}, **batch)
    model.requires_grad_(False)
    expected = model(**batch).loss
    torch.testing.assert_close(model(**batch, skip_logits=True).loss, expected, rtol=1e-6, atol=0)


def test_what_is_refused():
    model = model_of()
    ids = token_ids(model.config, 2, 5)
    with pytest.raises(ValueError, match="skip_logits=True needs labels"):
        model(ids, skip_logits=True)
    with pytest.raises(ValueError, match=r"labels must have the shape \(2, 5\) of the positions with logits"):
        model(ids, labels=ids[:, 1:], skip_logits=True)
    labels = ids.clone()
    labels[1, 3] = 301
    with pytest.raises(IndexError, match="labels holds the class 301, outside the 301 classes"):
        model(ids, labels=labels, skip_logits=True)
    with pytest.raises(NotImplementedError, match="the loss of skip_logits=True is differentiable once"):
        torch.autograd.grad(model(ids, labels=ids, skip_logits=True).loss, model.lm_head.weight, create_graph=True)


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return result


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_all_positions_are_never_there(tied):
    model = model_of(vocab_size=900, hidden_size=12, tie_word_embeddings=tied)
    ids = token_ids(model.config, 3, 70)
    for training in (True, False):
        with Largest() as largest, torch.set_grad_enabled(training):
            loss = model(ids, labels=ids, skip_logits=True, use_cache=False).loss
            if training:
                loss.backward()
        assert largest.numbers < 3 * 70 * 900 / 9, training


def test_other_heads():
    """Another module in the head's place is called for each piece: a resized head, and an adapter around it."""
    peft = pytest.importorskip("peft")
    model = model_of()
    model.resize_token_embeddings(331)
    model.loss_function = loss_in_float64
    assert_same(model, **packed(model.config))
    adapted = peft.get_peft_model(model_of(), peft.LoraConfig(target_modules=["lm_head", "in_proj"], lora_dropout=0.3))
    batch, results = packed(adapted.config), []
    for skip in (False, True):
        torch.manual_seed(1)
        results.append(step(adapted, **batch, skip_logits=skip))
    assert results[0][1].keys() == results[1][1].keys() and any("lm_head" in name for name in results[1][1])


def test_a_head_with_more_than_its_weight():
    for change in ("bias", "parametrization"):
        model = model_of()
        model.loss_function = loss_in_float64
        if change == "bias":
            model.lm_head = LanguageModelHead(TINY["hidden_size"], WIDE["vocab_size"], dtype=torch.float64)
        else:
            nn.utils.parametrizations.weight_norm(model.lm_head)
        assert_same(model, **packed(model.config))
        model.lm_head.requires_grad_(False)
        assert_same(model, **packed(model.config))


@pytest.mark.parametrize("change", [None, "bias", "frozen", "float16"])
def test_rows_of_logits_that_begin_where_products_of_16_bits_are_fast(monkeypatch, change):
    """As on a GPU: the same logits, loss and gradients."""
    model = model_of()
    model.loss_function = loss_in_float64
    if change == "bias":
        model.lm_head = LanguageModelHead(TINY["hidden_size"], WIDE["vocab_size"], dtype=torch.float64)
    model.lm_head.requires_grad_(change != "frozen")
    batch = packed(model.config)
    expected_logits = model(batch["input_ids"]).logits
    expected_loss, expected = step(model, **batch)
    monkeypatch.setattr(head, "MANY", batch["input_ids"].numel())
    monkeypatch.setattr(head, "_in_16_bits_on_a_gpu", lambda weight: True)
    if change == "float16":  # the loss in pieces that are checkpointed
        monkeypatch.setattr(head, "_computed_in", lambda weight: torch.float16)
    logits = model(batch["input_ids"]).logits
    assert logits.stride() == (14 * 304, 304, 1)
    torch.testing.assert_close(logits.view(-1, 301), expected_logits.view(-1, 301), **EXACTLY)
    assert model(batch["input_ids"][:, 1:]).logits.is_contiguous()  # of few positions
    for skip in (False, True):
        loss, found = step(model, **batch, skip_logits=skip)
        torch.testing.assert_close(loss, expected_loss, **EXACTLY)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], **EXACTLY)


def test_compiled():
    """In one piece with the checkpointed blocks."""
    model = model_of(num_hidden_layers=1)
    model.loss_function = loss_in_float64
    model.gradient_checkpointing_enable()
    batch = packed(model.config)
    expected_loss, expected = step(model, **batch, skip_logits=True)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    loss, found = step(model, **batch, skip_logits=True)
    torch.testing.assert_close(loss, expected_loss, **EXACTLY)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-11)


class LossAlone(Trainer):
    """As the documentation has it."""

    def compute_loss(self, model, inputs, **options):
        return super().compute_loss(model, inputs | {"skip_logits": True}, **options)


def test_trainer(tmp_path):
    results = []
    for kind in (Trainer, LossAlone):
        model = model_of().float()
        data = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in token_ids(model.config, 6, 10)]
        arguments = TrainingArguments(
            output_dir=str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=3, logging_steps=1,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, gradient_checkpointing=True, seed=1,
            save_strategy="no",
        )  # fmt: skip
        run = kind(model, arguments, train_dataset=data, eval_dataset=data)
        run.train()
        losses = [line["loss"] for line in run.state.log_history if "loss" in line]
        results.append([*losses, run.evaluate()["eval_loss"]])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_number_of_chunks():
    assert number_of_chunks(WIDE["vocab_size"], TINY["hidden_size"]) == 4
    assert number_of_chunks(257, 256) == 1  # bytes: the logits are small
    assert number_of_chunks(50304, 768) == 9
