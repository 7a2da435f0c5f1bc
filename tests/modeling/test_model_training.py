"""Losses, gradients, precision, compilation, and training with Trainer."""

import copy
import math

import pytest
import torch
from families import FIRST, TINY, causal_lm, classifier, each_family, each_head, each_variant, states, token_ids
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hf_recurrent


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@each_variant
def test_the_loss_is_that_of_the_shifted_labels(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 7)
    labels = input_ids.clone()
    labels[0, 3] = -100
    out = model(input_ids, labels=labels)
    targets = labels[:, 1:].flatten()
    expected = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), targets)
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-6, atol=1e-6)

    summed = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), targets, reduction="sum")
    got = model(input_ids, labels=labels, num_items_in_batch=torch.tensor(40)).loss
    torch.testing.assert_close(got.double(), summed / 40, rtol=1e-6, atol=1e-6)

    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(input_ids, shift_labels=shifted).loss, out.loss)
    torch.testing.assert_close(model(input_ids, labels=labels, shift_labels=shifted).loss, out.loss)
    other = labels.masked_fill(labels == -100, 5)
    without_5 = model(input_ids, labels=other, ignore_index=5).loss
    torch.testing.assert_close(without_5, model(input_ids, labels=other.masked_fill(other == 5, -100)).loss)


@each_family
def test_gradients_of_each_example_by_torch_func(config):
    model = causal_lm(config)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    input_ids = token_ids(config, 3, 6)

    def loss(parameters, row):
        inputs = {"input_ids": row[None], "labels": row[None], "use_cache": False}
        return torch.func.functional_call(model, parameters, (), inputs).loss

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, input_ids)
    for i, row in enumerate(input_ids):
        model.zero_grad()
        model(row[None], labels=row[None]).loss.backward()
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(each[name][i], gradient, rtol=1e-5, atol=1e-6)


@each_variant
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(config, use_reentrant):
    config.hidden_dropout = 0.3  # recomputation must repeat the dropout
    model = causal_lm(config).train()
    input_ids = token_ids(config, 2, 9)
    mask = torch.ones_like(input_ids)
    mask[0, :3] = 0

    def step():
        torch.manual_seed(3)
        model.zero_grad()
        model(input_ids, attention_mask=mask, labels=input_ids).loss.backward()
        return gradients(model)

    expected = step()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    for name, gradient in step().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


@each_family
def test_the_state_carries_gradients_between_calls(config):
    """Two calls that share a cache have the gradients of one call, checkpointed or not."""
    for checkpointing in (False, True):
        model = causal_lm(config).train()
        input_ids = token_ids(config, 2, 9)
        model(input_ids, labels=input_ids, num_items_in_batch=16).loss.backward()
        expected = gradients(model)
        model.zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        first = model(input_ids[:, :5], shift_labels=input_ids[:, 1:6], use_cache=True, num_items_in_batch=16)
        shifted = nn.functional.pad(input_ids[:, 6:], (0, 1), value=-100)
        cache = first.past_key_values
        second = model(input_ids[:, 5:], shift_labels=shifted, past_key_values=cache, num_items_in_batch=16)
        (first.loss + second.loss).backward()
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-11)


@each_variant
def test_one_batch_is_learnt(config):
    config.initializer_range = None
    config.hidden_dropout = 0.0
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    input_ids = token_ids(config, 4, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(200):
        loss = model(input_ids, labels=input_ids).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss < 0.3 * math.log(config.vocab_size)


@each_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_states_in_float32(config, dtype):
    model = causal_lm(config, torch.float32)
    input_ids = token_ids(config, 2, 20)
    expected = model(input_ids, labels=input_ids)
    with torch.autocast("cpu", dtype):
        out = model(input_ids, labels=input_ids, use_cache=True)
    out.loss.backward()
    assert out.logits.dtype is dtype
    for layer in out.past_key_values.layers:
        assert layer.states["recurrent"].dtype in (torch.float32, torch.complex64)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    error, exact = (out.logits - expected.logits).double(), expected.logits.double()
    if config.model_type == "gateloop":
        # q, k and v are all linear in x, so y is a cubic form of it (quartic with the gate), whose terms are summed
        # after rotations: a single logit may be what is left of much larger terms. In float64, the rounding of the
        # projections' outputs to bfloat16 alone moves the largest by 4 %. All together are as exact as elsewhere.
        assert error.square().mean().sqrt() < 4 * torch.finfo(dtype).eps * exact.square().mean().sqrt()
    else:
        assert error.abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


@each_family
@pytest.mark.parametrize("autocast", [False, True])
def test_a_very_long_text_in_bfloat16(config, autocast):
    """65,536 tokens, half of them the same one, which gives a state nothing to average over."""
    config.initializer_range = None
    model = causal_lm(config, torch.float32 if autocast else torch.bfloat16).train()
    input_ids = token_ids(config, 1, 2**16)
    input_ids[:, 2**15 :] = 7
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(input_ids, labels=input_ids, use_cache=True)
    out.loss.backward()
    assert out.logits.isfinite().all() and out.loss.isfinite()
    assert all(state.isfinite().all() for state in states(out.past_key_values))
    assert all(p.grad.isfinite().all() for p in model.parameters())


@each_family
def test_half_precision_weights_train(config):
    model = causal_lm(config, torch.bfloat16).train()
    input_ids = token_ids(config, 2, 20)
    out = model(input_ids, labels=input_ids, output_hidden_states=True)
    out.loss.backward()
    assert out.logits.dtype is torch.bfloat16
    # The residual stream is wide, what the head reads is not.
    assert [x.dtype for x in out.hidden_states] == [torch.float32] * config.num_hidden_layers + [torch.bfloat16]
    assert all(p.grad.dtype is torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


@each_variant
def test_residual_in_fp32_only_adds_precision(config):
    input_ids = token_ids(config, 2, 20)
    errors = {}
    for wide in (True, False):
        config.residual_in_fp32 = wide
        model = causal_lm(config, torch.bfloat16)
        exact = causal_lm(config, torch.float64)
        exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
        with torch.no_grad():
            errors[wide] = (model(input_ids).logits - exact(input_ids).logits).square().mean()
    assert errors[True] < 1.1 * errors[False]


@each_family
def test_compiled_forward_and_backward(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 9)
    mask = torch.ones_like(input_ids)
    mask[0, :2] = mask[1, 4:6] = 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).repeat(2, 1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kwargs in ({}, {"attention_mask": mask, "position_ids": positions}):
        results = []
        real = kwargs.get("attention_mask", torch.ones_like(input_ids)) == 1
        labels = input_ids.clone()
        labels[:, 1:][~real[:, :-1]] = -100  # what comes out at padding is arbitrary, and so would be its loss
        for which in (model, compiled):
            model.zero_grad()
            out = which(input_ids, labels=labels, use_cache=True, **kwargs)
            out.loss.backward()
            results.append((out.logits[real], *states(out.past_key_values), *gradients(model).values()))
        for got, want in zip(*reversed(results), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    torch._dynamo.reset()


@each_family
@torch.no_grad()
def test_compiled_decoding_compiles_once_or_twice(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 12)
    expected = model(input_ids).logits
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    cache = model(input_ids[:, :4], use_cache=True).past_key_values
    for t in range(4, 12):
        out = compiled(input_ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        torch.testing.assert_close(out.logits[:, 0], expected[:, t], rtol=1e-9, atol=1e-11)
    assert counter.frame_count <= 2  # the second makes the number of tokens seen symbolic
    torch._dynamo.reset()


@each_family
@torch.no_grad()
def test_compiled_by_inductor(config):
    model = causal_lm(config, torch.float32)
    input_ids = token_ids(config, 2, 9)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(input_ids).logits, model(input_ids).logits, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@each_family
def test_hidden_states(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 5)
    out = model(input_ids, output_hidden_states=True)
    assert len(out.hidden_states) == config.num_hidden_layers + 1
    assert torch.equal(out.hidden_states[0], model.get_input_embeddings()(input_ids))
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    assert model(input_ids).hidden_states is None
    config.output_hidden_states = True
    assert len(model(input_ids).hidden_states) == config.num_hidden_layers + 1


@each_family
def test_tuples_and_positional_arguments(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 5)
    mask = torch.ones_like(input_ids)
    out = model(input_ids, labels=input_ids)
    loss, logits, cache = model(input_ids, mask, None, None, None, input_ids, return_dict=False)
    assert torch.equal(loss, out.loss) and torch.equal(logits, out.logits)
    assert isinstance(cache, hf_recurrent.RecurrentCache)
    assert len(model.model(input_ids, use_cache=False, return_dict=False)) == 1


@each_family
def test_logits_to_keep(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 6)
    whole = model(input_ids).logits
    some = torch.tensor([0, 3])
    each = torch.tensor([[1, 2], [5, 0]])
    mask = torch.rand(2, 6) < 0.5
    torch.testing.assert_close(model(input_ids, logits_to_keep=0).logits, whole)
    torch.testing.assert_close(model(input_ids, logits_to_keep=2).logits, whole[:, -2:])
    torch.testing.assert_close(model(input_ids, logits_to_keep=50).logits, whole)
    torch.testing.assert_close(model(input_ids, logits_to_keep=some).logits, whole[:, some])
    torch.testing.assert_close(model(input_ids, logits_to_keep=each).logits, whole[torch.arange(2)[:, None], each])
    torch.testing.assert_close(model(input_ids, logits_to_keep=mask).logits, whole[mask])


@each_variant
def test_embeddings_can_be_resized(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 5)
    before = model(input_ids).logits
    old = config.vocab_size
    model.resize_token_embeddings(old + 7)
    assert model.config.vocab_size == old + 7 == model.lm_head.out_features == model.model.embed_tokens.num_embeddings
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == config.tie_word_embeddings
    torch.testing.assert_close(model(input_ids).logits[..., :old], before)
    new = torch.full((1, 3), old + 6)
    assert model(new, labels=new).loss.isfinite()
    model.resize_token_embeddings(old - 5)
    with pytest.raises(IndexError, match=f"token id {old - 5}, outside the vocabulary of {old - 5} tokens"):
        model(torch.tensor([[old - 5]]))


@each_head
@torch.no_grad()
def test_every_head_takes_embeddings_and_a_larger_vocabulary(config, auto_class):
    config.num_labels = 3
    torch.manual_seed(0)
    model = auto_class.from_config(config).double().eval()
    input_ids = token_ids(config, 2, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    out = model(input_ids, attention_mask=mask, output_hidden_states=True)
    embeds = model.get_input_embeddings()(input_ids)
    again = model(inputs_embeds=embeds, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(again[0], out[0]) and len(out.hidden_states) == config.num_hidden_layers + 1
    assert all(torch.equal(*pair) for pair in zip(again.hidden_states, out.hidden_states, strict=True))
    old = config.vocab_size
    model.resize_token_embeddings(old + 3)
    assert model.config.vocab_size == old + 3 == model.get_input_embeddings().num_embeddings
    resized = model(input_ids, attention_mask=mask)[0]
    torch.testing.assert_close(resized[..., :old] if auto_class is AutoModelForCausalLM else resized, out[0])
    assert model(torch.full((1, 2), old + 2))[0].isfinite().all()


@each_family
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_the_classifier_reads_the_last_real_token(config, side):
    config.num_labels, config.pad_token_id = 3, 5
    model = classifier(config)
    lengths, width = [3, 8, 5], 8
    rows = [token_ids(config, 1, n, seed=n)[0] for n in lengths]
    rows[0][-1] = 5  # a real token that happens to be the padding token, as when it is also the end of text
    input_ids = torch.full((3, width), 5)
    mask = torch.zeros(3, width, dtype=torch.long)
    for b, row in enumerate(rows):
        place = slice(width - len(row), None) if side == "left" else slice(len(row))
        input_ids[b, place], mask[b, place] = row, 1
    alone = torch.cat([model(row[None], attention_mask=torch.ones(1, len(row))).logits for row in rows])
    assert alone.shape == (3, 3)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(model(input_ids, attention_mask=mask).logits, alone, **close)
    embeds = model.get_input_embeddings()(input_ids)
    torch.testing.assert_close(model(inputs_embeds=embeds, attention_mask=mask).logits, alone, **close)
    if side == "right":  # without a mask, padding before a text is part of the text
        torch.testing.assert_close(model(input_ids).logits[1:], alone[1:], **close)
    config.pad_token_id = None
    torch.testing.assert_close(model(input_ids, attention_mask=mask).logits, alone, **close)
    # The state goes on as in a language model: the last chunk decides.
    cache = model(rows[1][None, :5], use_cache=True).past_key_values
    out = model(rows[1][None, 5:], attention_mask=torch.ones(1, 8), past_key_values=cache)
    torch.testing.assert_close(out.logits, alone[1:2], **close)


@each_family
@pytest.mark.parametrize(
    "num_labels, problem_type, labels",
    [
        (3, None, torch.tensor([0, 2])),
        (1, None, torch.tensor([0.5, -1.0])),
        (3, "multi_label_classification", torch.tensor([[0.0, 1, 1], [1, 0, 0]])),
        (2, "regression", torch.tensor([[0.5, 1], [1, -2]])),
    ],
)
def test_classification_losses(config, num_labels, problem_type, labels):
    config.num_labels, config.problem_type = num_labels, problem_type
    model = classifier(config)
    labels = labels.double() if labels.is_floating_point() else labels
    out = model(token_ids(config, 2, 5), labels=labels)
    if num_labels == 3 and problem_type is None:
        expected = nn.functional.cross_entropy(out.logits, labels)
    elif problem_type == "multi_label_classification":
        expected = nn.functional.binary_cross_entropy_with_logits(out.logits, labels)
    else:
        expected = nn.functional.mse_loss(out.logits.squeeze(), labels)
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert model.score.weight.grad.abs().sum() > 0


@each_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "problem_type, labels, other",
    [
        ("multi_label_classification", [[0, 1], [1, 1]], torch.float32),
        ("regression", [[3, 1], [0, -2]], torch.float32),
        ("single_label_classification", [0, 1], torch.int32),
        ("single_label_classification", [[0], [1]], torch.int16),
    ],
    ids=str,
)
def test_labels_of_any_dtype(config, dtype, problem_type, labels, other):
    """Integers, as JSON has them, under every problem; and the loss of narrow weights is computed in float32."""
    config.problem_type = problem_type
    model, input_ids = classifier(config, dtype), token_ids(config, 2, 5)
    out = model(input_ids, labels=torch.tensor(labels))
    assert torch.equal(out.loss, model(input_ids, labels=torch.tensor(labels, dtype=other)).loss)
    assert out.loss.dtype is torch.float32 and out.logits.dtype is dtype
    out.loss.backward()
    assert model.score.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("config_class", hf_recurrent.FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"hidden_size": 256, "num_hidden_layers": 3},
        {"hidden_size": 256, "num_hidden_layers": 3, "tie_word_embeddings": True},
        {"hidden_size": 128, "num_hidden_layers": 6, "conv_kernel": 0, "expansion": 1, "mlp_ratio": 0},
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 16, "expansion": 6, "tie_word_embeddings": True},
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32000},
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32000, "tie_word_embeddings": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_fresh_model_guesses_uniformly(config_class, options):
    config = config_class(**{"vocab_size": 256, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    input_ids = token_ids(config, 4, 128)
    loss = model(input_ids, labels=input_ids).loss
    assert loss == pytest.approx(math.log(config.vocab_size), rel=0.02)


@each_variant
def test_initial_weights(config):
    torch.manual_seed(0)
    config.initializer_range = None
    config.hidden_size, config.num_hidden_layers = 80, 3
    model = AutoModelForCausalLM.from_config(config)
    terms = 3 * (2 if config.mlp_ratio else 1)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            outermost = name in ("lm_head", "model.embed_tokens")
            std = (0.25 if outermost else 1.0) / math.sqrt(module.weight.shape[1])
            if name.endswith(("out_proj", "down_proj")):
                std /= math.sqrt(terms)
            sampling_error = 1 / math.sqrt(2 * module.weight.numel())
            assert module.weight.std().item() == pytest.approx(std, rel=max(0.02, 4 * sampling_error)), name
            if name.endswith(("out_proj", "down_proj")) and module.bias is not None:
                assert (module.bias == 0).all(), name
        elif isinstance(module, nn.RMSNorm):
            assert (module.weight == 1).all(), name
        elif isinstance(module, nn.Conv1d):
            assert module.weight.std().item() == pytest.approx((1 / (3 * config.conv_kernel)) ** 0.5, rel=0.2), name
            assert module.weight.abs().max() <= config.conv_kernel**-0.5
    config.initializer_range = 0.07
    model = AutoModelForCausalLM.from_config(config)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.07, rel=0.05)


# What decays, by the last module or parameter of its name; and what has the recurrence's learning rate.
DECAYING = {"embed_tokens", "lm_head", "in_proj", "out_proj", "up_proj", "down_proj", "conv1d", "gate_proj", "x_proj"}
DECAYING |= {"dt_head", "transition_proj", "out1", "out2", "C"}
OWN_RATE = {"s5": {"Lambda_re", "Lambda_im", "B", "log_step"}}
OWN_RATE |= {"gateloop": {"transition", "transition_proj"}}


@each_variant
def test_parameter_groups(config):
    model = causal_lm(config, torch.float32)
    model.model.norm = None if model.model.norm is None else model.model.norm.requires_grad_(False)
    groups = model.parameter_groups(0.3, 0.2, recurrence_lr=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(found) == len(names) == sum(len(g["params"]) for g in groups)
    for name, options in found.items():
        parts = set(name.split("."))
        decays = bool(parts & DECAYING) and not name.endswith("bias")
        own_rate = bool(parts & OWN_RATE.get(config.model_type, set()))
        assert options == (0.1 if own_rate else 0.3, 0.2 if decays else 0.0), name
    assert {(g["lr"], g["weight_decay"]) for g in model.parameter_groups(0.3, 0.2)} == {(0.3, 0.2), (0.3, 0.0)}
    assert len(model.parameter_groups(0.3)) == 1
    (group,) = model.model.parameter_groups(0.3)  # the backbone alone
    assert len(group["params"]) == sum(name.startswith("model.") for name in found)


def test_exceptions_in_parameter_groups():
    model = causal_lm(hf_recurrent.S5Config(**TINY))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    exceptions = {"B": {"lr": 0.3, "weight_decay": 0.2}, "log_step": {"betas": (0.5, 0.9)}}
    groups = model.parameter_groups(0.3, 0.2, recurrence_lr=0.1, exceptions=exceptions)
    torch.optim.AdamW(groups)  # which fills in its own defaults
    by_name = {names[id(p)].split(".")[-1]: g for g in groups for p in g["params"]}
    assert (by_name["B"]["lr"], by_name["B"]["weight_decay"]) == (0.3, 0.2)
    assert (by_name["log_step"]["betas"], by_name["Lambda_re"]["betas"]) == ((0.5, 0.9), (0.9, 0.999))
    exceptions = {"model.layers.1.mixer.ssm.B": {"lr": 0.7}, "layers.1": {"lr": 0.6}}
    exceptions |= {"B": {"lr": 0.5, "betas": [0.5, 0.9]}, "ssm": {"lr": 0.4}}
    for given in (exceptions, dict(reversed(exceptions.items()))):  # the most specific one counts
        groups = model.parameter_groups(0.3, exceptions=given)
        rates = {names[id(p)]: g["lr"] for g in groups for p in g["params"]}
        at = {layer: [rates[f"model.layers.{layer}.mixer.ssm.{name}"] for name in ("B", "C")] for layer in (0, 1)}
        assert at == {0: [0.5, 0.4], 1: [0.7, 0.6]} and rates["lm_head.weight"] == 0.3
        assert len(groups) == 5 and sum(g.get("betas") == [0.5, 0.9] for g in groups) == 2
    with pytest.raises(ValueError, match="exceptions: no trainable parameter's name has a part 'A_log'"):
        model.parameter_groups(0.3, exceptions={"A_log": {"lr": 0.1}})


def texts(config, n=12):
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in token_ids(config, n, 10)]


def trainer(model, path, data, **kwargs):
    arguments = TrainingArguments(
        output_dir=str(path), report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1, **kwargs
    )
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data)


@each_family
@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True, "gradient_accumulation_steps": 2}, {"bf16": True}]
)
def test_trainer(config, options, tmp_path):
    """Ten steps with the family's own parameter groups, an evaluation, and the saved model's own loss again."""
    model = causal_lm(config, torch.float32)
    run = trainer(model, tmp_path, texts(config), max_steps=10, per_device_train_batch_size=2, **options)
    run.optimizer = torch.optim.AdamW(model.parameter_groups(5e-3, 0.1, recurrence_lr=2e-3))
    before = run.evaluate()["eval_loss"]
    run.train()
    after = run.evaluate()["eval_loss"]
    assert after < before
    rates = [group["initial_lr"] for group in run.optimizer.param_groups]
    assert set(rates) == {group["lr"] for group in model.parameter_groups(5e-3, recurrence_lr=2e-3)}
    run.save_model(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    again = trainer(loaded, tmp_path, texts(config), bf16=options.get("bf16", False))
    assert again.evaluate()["eval_loss"] == pytest.approx(after)


@each_family
def test_trainer_on_a_classifier(config, tmp_path):
    config.num_labels = 3
    model = classifier(config, torch.float32)
    data = [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(texts(config))]
    run = trainer(model, tmp_path, data, max_steps=10, gradient_checkpointing=True, bf16=True, learning_rate=5e-3)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < before


@each_family
def test_accumulation_equals_one_large_batch(config, tmp_path):
    """Causal LM by the number of tokens, classification by the number of micro-batches."""
    config.num_labels = 3
    data = texts(config, 4)
    data[0]["labels"][5:] = [-100] * 5
    classes = [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(data)]
    for make, rows in ((causal_lm, data), (classifier, classes)):
        trained = []
        for size in (4, 2):
            model = make(copy.deepcopy(config))  # which saving writes into
            run = trainer(
                model,
                tmp_path,
                rows,
                max_steps=1,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=4 // size,
                learning_rate=0.1,
                optim="sgd",
                max_grad_norm=0.0,
                lr_scheduler_type="constant",
            )
            run.train()
            trained.append([p.detach().clone() for p in model.parameters()])
        for x, y in zip(*trained, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-8)


@each_family
def test_label_smoothing_shifts_the_labels(config, tmp_path):
    """Trainer shifts them only for class names that it knows as causal language models."""
    model = causal_lm(config)
    data = texts(config, 2)
    run = trainer(model, tmp_path, data, label_smoothing_factor=0.1)
    batch = {key: torch.tensor([row[key] for row in data]) for key in ("input_ids", "labels")}
    loss = run.compute_loss(model, dict(batch))
    logits = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


def test_the_table_of_families_is_complete():
    assert {config_class for config_class, _ in FIRST.values()} == set(hf_recurrent.FAMILIES)
    assert all(TINY.items() <= options.items() for _, options in FIRST.values())
