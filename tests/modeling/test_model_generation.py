"""`generate` with the recurrent cache: every way of decoding gives what the whole text in one call gives."""

import copy

import pytest
import torch
from families import causal_lm, classifier, each_family, each_variant, states, token_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TextStreamer,
    pipeline,
)

from hf_recurrent import MinGRUConfig, RecurrentCache

NEW = {"max_new_tokens": 9, "pad_token_id": 0}


def uncached_greedy(model, input_ids, steps=9):
    """The definition: the whole text at each step."""
    for _ in range(steps):
        input_ids = torch.cat([input_ids, model(input_ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return input_ids


@each_variant
@torch.no_grad()
def test_greedy(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 3, 5)
    expected = uncached_greedy(model, input_ids)
    assert len({tuple(row) for row in expected[:, 5:].tolist()}) > 1  # else the test would see little
    assert torch.equal(model.generate(input_ids, do_sample=False, **NEW), expected)
    assert torch.equal(model.generate(input_ids, do_sample=False, use_cache=False, **NEW), expected)


@each_variant
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "top_p": 0.9, "temperature": 1.3, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 3, "do_sample": False, "num_return_sequences": 3, "length_penalty": 0.5},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=lambda how: "-".join(f"{k}={v}" for k, v in how.items()),
)
@torch.no_grad()
def test_sampling_and_beams_equal_uncached_ones(config, how):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 5)
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        texts.append(model.generate(input_ids, use_cache=use_cache, **how, **NEW))
    assert torch.equal(*texts)


@each_variant
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_left_padded_batches_equal_single_rows(config, beams):
    model = causal_lm(config)
    lengths, width = [2, 7, 4], 7
    prompts = [token_ids(config, 1, n, seed=n) for n in lengths]
    input_ids = torch.cat([torch.cat([p.new_zeros(1, width - p.shape[1]), p], dim=1) for p in prompts])
    attention_mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    batch = model.generate(input_ids, attention_mask=attention_mask, do_sample=False, num_beams=beams, **NEW)
    for got, prompt in zip(batch, prompts, strict=True):
        alone = model.generate(prompt, do_sample=False, num_beams=beams, **NEW)
        assert torch.equal(got[width:], alone[0, prompt.shape[1] :])


@each_variant
@torch.no_grad()
def test_right_padded_prompts_decode_like_single_rows(config):
    model = causal_lm(config)
    lengths, width = [2, 7, 4], 7
    prompts = [token_ids(config, 1, n, seed=n) for n in lengths]
    input_ids = torch.cat([torch.cat([p, p.new_zeros(1, width - p.shape[1])], dim=1) for p in prompts])
    attention_mask = torch.stack([(torch.arange(width) < n).long() for n in lengths])
    out = model(input_ids, attention_mask=attention_mask, use_cache=True)
    token = out.logits[torch.arange(3), torch.tensor(lengths) - 1].argmax(-1, keepdim=True)
    texts = [token]
    for _ in range(8):
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        texts.append(token)
    for got, prompt in zip(torch.cat(texts, dim=1), prompts, strict=True):
        assert torch.equal(got, uncached_greedy(model, prompt)[0, prompt.shape[1] :])


@each_variant
@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
@torch.no_grad()
def test_prefill_in_chunks(config, chunk):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 8)
    mask = torch.ones_like(input_ids)
    mask[0, :4] = 0
    for attention_mask in (None, mask):
        kwargs = {"attention_mask": attention_mask, "do_sample": False, **NEW}
        expected = model.generate(input_ids, **kwargs)
        assert torch.equal(model.generate(input_ids, prefill_chunk_size=chunk, **kwargs), expected)


@each_variant
@pytest.mark.parametrize("beams", [1, 2])
@torch.no_grad()
def test_a_cache_can_be_continued_with_several_tokens(config, beams):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 10)
    kwargs = {"do_sample": False, "num_beams": beams, **NEW}
    expected = model.generate(input_ids, **kwargs)
    prefix = model(input_ids[:, :6], use_cache=True).past_key_values
    prefix.batch_repeat_interleave(beams)
    whole = model.generate(input_ids, past_key_values=copy.deepcopy(prefix), **kwargs)
    assert torch.equal(whole, expected)
    chunked = model.generate(input_ids, past_key_values=copy.deepcopy(prefix), prefill_chunk_size=3, **kwargs)
    assert torch.equal(chunked, expected)
    attention_mask = torch.ones_like(input_ids)
    only_new = model.generate(
        input_ids[:, 6:], attention_mask=attention_mask, past_key_values=copy.deepcopy(prefix), **kwargs
    )
    assert torch.equal(only_new[:, 4:], expected[:, 10:])


@each_variant
@pytest.mark.parametrize("chunk", [1, 3, 4, 50])
@torch.no_grad()
def test_a_cache_is_continued_in_chunks(config, chunk):
    """With the padding of what it has seen, with padding between the turns, with documents that begin in any chunk."""
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 10)
    padded = torch.ones_like(input_ids)
    padded[0, :3] = padded[1, 5:8] = 0
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]])
    for kwargs in ({}, {"attention_mask": padded}, {"position_ids": positions}):
        expected = model.generate(input_ids, **kwargs, do_sample=False, **NEW)
        seen = {name: x[:, :6] for name, x in kwargs.items()}
        prefix = model(input_ids[:, :6], use_cache=True, **seen).past_key_values
        both = {"attention_mask": torch.ones_like(input_ids)} | kwargs
        for start in (0, 6):
            out = model.generate(
                input_ids[:, start:],
                past_key_values=copy.deepcopy(prefix),
                prefill_chunk_size=chunk,
                return_dict_in_generate=True,
                do_sample=False,
                **both,
                **NEW,
            )
            assert torch.equal(out.sequences[:, 10 - start :], expected[:, 10:])
            assert out.past_key_values.get_seq_length() == expected.shape[1] - 1


def test_chunks_of_nothing():
    config = MinGRUConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1)
    model = causal_lm(config)
    input_ids = token_ids(config, 1, 5)
    for cache in (None, model(input_ids[:, :2], use_cache=True).past_key_values):
        with pytest.raises(ValueError, match="prefill_chunk_size must be at least 1, got 0"):
            model.generate(input_ids, past_key_values=cache, prefill_chunk_size=0, **NEW)


@each_family
@torch.no_grad()
def test_a_conversation_goes_on_where_it_stopped(config):
    """The cache that generate returns takes the next turn, left padding of the first included."""
    model = causal_lm(config)
    first = token_ids(config, 2, 6)
    mask = torch.ones_like(first)
    mask[1, :2] = 0
    out = model.generate(first, attention_mask=mask, return_dict_in_generate=True, do_sample=False, **NEW)
    assert isinstance(out.past_key_values, RecurrentCache)
    assert out.past_key_values.get_seq_length() == 6 + 9 - 1
    text = torch.cat([out.sequences, token_ids(config, 2, 3, seed=5)], dim=1)
    mask = torch.cat([mask, torch.ones(2, text.shape[1] - 6, dtype=torch.long)], dim=1)
    expected = model.generate(text, attention_mask=mask, do_sample=False, **NEW)
    got = model.generate(text, attention_mask=mask, past_key_values=out.past_key_values, do_sample=False, **NEW)
    assert torch.equal(got, expected)


@each_family
@torch.no_grad()
def test_generation_from_embeddings(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 5)
    embeds = model.get_input_embeddings()(input_ids)
    expected = uncached_greedy(model, input_ids)[:, 5:]
    assert torch.equal(model.generate(inputs_embeds=embeds, do_sample=False, **NEW), expected)


@each_family
@torch.no_grad()
def test_one_cache_serves_many_continuations(config):
    model = causal_lm(config)
    prompt = token_ids(config, 1, 6)
    cache = model(prompt, use_cache=True).past_key_values
    before = [x.clone() for x in states(cache)]
    for seed in range(3):
        text = torch.cat([prompt, token_ids(config, 1, 2, seed=seed)], dim=1)
        got = model.generate(text, past_key_values=copy.deepcopy(cache), do_sample=False, **NEW)
        assert torch.equal(got, model.generate(text, do_sample=False, **NEW))
    assert all(torch.equal(x, y) for x, y in zip(states(cache), before, strict=True))


@each_family
@torch.no_grad()
def test_a_finished_row_waits_for_the_others(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 3, 4)
    free = model.generate(input_ids, do_sample=False, **NEW)
    eos = free[0, 6].item()
    got = model.generate(input_ids, do_sample=False, eos_token_id=eos, **NEW)
    for row, whole in zip(got[:, 4:], free[:, 4:], strict=True):
        stop = (whole == eos).nonzero()
        end = stop[0].item() + 1 if len(stop) else len(whole)
        assert torch.equal(row[:end], whole[:end]) and (row[end:] == 0).all()


@each_family
@torch.no_grad()
def test_bad_requests_are_refused(config):
    model = causal_lm(config)
    input_ids = token_ids(config, 1, 6)
    with pytest.raises(ValueError, match="cache_implementation must be None, 'dynamic' or 'static', got 'offloaded'"):
        model.generate(input_ids, cache_implementation="offloaded", **NEW)
    with pytest.raises(TypeError, match="must be a RecurrentCache, got a DynamicCache"):
        model.generate(input_ids, past_key_values=DynamicCache(), **NEW)
    with pytest.raises(ValueError, match=r"input_ids is empty, with the shape \(1, 0\): a prompt has a token or more"):
        model.generate(input_ids[:, :0], **NEW)
    cache = model(input_ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="has seen 6 tokens, input_ids has 2"):
        model.generate(input_ids[:, :2], past_key_values=cache, **NEW)
    with pytest.raises(ValueError, match="has seen 6 tokens, input_ids has 6"):
        model.generate(input_ids, past_key_values=cache, **NEW)
    with pytest.raises(ValueError, match="needs use_cache=True"):
        model.generate(input_ids, past_key_values=cache, use_cache=False, **NEW)
    with pytest.raises(ValueError, match="holds the states of 1 rows, the input has 2"):
        model.generate(token_ids(config, 2, 9), past_key_values=cache, **NEW)
    assert cache.get_seq_length() == 6


def counted_calls(model) -> list[int]:
    """The lengths of the calls of `model` from now on."""
    lengths = []
    model.model.register_forward_hook(lambda module, args, out: lengths.append(out.last_hidden_state.shape[1]))
    return lengths


@each_variant
@torch.no_grad()
def test_assisted_decoding_is_greedy_decoding(config):
    """By a model of its own family, by itself, by its first layer, and by what the prompt repeats."""
    model = causal_lm(config)
    prompt = token_ids(config, 1, 6).repeat(1, 3)
    new = {**NEW, "max_new_tokens": 20}
    greedy = model.generate(prompt, do_sample=False, **new)
    small = causal_lm(type(config)(**{**config.to_diff_dict(), "num_hidden_layers": 1}))
    for options in (
        {"assistant_model": small},
        {"assistant_model": causal_lm(config)},
        {"assistant_early_exit": 1},
        {"prompt_lookup_num_tokens": 3},
    ):
        assert torch.equal(model.generate(prompt, do_sample=False, **options, **new), greedy), options
    twin, lengths = causal_lm(config), counted_calls(model)
    twin.generation_config.assistant_confidence_threshold = 0.0  # it is to draft whatever it thinks of it
    model.generate(prompt, do_sample=False, assistant_model=twin, **new)
    assert len(lengths) <= 3  # every token that it drafts is accepted


ASSISTANCE = [{"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": None}]


def assisted(model, options):
    """`options` of `generate`, with an assistant of a single layer where one is asked for."""
    if "assistant_model" not in options:
        return options
    return {"assistant_model": causal_lm(type(model.config)(**{**model.config.to_diff_dict(), "num_hidden_layers": 1}))}


@each_family
@pytest.mark.parametrize("options", ASSISTANCE, ids=lambda options: "-".join(options))
@torch.no_grad()
def test_assisted_decoding_from_a_cache(config, options):
    """Of a prefix that is not read twice; the cache is then that of the text, and records what it did before."""
    model = causal_lm(config)
    options = {**assisted(model, options), "do_sample": False, **NEW}
    text, mask = token_ids(config, 1, 9), torch.ones(1, 9, dtype=torch.long)
    mask[0, :2] = 0
    greedy = model.generate(text, attention_mask=mask, do_sample=False, **NEW)
    for new, window in ((slice(None), None), (slice(6, None), 5)):
        cache = model(text[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
        if window is not None:
            cache.activate_past_recording(window)
        got = model.generate(text[:, new], attention_mask=mask, past_key_values=cache, **options)
        assert torch.equal(got, greedy[:, new])
        assert cache.record_past == (window is not None) and cache.layers[0].window == window
        assert 9 <= cache.get_seq_length() <= 17
        whole = torch.cat([mask, mask.new_ones(1, 9)], dim=1)[:, : cache.get_seq_length()]
        read = model(greedy[:, : whole.shape[1]], attention_mask=whole, use_cache=True).past_key_values
        for x, y in zip(states(cache), states(read), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10)


@each_family
@torch.no_grad()
def test_assisted_decoding_that_fails_leaves_the_model_whole(config):
    """Transformers takes layers away from the model while the first few draft."""
    model = causal_lm(config)

    def fail(_, args):
        raise KeyboardInterrupt

    hook = model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.generate(token_ids(config, 1, 5), assistant_early_exit=1, do_sample=False, **NEW)
    hook.remove()
    assert len(model.model.active_layers) == model.config.num_hidden_layers == 2


@each_family
@torch.no_grad()
def test_embeddings_after_a_cache(config):
    """Those of the whole text, or with a mask for all of it those of what is new."""
    model = causal_lm(config)
    text, mask = token_ids(config, 2, 9), torch.ones(2, 9, dtype=torch.long)
    embeds, expected = model.get_input_embeddings()(text), model.generate(text, do_sample=False, **NEW)[:, 9:]
    for new in (embeds, embeds[:, 6:], embeds[:, 4:]):
        cache = model(text[:, : 6 if new is embeds else 9 - new.shape[1]], use_cache=True).past_key_values
        got = model.generate(inputs_embeds=new, attention_mask=mask, past_key_values=cache, do_sample=False, **NEW)
        assert torch.equal(got, expected)
    with pytest.raises(
        ValueError, match="prefill_chunk_size cuts input_ids, and cannot be combined with inputs_embeds"
    ):
        model.generate(inputs_embeds=embeds, prefill_chunk_size=4, **NEW)


@each_family
@torch.no_grad()
def test_it_assists_another_model(config):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=config.vocab_size, **sizes)).eval()
    prompt = token_ids(config, 1, 6)
    greedy = llama.generate(prompt, do_sample=False, **NEW)
    assistant = causal_lm(config, torch.float32)
    assert torch.equal(llama.generate(prompt, do_sample=False, assistant_model=assistant, **NEW), greedy)


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer of single bytes, for a vocabulary of 256 and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={"<pad>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")


@each_family
def test_text_generation_pipeline(config, tokenizer, tmp_path, caplog):
    config.vocab_size = len(tokenizer)
    model = causal_lm(config, torch.float32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generator = pipeline("text-generation", str(tmp_path), device="cpu")
    assert type(generator.model) is type(model)
    prompts = ["def f(x):", "import", "a"]
    batched = generator(prompts, batch_size=3, do_sample=False, max_new_tokens=6)
    for prompt, got in zip(prompts, batched, strict=True):
        alone = generator(prompt, do_sample=False, max_new_tokens=6)
        assert got == alone and alone[0]["generated_text"].startswith(prompt)
    assert "is not supported" not in caplog.text


@each_family
def test_text_classification_pipeline(config, tokenizer, tmp_path, caplog):
    config.vocab_size, config.num_labels = len(tokenizer), 3
    classifier(config, torch.float32).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    classify = pipeline("text-classification", str(tmp_path), device="cpu", top_k=None)
    texts = ["a", "some longer text", "text"]
    for text, scores in zip(texts, classify(texts, batch_size=3), strict=True):
        (alone,) = classify([text])
        assert [x["label"] for x in scores] == [x["label"] for x in alone] and len(scores) == 3
        assert [x["score"] for x in scores] == pytest.approx([x["score"] for x in alone], rel=1e-4)
    assert "is not supported" not in caplog.text


@each_family
def test_streamer(config, tokenizer, capsys):
    config.vocab_size = len(tokenizer)
    model = causal_lm(config)
    ids = tokenizer("def", return_tensors="pt")
    out = model.generate(**ids, streamer=TextStreamer(tokenizer), do_sample=False, max_new_tokens=5)
    assert capsys.readouterr().out.strip() == tokenizer.decode(out[0]).strip()


@each_family
@torch.no_grad()
def test_low_precision_decoding(config, tmp_path):
    """bfloat16 weights: the states stay float32, and cached decoding follows the uncached one closely."""
    model = causal_lm(config, torch.bfloat16)
    input_ids = token_ids(config, 2, 30)
    whole = model(input_ids, use_cache=True)
    assert whole.past_key_values.layers[0].states["recurrent"].dtype in (torch.float32, torch.complex64)
    cache, logits = None, []
    for token in input_ids.split(1, dim=1):
        out = model(token, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, [*logits, out.logits]
    exact = AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
    exact.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    exact = exact(input_ids).logits
    scale = exact.abs().max()
    assert (torch.cat(logits, dim=1) - exact).abs().max() < 0.03 * scale
    assert (whole.logits - exact).abs().max() < 0.03 * scale


def byte_pairs(text: str, size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text] * 10, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


@each_family
@pytest.mark.filterwarnings("ignore")
def test_an_assistant_with_another_tokenizer(config):
    """Its text is tokenised anew at each turn, which may change tokens from before the last turn."""
    ours, theirs = byte_pairs("hello world this is a text", 290), byte_pairs("lorem ipsum dolor", 280)
    for seed in range(6):
        both = []
        for tokenizer in (ours, theirs):
            config.vocab_size, config.initializer_range = len(tokenizer), 0.1
            torch.manual_seed(seed)
            both.append(AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval())
        model, assistant = both
        ids = ours(["hello world this is", "a text", "world"][seed % 3], return_tensors="pt").input_ids
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        tokenizers = {"tokenizer": ours, "assistant_tokenizer": theirs}
        got = model.generate(ids, assistant_model=assistant, **tokenizers, **options)
        assert torch.equal(got, model.generate(ids, **options))


@each_family
@pytest.mark.parametrize("beams", [1, 2])
def test_stop_strings(config, beams):
    tokenizer = byte_pairs("hello world this is a text", 290)
    config.vocab_size = len(tokenizer)
    model = causal_lm(config)
    ids = tokenizer("hello", return_tensors="pt").input_ids
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "tokenizer": tokenizer, "num_beams": beams}
    whole = model.generate(ids, **options)[0, ids.shape[1] :].tolist()
    stop = next(text for token in whole[2:] if "\ufffd" not in (text := tokenizer.decode([token])))
    got, uncached = (model.generate(ids, stop_strings=[stop], use_cache=use, **options) for use in (True, False))
    assert torch.equal(got, uncached)
    if beams == 1:
        first = next(n for n in range(len(whole)) if stop in tokenizer.decode(whole[: n + 1]))
        assert got[0, ids.shape[1] :].tolist() == whole[: first + 1]
