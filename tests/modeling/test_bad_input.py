"""Arguments of `forward` that cannot be right, and those that these models cannot honour: one exact error each."""

import pytest
import torch
from families import causal_lm, classifier, each_family, each_head, states, token_ids

from hf_recurrent import RecurrentCache


@each_family
@pytest.mark.parametrize("bad", [-1, 61, 10**9])
def test_token_ids_outside_the_vocabulary(config, bad):
    for model in (causal_lm(config), classifier(config)):
        input_ids = token_ids(config, 2, 5)
        input_ids[1, 3] = bad
        with pytest.raises(IndexError, match=rf"token id {bad}, outside the vocabulary of 61 tokens \(ids 0 to 60\)"):
            model(input_ids)


SHAPES = [
    ({"input_ids": None}, ValueError, "exactly one of input_ids or inputs_embeds"),
    ({"inputs_embeds": torch.zeros(2, 5, 12)}, ValueError, "exactly one of input_ids or inputs_embeds"),
    ({"input_ids": torch.zeros(5, dtype=torch.long)}, ValueError, r"integers .* got torch.int64 of the shape \(5,\)"),
    ({"input_ids": torch.zeros(2, 5)}, ValueError, r"integers .* got torch.float32 of the shape \(2, 5\)"),
    ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, ValueError, r"input_ids is empty, with the shape \(2, 0\)"),
    ({"input_ids": torch.zeros(0, 5, dtype=torch.long)}, ValueError, r"input_ids is empty, with the shape \(0, 5\)"),
    (
        {"input_ids": None, "inputs_embeds": torch.zeros(2, 5, 13)},
        ValueError,
        r"inputs_embeds must have the shape \(batch, length, 12\), got \(2, 5, 13\)",
    ),
    ({"input_ids": torch.zeros(2, 5, dtype=torch.bool)}, ValueError, r"integers \(int64 or int32\) .* got torch.bool"),
    (
        {"input_ids": None, "inputs_embeds": torch.zeros(2, 5, 12, dtype=torch.long)},
        ValueError,
        "inputs_embeds must be floats, got torch.int64: are they input_ids?",
    ),
    (
        {"input_ids": None, "inputs_embeds": torch.zeros(2, 0, 12)},
        ValueError,
        r"inputs_embeds is empty, with the shape \(2, 0, 12\)",
    ),
    (
        {"input_ids": None, "inputs_embeds": torch.zeros(0, 5, 12)},
        ValueError,
        r"inputs_embeds is empty, with the shape \(0, 5, 12\)",
    ),
    ({"attention_mask": torch.ones(2, 4)}, ValueError, r"attention_mask must have the shape \(2, 5\), got \(2, 4\)"),
    ({"attention_mask": torch.ones(1, 5)}, ValueError, r"attention_mask must have the shape \(2, 5\), got \(1, 5\)"),
    ({"attention_mask": torch.ones(2, 1, 5, 5)}, ValueError, r"attention_mask must have .* got \(2, 1, 5, 5\)"),
    ({"position_ids": torch.zeros(5, dtype=torch.long)}, ValueError, r"position_ids must have .* got \(5,\)"),
    ({"position_ids": torch.zeros(3, 2, 5, dtype=torch.long)}, ValueError, r"position_ids .* got \(3, 2, 5\)"),
    ({"seq_idx": torch.zeros(2, 6, dtype=torch.int)}, ValueError, r"seq_idx must have .* got \(2, 6\)"),
    ({"cu_seq_lens_q": torch.tensor([0, 5])}, ValueError, "for a single row of packed documents, .* with 2 rows"),
    ({"cu_seq_lens_k": torch.tensor([0, 5])}, ValueError, "cu_seq_lens_k must equal cu_seq_lens_q"),
    (
        {"labels": torch.zeros(2, 6, dtype=torch.long)},
        ValueError,
        r"labels must have the shape \(2, 5\) .* got \(2, 6\)",
    ),
    (
        {"labels": torch.zeros(2, 5, dtype=torch.long), "logits_to_keep": 1},
        ValueError,
        r"labels must have the shape \(2, 1\) of the positions with logits, got \(2, 5\)",
    ),
    ({"logits_to_keep": -3}, ValueError, r"logits_to_keep must be 0 \(all\) or a number of positions, got -3"),
    ({"token_type_ids": torch.zeros(2, 5)}, TypeError, "unexpected keyword argument 'token_type_ids'"),
    ({"is_causal": False}, TypeError, "unexpected keyword argument 'is_causal'"),
    ({"inputs_embed": torch.zeros(2, 5, 12)}, TypeError, "unexpected keyword argument 'inputs_embed'"),
]


@each_family
@pytest.mark.parametrize("arguments, error, message", SHAPES, ids=[message for _, _, message in SHAPES])
def test_forward(config, arguments, error, message):
    model = causal_lm(config)
    with pytest.raises(error, match=message):
        model(**{"input_ids": token_ids(config, 2, 5), **arguments})


@each_family
@pytest.mark.parametrize("from_config", [False, True])
def test_attention_weights_where_there_are_none(config, from_config):
    config.output_attentions = from_config
    model, arguments = causal_lm(config), {} if from_config else {"output_attentions": True}
    if "attentions" in model.model._can_record_outputs:
        assert len(model(token_ids(config, 2, 5), **arguments).attentions) == config.num_hidden_layers
    else:
        with pytest.raises(ValueError, match="has no attention weights to return"):
            model(token_ids(config, 2, 5), **arguments)


@each_family
def test_the_mask_may_cover_the_past_too(config):
    model = causal_lm(config)
    cache = model(token_ids(config, 2, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"must have the shape \(2, 5\) or, .* \(2, 9\), got \(2, 8\)"):
        model(token_ids(config, 2, 5), attention_mask=torch.ones(2, 8), past_key_values=cache)


@each_family
@pytest.mark.parametrize(
    "boundaries, message",
    [
        ([0, 3], "must run from 0 to the row's length 5, got 0 to 3"),
        ([1, 5], "must run from 0 to the row's length 5, got 1 to 5"),
        ([0, 4, 2, 5], r"must not fall, got \[0, 4, 2, 5\]"),
        ([0.0, 2.5, 5.0], "must be integers, at least 2 of them, got torch.float32"),
        ([], "must be integers, at least 2 of them"),
        ([5], "must be integers, at least 2 of them"),
        ([[0, 5]], r"must have one dimension, .* got the shape \(1, 2\)"),
    ],
)
def test_boundaries_of_documents(config, boundaries, message):
    with pytest.raises(ValueError, match=f"cu_seq_lens_q {message}"):
        causal_lm(config)(token_ids(config, 1, 5), cu_seq_lens_q=torch.tensor(boundaries))
    with pytest.raises(ValueError, match="cu_seq_lens_k must equal cu_seq_lens_q"):
        causal_lm(config)(
            token_ids(config, 1, 5), cu_seq_lens_q=torch.tensor([0, 5]), cu_seq_lens_k=torch.tensor([0, 2, 5])
        )


@each_family
def test_arguments_that_are_none_or_change_nothing_are_taken(config):
    """What peft and pipelines pass along."""
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 5)
    out = model(input_ids, output_attentions=None, token_type_ids=None, num_items_in_batch=None, max_length_q=5)
    assert torch.equal(out.logits, model(input_ids, output_attentions=False).logits)


@each_head
@pytest.mark.parametrize("mask", [[[0] * 5, [1] * 5], [[0] * 5] * 2], ids=["one", "all"])
def test_rows_of_padding_are_finite(config, auto_class, mask):
    """Outputs, states and gradients; in training too, with statistics over a batch where there is nothing."""
    config.num_labels = 3
    input_ids, mask = token_ids(config, 2, 5), torch.tensor(mask)
    model = auto_class.from_config(config)
    for training in (False, True):
        model.train(training).zero_grad()
        out = model(input_ids, attention_mask=mask)
        assert out[0].isfinite().all()
        assert all(x.isfinite().all() for x in states(getattr(out, "past_key_values", None) or RecurrentCache(config)))
        out[0].sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        assert all(x.isfinite().all() for x in model.state_dict().values())


@each_family
@pytest.mark.parametrize("bad", [-1, 3, 70])
def test_labels_outside_the_classes(config, bad):
    config.num_labels = 3
    message = rf"^labels holds the class {bad}, outside the 3 classes \(0 to 2\)$"
    with pytest.raises(IndexError, match=message):
        classifier(config)(token_ids(config, 2, 5), labels=torch.tensor([0, bad]))
    config.vocab_size = 3
    labels = torch.tensor([[0, -100, 1, bad, 2]])
    for name, arguments in (("labels", {}), ("shift_labels", {"shift_labels": labels})):
        with pytest.raises(IndexError, match=message.replace("labels", name, 1)):
            causal_lm(config)(torch.zeros(1, 5, dtype=torch.long), labels=labels, **arguments)


@each_family
@pytest.mark.parametrize(
    "problem_type, labels, error, message",
    [
        # Losses would broadcast the first two.
        ("regression", [0.5, 1.5], ValueError, r"shape \(2, 2\) for regression, got \(2,\)"),
        ("regression", [[0.5, 1.5]], ValueError, r"shape \(2, 2\) for regression, got \(1, 2\)"),
        ("multi_label_classification", [0, 1], ValueError, r"\(2, 2\) for multi_label_classification, got \(2,\)"),
        (None, [0, 1, 1], ValueError, r"shape \(2,\) for single_label_classification, got \(3,\)"),
        (None, [0.0, 1.0], ValueError, r"shape \(2, 2\) for multi_label_classification, got \(2,\)"),
        ("single_label_classification", [0.0, 1.0], TypeError, "integers for single_label_.*, got torch.float32"),
    ],
    ids=str,
)
def test_labels_that_do_not_fit_the_problem(config, problem_type, labels, error, message):
    config.problem_type = problem_type
    with pytest.raises(error, match=f"^labels must .*{message}$"):
        classifier(config)(token_ids(config, 2, 5), labels=torch.tensor(labels))


@each_family
def test_a_state_of_another_dtype(config):
    double, single = causal_lm(config), causal_lm(config, torch.float32)
    input_ids = token_ids(config, 2, 5)
    for model, other in ((double, single), (single, double)):
        cache = other(input_ids, use_cache=True).past_key_values
        given = cache.layers[0].states["recurrent"].dtype
        expected = model(input_ids, use_cache=True).past_key_values.layers[0].states["recurrent"].dtype
        with pytest.raises(TypeError, match=f"layer 0 has {given}, .*Model in {model.dtype} expects {expected}"):
            model(input_ids, past_key_values=cache)
    # The states of bfloat16 weights are in float32, and so go on under others.
    narrow = causal_lm(config, torch.bfloat16)
    single(input_ids, past_key_values=narrow(input_ids, use_cache=True).past_key_values)
