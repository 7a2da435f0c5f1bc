"""Shared beginnings: the tree, and log-likelihoods against each text in a call of its own."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import hf_recurrent
from hf_recurrent.evaluation import scoring
from hf_recurrent.evaluation.prefixes import prefix_tree, read_in_batches
from hf_recurrent.evaluation.scoring import Reader, score

FAMILIES = {
    hf_recurrent.MinGRUConfig: {},
    hf_recurrent.MinLSTMConfig: {},
    hf_recurrent.LonghornConfig: {"state_size": 4},
    hf_recurrent.GateLoopConfig: {},
    hf_recurrent.S5Config: {"state_size": 8, "num_blocks": 2},
}


def language_model(config_class=hf_recurrent.MinGRUConfig, vocab_size=29, **options):
    torch.manual_seed(0)
    shared = {"hidden_size": 12, "num_hidden_layers": 2, "initializer_range": 0.4}
    return AutoModelForCausalLM.from_config(config_class(vocab_size=vocab_size, **shared, **options)).double().eval()


def alone(model, context, continuation) -> tuple[float, bool]:
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0, len(context) - 1 :]
    expected = ids[0, len(context) :]
    return -F.cross_entropy(logits, expected, reduction="sum").item(), bool((logits.argmax(-1) == expected).all())


def random_requests(number: int, seed: int = 0, vocab_size: int = 29) -> list[tuple[list[int], list[int]]]:
    """Contexts that share beginnings of many lengths, and continuations that do."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(vocab_size, size=n).tolist() for n in (1, 5, 40, 40, 70)]
    requests = []
    while len(requests) < number:
        stem = stems[rng.integers(len(stems))]
        context = stem[: rng.integers(1, len(stem) + 1)] + rng.integers(3, size=rng.integers(4)).tolist()
        for _ in range(rng.integers(1, 5)):
            requests.append((context, rng.integers(3, size=rng.integers(1, 5)).tolist()))
    return requests


def sequences_of(requests) -> list[np.ndarray]:
    return [np.array([*context, *continuation][:-1], np.int32) for context, continuation in requests]


@pytest.mark.parametrize("least_saved", [0, 7, 16, 10**9])
@pytest.mark.parametrize("seed", range(4))
def test_the_tree_holds_each_sequence_and_shares_what_saves_enough(seed, least_saved):
    sequences = sequences_of(random_requests(60, seed))
    root, ends = prefix_tree(sequences, least_saved)
    for sequence, segment in zip(sequences, ends, strict=True):
        tokens = []
        while segment is not root:
            tokens[:0] = segment.own_tokens.tolist()
            assert len(segment) > 0 and segment in segment.parent.children
            segment = segment.parent
        assert tokens[: len(sequence)] == sequence.tolist()
    read: list = []
    read_in_batches(root, read.extend, 4)
    assert len(set(read)) == len(read) and all(s.parent is root or s.parent in read[: read.index(s)] for s in read)
    for segment in read:
        if segment.children:
            assert (len(segment.children) - 1) * len(segment) >= least_saved
    own, total = sum(map(len, read)), len({s.tobytes() for s in sequences})
    if least_saved == 0:  # every token once: as many as there are different beginnings
        assert own == len({s[: n + 1].tobytes() for s in sequences for n in range(len(s))})
    if least_saved == 10**9:
        assert len(read) <= total and all(s.parent is root for s in read)


@pytest.mark.parametrize("config_class", FAMILIES, ids=lambda c: c.model_type)
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_scores_are_those_of_each_text_alone(config_class, batch_size):
    model = language_model(config_class, **FAMILIES[config_class])
    requests = random_requests(40)
    told = {}
    results = score(
        Reader(model), requests, batch_size, finished=lambda number, *result: told.setdefault(number, result)
    )
    assert told == dict(enumerate(results))
    for (context, continuation), result in zip(requests, results, strict=True):
        expected = alone(model, context, continuation)
        assert result[0] == pytest.approx(expected[0], rel=1e-10)
        assert result[1] == expected[1]


@pytest.mark.parametrize("config_class", FAMILIES, ids=lambda c: c.model_type)
def test_texts_start_from_the_learned_state(config_class):
    """In batches, too, whose other rows go on from what was read."""
    model = language_model(config_class, **FAMILIES[config_class], learned_initial_state=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("initial_state"):
                parameter.normal_()
    rng, mixed = np.random.default_rng(0), 0
    alike = rng.integers(29, size=20).tolist()
    requests = [(alike + [n], [n]) for n in range(8)] + [([n], [n + 1, 2]) for n in range(12)]
    reader = Reader(model)
    gather = reader.gather

    def watched(states):
        nonlocal mixed
        mixed += len({state is None for state in states}) == 2
        return gather(states)

    reader.gather = watched
    for request, (value, _) in zip(requests, score(reader, requests, 3), strict=True):
        assert value == pytest.approx(alone(model, *request)[0], rel=1e-10)
    assert mixed


def test_greedy_continuations_are_found():
    model = language_model()
    ids = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=5, do_sample=False)[0].tolist()
    right, wrong = ([3, 1, 4], ids[3:]), ([3, 1, 4], [*ids[3:-1], (ids[-1] + 1) % 29])
    assert [greedy for _, greedy in score(Reader(model), [right, wrong], 2)] == [True, False]


def test_long_texts_are_read_in_pieces_and_prefixes_once(monkeypatch):
    model = language_model()
    seen = []
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(args[0].shape), with_kwargs=True)
    rng = np.random.default_rng(0)
    prefix = rng.integers(29, size=700).tolist()
    contexts = [prefix + rng.integers(29, size=9).tolist() for _ in range(8)]
    requests = [(context, [choice]) for context in contexts for choice in (1, 2, 3, 4)]
    whole = score(Reader(model), requests, 8)
    assert sum(rows * columns for rows, columns in seen) == 700 + 8 * 9
    monkeypatch.setattr(scoring, "CALL_TOKENS", 50)
    seen.clear()
    requests.append((requests[0][0], rng.integers(29, size=123).tolist()))
    pieces = score(Reader(model), requests, 8)
    assert max(rows * columns for rows, columns in seen) <= 50
    assert [x[0] for x in pieces[:-1]] == pytest.approx([x[0] for x in whole], rel=1e-10)
    assert pieces[-1][0] == pytest.approx(alone(model, *requests[-1])[0], rel=1e-10)


def test_states_are_let_go():
    model = language_model()
    root, _ = prefix_tree(sequences_of(random_requests(200)), 4)
    reader, segments, most = Reader(model), [], 0

    def read(batch):
        nonlocal most
        reader.read(batch)
        segments.extend(batch)
        most = max(most, sum(segment.state is not None for segment in segments))

    read_in_batches(root, read, 4)
    assert most <= 16 and all(segment.state is None for segment in segments)


def test_bad_requests():
    reader = Reader(language_model())
    with pytest.raises(ValueError, match="the continuation of request 1 has no tokens"):
        score(reader, [([1], [2]), ([1], [])], 2)
    with pytest.raises(ValueError, match="the context of request 0 has no tokens"):
        score(reader, [([], [2])], 2)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        score(reader, [([1], [2])], 0)
    with pytest.raises(IndexError, match="request 0 holds the token id 29, outside the vocabulary of 29"):
        score(reader, [([1, 29], [2])], 2)
    with pytest.raises(IndexError, match="token id 29, outside the vocabulary of 29"):
        score(reader, [([1], [29])], 2)
    assert score(reader, [], 2) == []
