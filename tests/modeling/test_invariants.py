"""What every family must keep true: chunk, padding and packing invariance, constant memory, round trip."""

import itertools

import pytest
import torch
from families import causal_lm, each_family, each_variant, states, token_ids
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64


def run(model, input_ids, splits=None, **kwargs):
    """Logits and cache of one call, or of one call per chunk that carries the cache; arguments (B, L) are cut too."""
    length = input_ids.shape[1]
    cache, logits = None, []
    for start, end in itertools.pairwise([0, *(splits or []), length]):
        chunk = {name: x[:, start:end] for name, x in kwargs.items()}
        out = model(input_ids[:, start:end], past_key_values=cache, use_cache=True, **chunk)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, dim=1), cache


def assert_same_states(got, expected):
    for x, y in zip(states(got), states(expected), strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@each_variant
@pytest.mark.parametrize("splits", [[1], [2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [9]], ids=str)
@torch.no_grad()
def test_chunks_give_the_outputs_of_one_call(config, splits):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 11)
    whole, whole_cache = run(model, input_ids)
    chunked, chunked_cache = run(model, input_ids, splits)
    torch.testing.assert_close(chunked, whole, **CLOSE)
    assert_same_states(chunked_cache, whole_cache)
    assert chunked_cache.get_seq_length() == whole_cache.get_seq_length() == 11


def padded(rows, length, places, filler):
    """Rows of tokens put at the given places of a wider batch filled with other tokens, and the attention mask."""
    input_ids = filler[: len(rows), :length].clone()
    attention_mask = torch.zeros_like(input_ids)
    for b, (row, place) in enumerate(zip(rows, places, strict=True)):
        input_ids[b, place] = row
        attention_mask[b, place] = 1
    return input_ids, attention_mask


def padding_places(kind, lengths, width):
    generator = torch.Generator().manual_seed(1)
    for n in lengths:
        if kind == "left":
            yield torch.arange(width - n, width)
        elif kind == "right":
            yield torch.arange(n)
        elif kind == "interior":  # first and last column are real, the padding lies in between
            inner = torch.randperm(width - 2, generator=generator)[: n - 2] + 1
            yield torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([width - 1])])
        else:
            yield torch.randperm(width, generator=generator)[:n].sort().values


@each_variant
@pytest.mark.parametrize("splits", [None, [1, 2, 5], [8]], ids=str)
@pytest.mark.parametrize("kind", ["left", "right", "interior", "anywhere"])
@torch.no_grad()
def test_padding_changes_neither_outputs_nor_states(config, kind, splits):
    model = causal_lm(config)
    lengths, width = [3, 9, 12], 12
    rows = [token_ids(config, 1, n, seed=n)[0] for n in lengths]
    places = list(padding_places(kind, lengths, width))
    input_ids, attention_mask = padded(rows, width, places, token_ids(config, 3, width, seed=99))
    logits, cache = run(model, input_ids, splits, attention_mask=attention_mask)
    for b, (row, place) in enumerate(zip(rows, places, strict=True)):
        alone, alone_cache = run(model, row[None])
        torch.testing.assert_close(logits[b, place], alone[0], **CLOSE)
        for x, y in zip(states(cache), states(alone_cache), strict=True):
            torch.testing.assert_close(x[b], y[0], **CLOSE)


@each_family
@torch.no_grad()
def test_padding_may_hold_anything(config):
    model = causal_lm(config)
    embeds = model.get_input_embeddings()(token_ids(config, 2, 8))
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0, 0]])
    expected = model(inputs_embeds=embeds, attention_mask=mask, use_cache=True)
    wild = torch.where(mask[..., None] == 1, embeds, torch.tensor(float("inf"), dtype=embeds.dtype))
    got = model(inputs_embeds=wild, attention_mask=mask, use_cache=True)
    assert torch.equal(got.logits[mask == 1], expected.logits[mask == 1])
    for x, y in zip(states(got.past_key_values), states(expected.past_key_values), strict=True):
        assert torch.equal(x, y)


@each_family
@torch.no_grad()
def test_a_row_of_padding_leaves_the_state_alone(config):
    model = causal_lm(config)
    _, cache = run(model, token_ids(config, 2, 5))
    before = [x.clone() for x in states(cache)]
    out = model(token_ids(config, 2, 4, seed=1), attention_mask=torch.tensor([[0] * 4, [1] * 4]), past_key_values=cache)
    assert out.logits.isfinite().all()
    for x, y in zip(states(cache), before, strict=True):
        assert torch.equal(x[0], y[0]) and not torch.equal(x[1], y[1])


@each_family
@torch.no_grad()
def test_decoding_and_padding_share_a_batch(config):
    """One row takes one new token while the other waits: single-token calls honour the mask too."""
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 6)
    whole, _ = run(model, input_ids)
    _, cache = run(model, input_ids[:, :4])
    first = model(input_ids[:, 4:5], attention_mask=torch.tensor([[1], [0]]), past_key_values=cache)
    second = model(input_ids[:, 5:6], attention_mask=torch.tensor([[1], [0]]), past_key_values=cache)
    third = model(input_ids[:, 4:5], attention_mask=torch.tensor([[0], [1]]), past_key_values=cache)
    torch.testing.assert_close(first.logits[0, 0], whole[0, 4], **CLOSE)
    torch.testing.assert_close(second.logits[0, 0], whole[0, 5], **CLOSE)
    torch.testing.assert_close(third.logits[1, 0], whole[1, 4], **CLOSE)


def packed(config, lengths=(3, 1, 2, 5)):
    """Documents, the row that holds them all, and the positions in their documents."""
    documents = [token_ids(config, 1, n, seed=n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return documents, torch.cat(documents, dim=1), positions


@each_variant
@pytest.mark.parametrize("how", ["position_ids", "position_ids_from_2", "seq_idx", "cu_seq_lens", "all"])
@torch.no_grad()
def test_packed_documents_give_their_own_outputs(config, how):
    model = causal_lm(config)
    documents, row, positions = packed(config)
    boundaries = torch.tensor([0, 3, 4, 6, 11], dtype=torch.int32)
    arguments = {
        "position_ids": {"position_ids": positions},
        "position_ids_from_2": {"position_ids": positions + 2},
        "seq_idx": {"seq_idx": torch.tensor([[0] * 3 + [1] + [2] * 2 + [0] * 5], dtype=torch.int32)},
        "cu_seq_lens": {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries.clone(),
            "max_length_q": 5,
            "max_length_k": 5,
        },
    }
    arguments["all"] = {name: x for some in arguments.values() for name, x in some.items()}
    out = model(row, use_cache=True, **arguments[how])
    alone = [run(model, document) for document in documents]
    torch.testing.assert_close(out.logits, torch.cat([logits for logits, _ in alone], dim=1), **CLOSE)
    assert_same_states(out.past_key_values, alone[-1][1])


@each_variant
@pytest.mark.parametrize("splits", [[1], [2, 3, 4], list(range(1, 11)), [5, 6]], ids=str)
@torch.no_grad()
def test_packed_documents_may_be_cut_anywhere(config, splits):
    model = causal_lm(config)
    documents, row, positions = packed(config)
    alone = [run(model, document) for document in documents]
    logits, cache = run(model, row, splits, position_ids=positions)
    torch.testing.assert_close(logits, torch.cat([x for x, _ in alone], dim=1), **CLOSE)
    assert_same_states(cache, alone[-1][1])


@each_variant
@pytest.mark.parametrize("splits", [None, [3, 4, 9]], ids=str)
@torch.no_grad()
def test_packing_padding_and_chunks_together(config, splits):
    model = causal_lm(config)
    documents, row, positions = packed(config)
    generator = torch.Generator().manual_seed(3)
    alone = [run(model, document) for document in documents]
    expected = torch.cat([x for x, _ in alone], dim=1)
    for _ in range(5):
        width = 17
        places = [torch.randperm(width, generator=generator)[: row.shape[1]].sort().values for _ in range(2)]
        input_ids, mask = padded([row[0]] * 2, width, places, token_ids(config, 2, width, seed=5))
        position_ids = torch.zeros_like(input_ids)  # as Transformers numbers padding
        seq_idx = torch.zeros_like(input_ids)
        for b, place in enumerate(places):
            position_ids[b, place] = positions[0]
            seq_idx[b, place] = (positions[0] == 0).cumsum(0)
        for arguments in [{"position_ids": position_ids}, {"seq_idx": seq_idx}]:
            if splits and "seq_idx" in arguments:
                continue  # seq_idx says nothing across calls
            logits, cache = run(model, input_ids, splits, attention_mask=mask, **arguments)
            for b, place in enumerate(places):
                torch.testing.assert_close(logits[b, place], expected[0], **CLOSE)
                for x, y in zip(states(cache), states(alone[-1][1]), strict=True):
                    torch.testing.assert_close(x[b], y[0], **CLOSE)


@each_family
@torch.no_grad()
def test_a_position_of_0_drops_the_carried_state_and_others_keep_it(config):
    model = causal_lm(config)
    first, second = token_ids(config, 1, 5), token_ids(config, 1, 4, seed=1)
    whole, _ = run(model, torch.cat([first, second], dim=1))
    alone, _ = run(model, second)
    _, cache = run(model, first)
    out = model(second, past_key_values=cache, position_ids=torch.arange(5, 9)[None])
    torch.testing.assert_close(out.logits, whole[:, 5:], **CLOSE)
    _, cache = run(model, first)
    out = model(second, past_key_values=cache, position_ids=torch.arange(4)[None])
    torch.testing.assert_close(out.logits, alone, **CLOSE)
    _, cache = run(model, first)
    out = model(second, past_key_values=cache, seq_idx=torch.full((1, 4), 7))
    torch.testing.assert_close(out.logits, whole[:, 5:], **CLOSE)


@each_family
def test_flattened_batches_train_like_separate_documents(config):
    model = causal_lm(config)
    lengths = [4, 1, 7, 3]
    rows = [{"input_ids": token_ids(config, 1, n, seed=n)[0].tolist()} for n in lengths]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator(rows)
    targets = (batch["labels"] != -100).sum()
    model(**batch).loss.backward()
    packed_gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        model(ids, labels=ids, num_items_in_batch=targets).loss.backward()
    for got, parameter in zip(packed_gradients, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-8, atol=1e-10)


@each_family
def test_padding_and_other_documents_get_no_gradient(config):
    model = causal_lm(config)
    embeds = model.get_input_embeddings()(token_ids(config, 1, 9)).detach().requires_grad_()
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 0]])
    positions = torch.tensor([[0, 0, 1, 0, 2, 0, 1, 2, 0]])  # two documents: columns 1, 2, 4 and 5, 6, 7
    logits = model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions).logits
    (gradient,) = torch.autograd.grad(logits[0, 7].sum(), embeds)
    touched = gradient[0].abs().sum(-1) > 0
    assert touched.tolist() == [False, False, False, False, False, True, True, True, False]


@each_family
@torch.no_grad()
def test_the_cache_does_not_grow(config):
    model = causal_lm(config, torch.float32)
    sizes, storages = [], []
    cache = None
    for length in (1, 5, 300):
        cache = model(token_ids(config, 2, length), past_key_values=cache, use_cache=True).past_key_values
        sizes.append(cache.nbytes)
        storages.append(sum(x.untyped_storage().nbytes() for x in states(cache)))
    assert cache.get_seq_length() == 306
    assert len(set(sizes)) == 1 and sizes == storages


@each_variant
@torch.no_grad()
def test_saving_and_loading_keep_every_bit(config, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        model = causal_lm(config, dtype)
        model.save_pretrained(tmp_path / str(dtype))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype))
        assert type(loaded) is type(model) and loaded.dtype is dtype
        input_ids = token_ids(config, 2, 9)
        assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)
        assert {n: p.shape for n, p in loaded.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
