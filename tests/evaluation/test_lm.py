"""lm-eval's model of this package against lm-eval's own `hf`, request by request."""

import lm_eval.api.model
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tokenizers import processors

import hf_recurrent
from hf_recurrent.evaluation.lm import RecurrentLM
from hf_recurrent.training.tokenizer import byte_tokenizer, train_bpe

TEXT = "The cat sat on the mat. The dog sat on the log.\nQuestion: who sat?\nAnswer: the cat sat, and the dog sat too. "
SHOTS = "Question: who sat?\nAnswer: the cat\n\nQuestion: what is on the mat?\nAnswer: the dog\n\n" * 3
PAIRS = [
    ("", "The cat"),
    ("", " sat on the mat"),
    ("", "<|endoftext|>The"),
    ("The cat", " sat"),
    ("The cat", " sat on the log"),
    ("The cat", " sat on the mat"),
    ("The cat ", "sat"),
    ("The cat \n", "sat"),
    ("The cat sat on the mat. Th", "e dog sat on the log. The dog"),  # a token spans the border
    ("The cat", ","),
    ("<|endoftext|>The cat", " sat"),
    ("Ünïcödé → ", "日本語"),
    (TEXT * 40, " the dog"),  # longer than anything that was trained on
    (TEXT * 40, " the cat sat"),
    *((f"{SHOTS}Question: {q}?\nAnswer:", f" {c}") for q in ("who", "what", "where") for c in "ABCD"),
    *((f"{SHOTS}Question: {q}?\nAnswer:", c) for q in ("why", "who") for c in (" the cat", " the dog", " the dog sat")),
]
PAIRS.append(PAIRS[3])  # twice the same


def tokenizer(kind: str):
    if kind == "bytes":
        return byte_tokenizer()
    trained = train_bpe([TEXT, SHOTS], 300)
    if kind == "bos":  # puts its token before every text
        trained.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", trained.bos_token_id)]
        )
    return trained


def model(size: int, config_class=hf_recurrent.MinGRUConfig, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = config_class(hidden_size=16, num_hidden_layers=2, vocab_size=size, initializer_range=0.4, **options)
    return hf_recurrent.MinGRUForCausalLM(config).to(dtype).eval()


def both(kind: str = "bpe", batch_size: int = 5, dtype=torch.float64, **options):
    tokens = tokenizer(kind)
    weights = model(len(tokens), dtype=dtype)
    longest = {"max_length": 1 << 20, **options}
    theirs = HFLM(weights, tokenizer=tokens, batch_size=batch_size, **longest)
    return RecurrentLM(weights, tokenizer=tokens, batch_size=batch_size, **options), theirs


def instances(kind: str, arguments) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=args, idx=0, metadata=("some", number, 1))
        for number, args in enumerate(arguments)
    ]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "bos"])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_log_likelihoods(kind, batch_size):
    ours, theirs = both(kind, batch_size)
    if kind != "bytes":  # where it is decided which tokens the continuation has
        assert ours.tok_encode("The cat") != ours.tok_encode("The c") + ours.tok_encode("at", add_special_tokens=False)
    requests = instances("loglikelihood", PAIRS)
    expected, given = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (theirs, ours))
    assert [x for x, _ in given] == pytest.approx([x for x, _ in expected], rel=1e-9)
    assert [x for _, x in given] == [x for _, x in expected]


def test_greedy_flags():
    ours, theirs = both("bytes")
    contexts = [TEXT[:length] for length in range(3, 60, 3)]
    requests = instances("loglikelihood", [(context, chr(byte)) for context in contexts for byte in range(33, 127)])
    expected, given = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (theirs, ours))
    assert [x for _, x in given] == [x for _, x in expected] and any(x for _, x in given)


def test_in_single_precision():
    ours, theirs = both(dtype=torch.float32)
    requests = instances("loglikelihood", PAIRS)
    expected, given = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (theirs, ours))
    assert [x for x, _ in given] == pytest.approx([x for x, _ in expected], rel=1e-5)


@pytest.mark.parametrize("options", [{"max_length": 20}, {"softmax_dtype": "float32"}, {"add_bos_token": True}])
def test_options_of_hf(options):
    ours, theirs = both("bos", **options)
    requests = instances("loglikelihood", PAIRS)
    expected, given = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (theirs, ours))
    assert [x for x, _ in given] == pytest.approx([x for x, _ in expected], rel=1e-5)
    texts = instances("loglikelihood_rolling", [(TEXT,), ("The",)])
    expected, given = (lm.loglikelihood_rolling(texts, disable_tqdm=True) for lm in (theirs, ours))
    assert given == pytest.approx(expected, rel=1e-5)


def test_mixed_precision():
    ours, theirs = both(dtype=torch.float32, mixed_precision_dtype="bfloat16")
    requests = instances("loglikelihood", PAIRS)
    exact = both(dtype=torch.float32)[0].loglikelihood(requests, disable_tqdm=True)
    expected, given = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (theirs, ours))
    assert [x for x, _ in given] == pytest.approx([x for x, _ in expected], rel=0.03)  # each of its own roundings
    assert [x for x, _ in given] != pytest.approx([x for x, _ in exact], rel=1e-5)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "bos"])
def test_rolling(kind):
    ours, theirs = both(kind)
    texts = instances("loglikelihood_rolling", [(TEXT,), ("",), ("The",), (TEXT * 20,), (SHOTS,)])
    expected, given = (lm.loglikelihood_rolling(texts, disable_tqdm=True) for lm in (theirs, ours))
    assert given == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["bytes", "bos"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_generation(kind, batch_size):
    ours, theirs = both(kind, batch_size)
    prompts = [f"{SHOTS}Question: {q}?\nAnswer:" for q in ("who", "what", "where is it", "why")]
    prompts += [SHOTS, SHOTS[:-5], "The", "T", "The cat", prompts[0]]
    settings = [
        {"until": ["\n\n"], "max_gen_toks": 9},
        {"until": ["e", "a"], "max_gen_toks": 12, "do_sample": False},
        {"max_gen_toks": 4, "num_beams": 2},
    ]
    requests = instances("generate_until", [(prompt, dict(kwargs)) for kwargs in settings for prompt in prompts])
    expected, given = (lm.generate_until(requests, disable_tqdm=True) for lm in (theirs, ours))
    assert given == expected and len(set(given)) > 5
    assert not ours._prefixes


def test_generation_starts_from_the_learned_state():
    tokens = tokenizer("bytes")
    weights = model(len(tokens), learned_initial_state=True)
    with torch.no_grad():
        for layer in weights.model.layers:
            layer.mixer.initial_state.fill_(5)
    prompts = [f"{SHOTS}Question: {q}?\nAnswer:" for q in ("who", "what")] + ["The cat", "The", "T"]
    requests = instances("generate_until", [(prompt, {"until": [], "max_gen_toks": 6}) for prompt in prompts])
    ours = RecurrentLM(weights, tokenizer=tokens, batch_size=3)
    theirs = HFLM(weights, tokenizer=tokens, batch_size=3, max_length=1 << 20)
    expected, given = (lm.generate_until(requests, disable_tqdm=True) for lm in (theirs, ours))
    assert given == expected


def test_the_largest_batch_that_auto_may_choose():
    tokens, seen = tokenizer("bytes"), []
    weights = model(len(tokens))
    weights.register_forward_pre_hook(lambda m, args, kwargs: seen.append(args[0].shape[0]), with_kwargs=True)
    for largest in (1, 3):
        seen.clear()
        lm = RecurrentLM(weights, tokenizer=tokens, batch_size="auto", max_batch_size=largest)
        lm.loglikelihood(instances("loglikelihood", PAIRS), True)
        assert max(seen) == largest


def test_each_shared_beginning_is_read_once():
    ours, _ = both("bytes", 4)
    seen = []
    ours.model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs.get("input_ids", args[0] if args else None).numel()),
        with_kwargs=True,
    )
    own = [f"Question: {q}?\nAnswer:" for q in ("who", "what", "where", "why")]
    ours.loglikelihood(instances("loglikelihood", [(SHOTS + q, f" {c}") for q in own for c in "ABCD"]), True)
    assert sum(seen) < len(SHOTS) + 4 * 32
    seen.clear()
    ours.generate_until(instances("generate_until", [(SHOTS + q, {"max_gen_toks": 1, "until": []}) for q in own]), True)
    assert sum(seen) < len(SHOTS) + 4 * 32


def test_results_are_cached_as_they_come(tmp_path):
    ours, _ = both()
    lm = lm_eval.api.model.CachingLM(ours, str(tmp_path / "cache.db"))
    requests = instances("loglikelihood", PAIRS)
    read, count = ours._reader.read, 0

    def interrupted(*args):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return read(*args)

    ours._reader.read = interrupted
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(requests)
    stored = len(lm.dbdict)
    assert 0 < stored < len(PAIRS)
    ours._reader.read = read
    tokens = []
    ours._loglikelihood_tokens, inner = (
        (lambda new, **kwargs: (tokens.extend(new), inner(new, **kwargs))[1]),
        ours._loglikelihood_tokens,
    )
    expected = both()[0].loglikelihood(requests)
    assert lm.loglikelihood(requests) == expected and len(tokens) <= len(PAIRS) - stored
    texts = instances("loglikelihood_rolling", [(TEXT,), ("The cat",)])
    assert lm.loglikelihood_rolling(texts) == ours.loglikelihood_rolling(texts)
    assert lm.loglikelihood_rolling(texts) == ours.loglikelihood_rolling(texts)  # now from the cache


def test_bad_requests():
    ours, _ = both()
    with pytest.raises(ValueError, match="document 1 of task some: choice 0 is empty, there is nothing to predict"):
        ours.loglikelihood(instances("loglikelihood", [("The", " cat"), ("The", "")]), True)
    short, _ = both("bytes", max_length=4)
    with pytest.raises(ValueError, match="a continuation has 7 tokens, max_length is 4"):
        short.loglikelihood(instances("loglikelihood", [("The", " kitten")]), True)
    # Where `hf` stops: nothing but spaces before the continuation, which they become part of.
    (spaces,), (none,) = (
        ours.loglikelihood(instances("loglikelihood", [pair]), True) for pair in (("  ", "cat"), ("", "  cat"))
    )
    assert spaces == none


def test_it_is_registered_and_wants_a_model_of_this_package(tmp_path):
    assert get_model("hf_recurrent") is RecurrentLM
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match="'gpt2', which is none of this package: lm-eval's model for it is hf"):
        RecurrentLM(other, tokenizer=byte_tokenizer())
    model(257, dtype=torch.float32).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = get_model("hf_recurrent").create_from_arg_string(
        f"pretrained={tmp_path},device=cpu", {"batch_size": "auto"}
    )
    requests = instances("loglikelihood", PAIRS)
    expected = both("bytes", dtype=torch.float32)[0].loglikelihood(requests, True)
    given = loaded.loglikelihood(requests, True)
    assert [x for x, _ in given] == pytest.approx([x for x, _ in expected], rel=1e-5)
    assert loaded.generate_until(instances("generate_until", [("The", {"max_gen_toks": 2})]), True)
