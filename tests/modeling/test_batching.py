"""Requests that join and leave a batch: each has its own tokens, whatever the others do."""

import pytest
import torch
import transformers
from families import causal_lm, each_family, token_ids
from packaging.version import Version

from hf_recurrent import ContinuousBatcher, RecurrentCache
from hf_recurrent.modeling.cache_layers import RecurrentLayer


def alone(model, prompt, max_new_tokens, **options):
    """What `generate` gives a prompt by itself."""
    ids = torch.tensor([prompt])
    return model.generate(ids, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0, **options)[
        0, ids.shape[1] :
    ].tolist()


def prompts(config, lengths):
    return [token_ids(config, 1, length, seed=seed)[0].tolist() for seed, length in enumerate(lengths)]


@each_family
@pytest.mark.parametrize("max_rows, chunk", [(1, 100), (3, 4), (8, 1)])
def test_each_request_has_its_own_greedy_tokens(config, max_rows, chunk):
    model = causal_lm(config)
    batcher = ContinuousBatcher(model, max_rows=max_rows, prefill_chunk_size=chunk)
    texts, numbers = prompts(config, [3, 11, 1, 6, 9, 2]), [9, 4, 1, 12, 3, 7]
    eos = alone(model, texts[3], 12)[5]
    requests = [batcher.submit(text, number) for text, number in zip(texts[:3], numbers, strict=False)]
    streamed = {}
    for step in range(200):
        if step == 2:
            requests.append(batcher.submit(torch.tensor(texts[3]), numbers[3], eos_token_id=eos))
        if step == 5:
            requests += [batcher.submit(text, number) for text, number in zip(texts[4:], numbers[4:], strict=True)]
        for request, token in batcher.step():
            streamed.setdefault(request.id, []).append(token)
        assert len(batcher.running) <= max_rows
        assert batcher.cache is None or batcher.cache.batch_size == len(batcher.running)
    assert not batcher.running and not batcher.waiting and batcher.cache is None
    for index, (request, text, number) in enumerate(zip(requests, texts, numbers, strict=True)):
        options = {"eos_token_id": eos} if index == 3 else {}
        assert request.id == index and request.finished
        assert request.tokens == streamed[index] == alone(model, text, number, **options)
    assert requests[3].tokens[-1] == eos and len(requests[3].tokens) <= 6


@each_family
def test_cancelling(config):
    model = causal_lm(config)
    batcher = ContinuousBatcher(model, max_rows=2, prefill_chunk_size=3)
    texts = prompts(config, [4, 5, 8, 3])
    first, second, third, fourth = (batcher.submit(text, 8) for text in texts)
    order = []
    for request, _ in batcher:
        order.append(request.id)
        if len(order) == 5:
            batcher.cancel(first)
            cancelled = len(first.tokens)
            batcher.step()  # a piece of the third one's prompt
            batcher.cancel(third)
    assert len(first.tokens) == cancelled < 8 and first.finished and third.tokens == []
    assert second.tokens[: len(first.tokens)] and second.tokens == alone(model, texts[1], 8)
    assert fourth.tokens == alone(model, texts[3], 8)
    batcher.cancel(fourth)
    assert len(fourth.tokens) == 8 and list(batcher) == []


@each_family
def test_no_token_comes_after_cancelling(config):
    """Also not the one of the same step. An end may be given as a tensor."""
    model = causal_lm(config)
    batcher, texts = ContinuousBatcher(model), prompts(config, [4, 5])
    first, second = batcher.submit(texts[0], 6), batcher.submit(texts[1], 6)
    for request, _ in batcher:
        assert not request.cancelled
        if request is first and len(second.tokens) == 2:
            batcher.cancel(second)
    assert second.cancelled and not first.cancelled and first.tokens == alone(model, texts[0], 6)
    end = alone(model, texts[1], 6)[3]
    third = batcher.submit(texts[1], 6, eos_token_id=torch.tensor(end))
    assert [token for _, token in batcher] == third.tokens == alone(model, texts[1], 6, eos_token_id=end)


@each_family
def test_no_token_is_lost(config, monkeypatch):
    """Where an iteration is left early and another begun, and where a prompt cannot be read."""
    model = causal_lm(config)
    batcher, told = ContinuousBatcher(model), {}
    requests = [batcher.submit(text, 6) for text in prompts(config, [4, 5, 8])]
    for stop in (2, 3, 5, 100):
        for number, (request, token) in enumerate(batcher):
            told.setdefault(request.id, []).append(token)
            if number == stop:
                break
    assert [told[request.id] for request in requests] == [request.tokens for request in requests]
    assert all(len(tokens) == 6 for tokens in told.values())
    first = batcher.submit(prompts(config, [4])[0], 6)
    told = [token for _, token in batcher.step()]
    second = batcher.submit([1, 2, 3], 6)
    read = batcher._read
    monkeypatch.setattr(batcher, "_read", lambda: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError):
        batcher.step()
    monkeypatch.setattr(batcher, "_read", read)
    told += [token for request, token in batcher if request is first]
    assert told == first.tokens and len(told) == 6 and len(second.tokens) == 6


@each_family
def test_a_request_that_finds_no_room_goes_on_waiting(config, monkeypatch):
    model = causal_lm(config)
    batcher, texts = ContinuousBatcher(model), prompts(config, [4, 5, 3])
    requests = [batcher.submit(text, 5) for text in texts[:2]]
    told = list(batcher.step())
    with monkeypatch.context() as patch:
        patch.setattr(RecurrentCache, "concatenate", lambda caches: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            batcher.step()
    assert list(batcher.waiting) == requests[1:] and requests[1].tokens == []
    requests.append(batcher.submit(texts[2], 5))
    told += list(batcher)
    for request, text in zip(requests, texts, strict=True):
        assert request.tokens == alone(model, text, 5)
        assert [token for other, token in told if other is request] == request.tokens
    requests = [batcher.submit(text, 5) for text in texts[:2]]
    for _ in range(3):
        batcher._advance()
    batcher.cancel(batcher.news[0][0])
    assert all(not request.cancelled for request, _ in batcher.step())


@each_family
@pytest.mark.parametrize("cancelled", [False, True])
def test_a_request_that_leaves_where_there_is_no_room(config, monkeypatch, cancelled):
    """Some layers have left its row out when another fails. It leaves later; nobody's tokens are others for it."""
    model = causal_lm(config)
    batcher, texts = ContinuousBatcher(model), prompts(config, [4, 5, 3])
    short, *others = (batcher.submit(text, number) for text, number in zip(texts, [4, 8, 8], strict=True))
    told = [*batcher.step(), *batcher.step(), *batcher.step()]
    select, calls = RecurrentLayer.map, []

    def fails_once(layer, function):
        calls.append(layer)
        if len(calls) == 2:
            raise MemoryError("no room")
        return select(layer, function)

    monkeypatch.setattr(RecurrentLayer, "map", fails_once)
    if cancelled:
        batcher.cancel(short)
    with pytest.raises(MemoryError):
        batcher.step()
    assert short.finished and len(calls) == 2
    told += batcher
    assert not batcher.running and short.tokens == alone(model, texts[0], len(short.tokens))
    for request, text in zip(others, texts[1:], strict=True):
        assert request.tokens == alone(model, text, 8)
    for request in (short, *others):
        assert [token for other, token in told if other is request] == request.tokens


@each_family
def test_requests_that_cannot_be(config):
    model = causal_lm(config)
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        ContinuousBatcher(model, max_rows=0)
    with pytest.raises(ValueError, match="prefill_chunk_size must be at least 1, got -1"):
        ContinuousBatcher(model, prefill_chunk_size=-1)
    batcher = ContinuousBatcher(model)
    for ids in ([[1, 2]], [0.5], [True]):
        with pytest.raises(ValueError, match=r"input_ids must be integers of the shape \(length,\), got torch"):
            batcher.submit(ids)
    with pytest.raises(ValueError, match="input_ids must hold at least one token"):
        batcher.submit([])
    for ids in ("text", None, {"input_ids": [1]}):
        with pytest.raises(
            TypeError, match="input_ids must be token ids, got a .*: of what a tokenizer gives, its inp"
        ):
            batcher.submit(ids)
    for end, error in ((1.5, ValueError), (-1, IndexError), ([1, 99], IndexError)):
        with pytest.raises(error, match="eos_token_id "):
            batcher.submit([1], eos_token_id=end)
    with pytest.raises(TypeError, match="max_new_tokens must be a whole number, got 2.5"):
        batcher.submit([1], 2.5)
    with pytest.raises(TypeError, match="max_rows must be a whole number, got 1.5"):
        ContinuousBatcher(model, max_rows=1.5)
    with pytest.raises(TypeError, match="model must be a recurrent language model, got a "):
        ContinuousBatcher(model.model)
    with pytest.raises(IndexError, match="the token id 61, outside the vocabulary of 61"):
        batcher.submit([1, 61])
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        batcher.submit([1], 0)
    assert not batcher.waiting and batcher.step() == []


@each_family
def test_what_generate_would_do_otherwise(config):
    model = causal_lm(config)
    model.generation_config.repetition_penalty = 1.5
    with pytest.raises(ValueError, match="generation_config has repetition_penalty = 1.5, which is not done here"):
        ContinuousBatcher(model)
    model.generation_config.repetition_penalty = 1.0
    ContinuousBatcher(model)


@each_family
@pytest.mark.parametrize("place", ["norm", "head", "choice", "counting"])
def test_a_step_that_is_interrupted(config, monkeypatch, place):
    """Wherever that is, the next one takes its place."""
    model = causal_lm(config)
    batcher, texts = ContinuousBatcher(model, prefill_chunk_size=3), prompts(config, [4, 5, 3, 8])
    want = [alone(model, text, 9) for text in texts]
    requests, interrupts = [batcher.submit(text, 9) for text in texts], []

    class Interrupt(BaseException):  # a KeyboardInterrupt, if tests did not end with one
        pass

    def interrupt(*_):
        interrupts.append(place)
        if len(interrupts) % 5 == 4:
            raise Interrupt

    if place == "norm":
        model.model.norm.register_forward_hook(interrupt)
    if place == "head":
        model.lm_head.register_forward_hook(interrupt)
    if place == "choice":
        take = batcher._take
        monkeypatch.setattr(batcher, "_take", lambda *arguments: (interrupt(), take(*arguments)))
    if place == "counting":

        class Tokens(list):
            def __setitem__(self, *arguments):
                interrupt()
                super().__setitem__(*arguments)
                interrupt()

        for request in requests:
            request.tokens = Tokens()
    told, failures = [], 0
    while any(not request.finished for request in requests) or batcher.decoded or batcher.news:
        try:
            told += batcher.step()
        except Interrupt:
            failures += 1
    assert failures > 2
    for request, tokens in zip(requests, want, strict=True):
        assert request.tokens == tokens == [token for other, token in told if other is request]


@each_family
def test_cancelling_while_a_step_runs(config):
    """As another thread does."""
    model = causal_lm(config)
    batcher, texts = ContinuousBatcher(model), prompts(config, [4, 5, 3, 8])
    requests, steps = [batcher.submit(text, 9) for text in texts], []

    def cancel(*_):
        steps.append(None)
        if len(steps) == 8:
            batcher.cancel(requests[1])
            batcher.cancel(requests[3])

    model.lm_head.register_forward_hook(cancel)
    list(batcher)
    assert requests[1].cancelled and len(requests[1].tokens) < 9
    for request, text in zip(requests[::2], texts[::2], strict=True):
        assert request.tokens == alone(model, text, 9)
    assert not batcher.running and not batcher.waiting and batcher.cache is None


@each_family
def test_a_prompt_that_cannot_be_read_ends_alone(config):
    model = causal_lm(config)
    batcher, texts = ContinuousBatcher(model), prompts(config, [4, 5])
    bad, good = (batcher.submit(text, 5) for text in texts)

    def fail(module, arguments):
        if arguments[0].shape[1] == 4:
            raise RuntimeError("a kernel failed")

    model.model.embed_tokens.register_forward_pre_hook(fail)
    for ended in (False, True):
        with pytest.raises(RuntimeError, match="a kernel failed"):
            batcher.step()
        assert bad.finished == ended
    assert [token for _, token in batcher] == good.tokens == alone(model, texts[1], 5)
    assert str(bad.error) == "a kernel failed" and bad.finished and not bad.cancelled and good.error is None


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="the document is about 5.23")
@each_family
def test_transformers_own_batching_takes_no_recurrent_model(config):
    """docs/continuous_batching.md says what stands in its way. Should this fail, something has moved."""
    with pytest.raises(ValueError, match="Invalid layer type: linear_attention"):
        causal_lm(config).generate_batch([[1, 2]])
