"""RecurrentCache as a value, and the errors of a cache that does not fit."""

import copy
import pickle
import threading
from dataclasses import fields

import pytest
import torch
from families import FIRST, causal_lm, each_family, each_variant, states, token_ids
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.cache_utils import Cache

import hf_recurrent
from hf_recurrent import RecurrentCache
from hf_recurrent.modeling.cache import StaticRecurrentCache


@pytest.fixture
def model(config):
    return causal_lm(config)


def filled(model, batch=3, length=5):
    with torch.no_grad():
        return model(token_ids(model.config, batch, length), use_cache=True).past_key_values


@each_family
def test_a_new_cache_is_empty(config):
    cache = RecurrentCache(config)
    assert isinstance(cache, Cache) and len(cache) == config.num_hidden_layers
    assert cache.get_seq_length() == 0 and cache.nbytes == 0 and cache.batch_size == -1
    assert cache.get_max_length() == -1
    assert not cache.is_compileable and cache.is_croppable and not cache.is_initialized and not cache.record_past


@each_family
def test_sizes_and_names(model):
    cache = filled(model)
    assert cache.batch_size == 3 and cache.get_seq_length() == 5
    assert cache.nbytes == sum(x.numel() * x.element_size() for x in states(cache))
    for held, layer in zip(cache.layers, model.model.layers, strict=True):
        assert {name: tuple(x.shape) for name, x in held.states.items()} == {
            name: (3, *shape) for name, shape in layer.mixer.state_shapes.items()
        }
        assert "recurrent" in held.states
    assert "3" in repr(cache) and f"{cache.nbytes} bytes" in repr(cache)
    assert "recurrent" in repr(cache.layers[0])


@each_family
def test_batch_operations(model):
    reference = states(filled(model))
    operations = {
        "reorder_cache": (torch.tensor([2, 0, 0]), [2, 0, 0]),
        "batch_select_indices": (torch.tensor([1]), [1]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    }
    for name, (argument, rows) in operations.items():
        cache = filled(model)
        getattr(cache, name)(argument)
        assert cache.batch_size == len(rows) and cache.get_seq_length() == 5
        for x, y in zip(states(cache), reference, strict=True):
            assert torch.equal(x, y[rows])
        empty = RecurrentCache(model.config)
        getattr(empty, name)(argument)
        assert empty.nbytes == 0


@each_family
def test_reset_starts_again(model):
    cache = filled(model)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    again = model(token_ids(model.config, 2, 4), past_key_values=cache)
    assert torch.equal(again.logits, model(token_ids(model.config, 2, 4)).logits)


@each_family
def test_copies_are_independent(model):
    cache = filled(model)
    before = [x.clone() for x in states(cache)]
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        model(token_ids(model.config, 3, 2), past_key_values=other)
        assert other.get_seq_length() == 7 and cache.get_seq_length() == 5
        assert all(torch.equal(x, y) for x, y in zip(states(cache), before, strict=True))


@each_family
def test_states_are_replaced_and_never_written_into(model):
    cache = filled(model)
    kept = [dict(layer.states) for layer in cache.layers]
    before = [{name: x.clone() for name, x in layer.items()} for layer in kept]
    model(token_ids(model.config, 3, 2), past_key_values=cache)
    for held, values in zip(kept, before, strict=True):
        assert all(torch.equal(held[name], values[name]) for name in values)


def recording(model, batch=3, length=5, window=None, dtype=torch.float32):
    """`model` in `dtype`, and its cache after a prefix, from which on it records."""
    cache = filled(model.to(dtype), batch, length)
    cache.activate_past_recording(window)
    return cache


def equal(cache, other) -> bool:
    return all(torch.equal(x, y) for x, y in zip(states(cache), states(other), strict=True))


@each_variant
@torch.no_grad()
def test_crop_gives_the_states_before(config):
    """To the bit: at the boundary of two calls, and inside a call those that it went through."""
    model = causal_lm(config).float()
    cache = recording(model)
    before = cache.clone()
    model(token_ids(config, 3, 7), past_key_values=cache)
    cache.crop(-7)
    assert equal(cache, before) and cache.get_seq_length() == 5 and cache.record_past

    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[1, 6:] = mask[2, 2] = 0
    for removed in range(10):
        cache, kept = recording(model), recording(model)
        model(token_ids(config, 3, 9), attention_mask=mask, past_key_values=cache)
        cache.crop(-removed)
        assert cache.get_seq_length() == 14 - removed
        shorter = mask.clone()
        shorter[:, 9 - removed :] = 0
        model(token_ids(config, 3, 9), attention_mask=shorter, past_key_values=kept)
        assert equal(cache, kept)


@each_family
@torch.no_grad()
def test_crop_over_several_calls(model, config):
    input_ids = token_ids(config, 3, 12)
    cache, snapshots = recording(model), []
    for call in (input_ids[:, :3], input_ids[:, 3:4], input_ids[:, 4:8], input_ids[:, 8:9], input_ids[:, 9:]):
        snapshots.append(cache.clone())
        model(call, past_key_values=cache)
    for snapshot in reversed(snapshots):
        removed = cache.get_seq_length() - snapshot.get_seq_length()
        other = cache.clone()
        other.crop(-removed)
        assert equal(other, snapshot)
        after = model(input_ids, past_key_values=other).logits
        assert torch.equal(after, model(input_ids, past_key_values=snapshot.clone()).logits)
    other = cache.clone()
    other.crop(-6)
    straight = recording(model)
    model(input_ids[:, :6], past_key_values=straight)
    for x, y in zip(states(other), states(straight), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    cache.crop(0)
    with pytest.raises(ValueError, match="cannot take back 1 tokens: 0 are recorded"):
        cache.crop(-1)


@each_family
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_crop_computes_as_the_call_did(model, config, mode):
    """With gradients or without, wherever it is called."""
    with mode():
        cache = recording(model)
        model(token_ids(config, 3, 4), past_key_values=cache)
    cache.crop(-2)
    assert all(x.requires_grad == (mode is torch.enable_grad) for x in states(cache))


@each_family
@torch.no_grad()
def test_crop_computes_in_the_autocast_of_the_call(model, config):
    cache, kept = recording(model), recording(model)
    input_ids = token_ids(config, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids, past_key_values=cache)
        shorter = torch.tensor([1, 1, 0, 0]).expand(3, 4)
        model(input_ids, attention_mask=shorter, past_key_values=kept)
        inside = cache.clone()
        inside.crop(-2)
    cache.crop(-2)
    assert equal(cache, inside) and equal(cache, kept)
    cache, kept = recording(model), recording(model)
    model(input_ids, past_key_values=cache)
    model(input_ids, attention_mask=shorter, past_key_values=kept)
    with torch.autocast("cpu", torch.bfloat16):
        cache.crop(-2)
    assert equal(cache, kept)


@each_family
def test_a_cache_of_inference_mode_in_training(model, config):
    with torch.inference_mode():
        cache = filled(model)
    cache.activate_past_recording()
    input_ids = token_ids(config, 3, 4)
    expected = model(input_ids, past_key_values=filled(model)).logits
    logits = model(input_ids, past_key_values=cache).logits
    assert torch.equal(logits, expected)
    logits.sum().backward()
    cache.crop(-2)
    assert cache.get_seq_length() == 7


@each_family
def test_gradients_through_states_and_checkpoints(config):
    """With activations recomputed: the same, or a refusal where they would be lost."""
    config.hidden_dropout = 0.0
    model, input_ids, gradients = causal_lm(config).train(), token_ids(config, 2, 8), []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if options is not None:
            model.gradient_checkpointing_enable(options)
        embeds = model.get_input_embeddings()(input_ids).detach().requires_grad_()
        cache = model(inputs_embeds=embeds[:, :5], use_cache=True).past_key_values
        if options == {"use_reentrant": True}:
            with pytest.raises(ValueError, match="sends no gradients through past_key_values: use_reentrant must be"):
                model(inputs_embeds=embeds[:, 5:], past_key_values=cache)
        else:
            model(inputs_embeds=embeds[:, 5:], past_key_values=cache).logits.square().sum().backward()
            gradients.append(embeds.grad)
    assert gradients[0][:, :5].abs().max() > 0
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


@each_variant
@torch.no_grad()
def test_a_long_call_is_recorded_as_far_as_the_window(config):
    """In memory that does not depend on its length, and to the bit what the whole call would have given."""
    model, mask, sizes = causal_lm(config).float(), torch.ones(3, 30, dtype=torch.long), []
    mask[0, :4] = mask[1, 28:] = mask[2, 27] = 0
    ids, more = token_ids(config, 3, 30), token_ids(config, 3, 2)
    for length in (20, 30):
        cache = recording(model, window=4)
        model(ids[:, :length], past_key_values=cache)
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]
    for given in (None, mask):
        for removed in range(1, 7):
            cache, whole = recording(model, window=4), recording(model)
            for one in (cache, whole):
                model(ids, attention_mask=given, past_key_values=one)
                if removed > 4:
                    model(more, past_key_values=one)
                one.crop(-removed)
            assert equal(cache, whole) and cache.get_seq_length() == whole.get_seq_length()


@each_family
@pytest.mark.parametrize("cache_class", [RecurrentCache, StaticRecurrentCache])
@torch.no_grad()
def test_a_long_call_that_cannot_be_recorded_changes_nothing(model, config, cache_class):
    """Where the pass of a mixer that it takes fails, with other layers' done. Meanwhile no other cache has to wait."""
    cache, passes = cache_class(config), []
    cache.activate_past_recording(window=2)
    model(token_ids(config, 3, 5), past_key_values=cache)
    before, nbytes, other = cache.clone(), cache.nbytes, filled(model)

    def fail(*_):
        passes.append(threading.Thread(target=other.current_states, daemon=True))
        passes[-1].start()
        passes[-1].join(2)
        if len(passes) == 2:
            raise MemoryError("no room")

    with model.model.layers[1].mixer.register_forward_pre_hook(fail), pytest.raises(MemoryError):
        model(token_ids(config, 3, 7), past_key_values=cache)
    assert len(passes) == 2 and not any(thread.is_alive() for thread in passes)
    assert equal(cache, before) and cache.get_seq_length() == 5 and cache.nbytes == nbytes
    cache.crop(-2)
    before.crop(-2)
    assert equal(cache, before)


@each_family
@torch.no_grad()
def test_the_window_bounds_what_is_recorded(model, config):
    cache = recording(model, window=4)
    sizes = []
    for token in token_ids(config, 3, 30).T:
        model(token[:, None], past_key_values=cache)
        sizes.append(cache.nbytes)
    assert len(set(sizes[4:])) == 1
    snapshot = cache.clone()
    with pytest.raises(ValueError, match="cannot take back 5 tokens: 4 are recorded"):
        cache.crop(-5)
    assert equal(cache, snapshot) and cache.get_seq_length() == 35
    cache.crop(-4)
    assert cache.get_seq_length() == 31
    with pytest.raises(ValueError, match="window must be at least 1 token, got 0"):
        cache.activate_past_recording(0)


@each_variant
@torch.no_grad()
def test_a_window_survives_crop(config):
    """Tokens before those that were taken back can be taken back too, to the bit, as can what came after."""
    model = causal_lm(config).float()
    cache, ids = recording(model, window=12), token_ids(config, 3, 14)
    snapshots = [cache.clone()]
    for start, end in ((0, 3), (3, 4), (4, 9)):
        model(ids[:, start:end], past_key_values=cache)
        snapshots.append(cache.clone())
    cache.crop(-3)
    model(ids[:, 9:11], past_key_values=cache)
    cache.crop(-2)
    partly = cache.clone()
    cache.crop(-2)
    assert equal(cache, snapshots[2])
    cache.crop(-1)
    assert equal(cache, snapshots[1])
    cache.crop(-3)
    assert equal(cache, snapshots[0]) and cache.layers[0].recorded_tokens == 0
    model(ids[:, 11:], past_key_values=partly)
    partly.crop(-5)
    assert equal(partly, snapshots[2])
    with pytest.raises(ValueError, match="cannot take back 5 tokens: 4 are recorded"):
        partly.crop(-5)


@each_family
@torch.no_grad()
def test_what_is_taken_back_again_and_again_takes_no_more_memory(model, config):
    cache, sizes = recording(model, window=4), []
    for _ in range(30):
        model(token_ids(config, 3, 4), past_key_values=cache)
        cache.crop(-3)
        sizes.append(cache.nbytes)
    assert max(sizes) == max(sizes[:3])
    with pytest.raises(TypeError):
        cache.activate_past_recording(1.5)


@each_family
@torch.no_grad()
def test_crop_after_batch_operations(model, config):
    rows = torch.tensor([2, 0])
    expected = states(recording(model))
    for operation, argument, chosen in (
        ("reorder_cache", rows, [2, 0]),
        ("batch_select_indices", rows, [2, 0]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("__getitem__", slice(1, 3), [1, 2]),
    ):
        cache = recording(model)
        model(token_ids(config, 3, 4), past_key_values=cache)
        cache = getattr(cache, operation)(argument) or cache
        partly = cache.clone()
        partly.crop(-1)
        assert partly.batch_size == len(chosen) and partly.get_seq_length() == 8
        cache.crop(-4)
        assert all(torch.equal(x, y[chosen]) for x, y in zip(states(cache), expected, strict=True))


@each_family
@torch.no_grad()
def test_crop_that_cannot_be(model, config):
    cache = filled(model)
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"cannot take back 2 tokens: call activate_past_recording\(\)"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="must be -n to take back n tokens, or 0; got 3"):
        cache.crop(3)
    cache.activate_past_recording()
    model(token_ids(config, 3, 4), past_key_values=cache)
    lost = copy.deepcopy(cache)
    cache.layers[0].record_past = False  # as `generate` does with a cache that it gives back
    with pytest.raises(RuntimeError, match="cannot take back"):
        cache.crop(-1)
    assert lost.get_seq_length() == 9
    pickled = pickle.loads(pickle.dumps(lost))
    assert not pickled.record_past and equal(pickled, lost) and pickled.nbytes < lost.nbytes
    del model
    lost.crop(-4)  # the boundary of a call: no mixer is needed
    assert lost.get_seq_length() == 5


@each_family
@torch.no_grad()
def test_rows_and_clones(model, config):
    cache = filled(model)
    for index, rows in ((1, [1]), (-1, [2]), (slice(0, 2), [0, 1]), ([2, 0], [2, 0]), (torch.tensor([0, 0]), [0, 0])):
        part = cache[index]
        assert part.batch_size == len(rows) and part.get_seq_length() == 5
        assert all(torch.equal(x, y[rows]) for x, y in zip(states(part), states(cache), strict=True))
    with pytest.raises(IndexError):
        cache[3]
    with pytest.raises(IndexError, match="an empty cache has no rows"):
        RecurrentCache(config)[0]
    clone = cache.clone()
    assert not any(x.data_ptr() == y.data_ptr() for x, y in zip(states(clone), states(cache), strict=True))
    # A prefix read once: each continuation is that of a full run.
    prefix, texts = token_ids(config, 1, 9), token_ids(config, 3, 4, seed=1)
    read = model(prefix, use_cache=True).past_key_values
    for text in texts:
        continued = model(text[None], past_key_values=read.clone()).logits
        full = model(torch.cat([prefix, text[None]], 1)).logits[:, 9:]
        torch.testing.assert_close(continued, full, rtol=1e-9, atol=1e-11)


@each_family
@torch.no_grad()
def test_to_another_dtype(model, config):
    cache = filled(model)
    narrow = cache.to("cpu", torch.bfloat16)
    for held in narrow.layers:
        assert held.states["recurrent"].dtype in (torch.float32, torch.complex64)
        assert "conv" not in held.states or held.states["conv"].dtype is torch.bfloat16
    model.bfloat16()(token_ids(config, 3, 2), past_key_values=narrow)
    assert narrow.get_seq_length() == 7 and cache.get_seq_length() == 5
    with pytest.raises(TypeError, match="dtype must be the floating-point one"):
        cache.to(dtype=torch.int64)


@each_variant
@torch.no_grad()
def test_state_files(config, tmp_path):
    model = causal_lm(config)
    cache = filled(model)
    cache.save(tmp_path / "state.safetensors")
    loaded = RecurrentCache.load(tmp_path / "state.safetensors", model.config)
    assert equal(loaded, cache) and loaded.get_seq_length() == 5
    text = token_ids(config, 3, 4)
    assert torch.equal(model(text, past_key_values=loaded).logits, model(text, past_key_values=cache).logits)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


@each_family
def test_state_files_that_do_not_fit(model, config, tmp_path):
    path = tmp_path / "state.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no state file"):
        RecurrentCache.load(path, config)
    filled(model).save(path)

    def changed(**changes):
        return type(config)(**{field.name: getattr(config, field.name) for field in fields(config)} | changes)

    RecurrentCache.load(path, changed(hidden_dropout=0.5))
    with pytest.raises(ValueError, match=f"saved by a model with hidden_size = {config.hidden_size}, this one has 24"):
        RecurrentCache.load(path, changed(hidden_size=24))
    other = next(family for family in hf_recurrent.FAMILIES if not isinstance(config, family))
    with pytest.raises(ValueError, match="saved by a model with "):
        RecurrentCache.load(path, other())
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        RecurrentCache.load(path, config)
    path.write_bytes(whole.replace(b"layers.1.recurrent", b"layers.7.recurrent"))
    with pytest.raises(ValueError, match="is a damaged state file"):
        RecurrentCache.load(path, config)
    # A whole file of the same configuration whose states have other shapes: refused by the model, and nothing is lost.
    from safetensors import safe_open

    path.write_bytes(whole)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file({name: tensor.repeat(1, 2, *[1] * (tensor.ndim - 2)) for name, tensor in tensors.items()}, path, metadata)
    foreign = RecurrentCache.load(path, config)
    with pytest.raises(ValueError, match="holds states of another model"):
        model(token_ids(config, 3, 2), past_key_values=foreign)
    assert foreign.get_seq_length() == 5
    some = next(iter(tensors))
    for changes, names in (
        ({"config": "[]"}, {}),
        ({"config": "null"}, {}),
        ({"seen_tokens": "-1"}, {}),
        ({"seen_tokens": "9" * 30}, {}),
        ({"seen_tokens": "0"}, {}),
        ({}, {name: None for name in tensors}),
        ({}, {name: tensor[:0] for name, tensor in tensors.items()}),
        ({}, {some: tensors[some].int()}),
        ({}, {some: torch.ones(())}),
        ({}, {"layers.-1.recurrent": tensors[some]}),
        ({}, {"rows.0.recurrent": tensors[some]}),
        ({}, {f"layers.{index}.other": tensors[some] for index in range(2)}),
    ):
        kept = {name: tensor for name, tensor in {**tensors, **names}.items() if tensor is not None}
        save_file({name: tensor.clone() for name, tensor in kept.items()}, path, {**metadata, **changes})
        with pytest.raises(ValueError, match="is a damaged state file"):
            RecurrentCache.load(path, config)
    save_file({"layers.0.recurrent": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="is not a state file: its format is None"):
        RecurrentCache.load(path, config)


@each_family
@torch.no_grad()
def test_state_files_of_another_dtype(model, config, tmp_path):
    """Refused where both configurations tell theirs; `to` gives a state that fits."""
    path, config = tmp_path / "state.safetensors", model.config
    narrow = copy.copy(config)
    config.dtype, narrow.dtype = torch.float64, torch.bfloat16
    cache = filled(model)
    cache.save(path)
    assert equal(RecurrentCache.load(path, config), cache)
    with pytest.raises(ValueError, match="saved by a model with dtype = 'float64', this one has 'bfloat16'"):
        RecurrentCache.load(path, narrow)
    cache.to(dtype=torch.bfloat16).save(path)
    loaded = RecurrentCache.load(path, narrow)
    model.bfloat16()(token_ids(config, 3, 2), past_key_values=loaded)
    config.dtype = None
    RecurrentCache.load(path, config)


@each_family
def test_two_calls_at_once_are_refused(model, config):
    cache = filled(model)

    def interfere(*_):
        hook.remove()
        model(token_ids(config, 3, 1), past_key_values=cache)

    hook = model.model.layers[0].mixer.register_forward_hook(interfere)
    with pytest.raises(RuntimeError, match="changed while a model was reading it"):
        model(token_ids(config, 3, 2), past_key_values=cache)
    assert cache.get_seq_length() == 6


@each_family
@torch.no_grad()
def test_two_threads_at_once(model, config):
    """Whoever ends first has the cache; the other is told, and changes nothing."""
    cache, errors = filled(model), []
    both_inside = threading.Barrier(2, timeout=60)

    def meet(*_):
        both_inside.wait()

    hook = model.model.layers[0].mixer.register_forward_hook(meet)

    def work(length):
        try:
            with torch.no_grad():
                model(token_ids(config, 3, length), past_key_values=cache)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(length,)) for length in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook.remove()
    assert len(errors) == 1 and "it serves one call at a time" in str(errors[0])
    read = cache.get_seq_length() - 5
    other = filled(model)
    model(token_ids(config, 3, read), past_key_values=other)
    assert read in (2, 3) and equal(cache, other)


@each_family
def test_two_threads_record_their_own_calls(config):
    """With a cache for each, and one model."""
    model = causal_lm(config)
    input_ids, caches = token_ids(config, 2, 6), [RecurrentCache(config) for _ in range(2)]
    both_inside = threading.Barrier(2, timeout=60)
    hook = model.model.layers[0].mixer.register_forward_hook(lambda *_: (both_inside.wait(), None)[1])

    def work(row):
        caches[row].activate_past_recording()
        with torch.no_grad():
            model(input_ids[row : row + 1], past_key_values=caches[row], use_cache=True)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook.remove()
    for row, cache in enumerate(caches):
        cache.crop(-2)
        with torch.no_grad():
            kept = model(input_ids[row : row + 1, :4], use_cache=True).past_key_values
        for x, y in zip(states(cache), states(kept), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@each_family
@torch.no_grad()
def test_a_cache_is_read_as_a_whole(model, config, monkeypatch):
    """By another thread, while the states of its layers are being replaced one after the other."""
    cache, text, read = filled(model), token_ids(config, 3, 2), []

    def reader():
        with torch.no_grad():
            read.append(model(text, past_key_values=cache, use_cache=False).logits)

    thread = threading.Thread(target=reader)
    replace = type(cache.layers[1]).advance

    def advance(self, *args):
        if self is cache.layers[1]:
            thread.start()
            thread.join(timeout=0.2)
        replace(self, *args)

    monkeypatch.setattr(type(cache.layers[1]), "advance", advance)
    model(text, past_key_values=cache)
    thread.join()
    assert torch.equal(read[0], model(text, past_key_values=cache, use_cache=False).logits)


@each_family
def test_copies_of_a_cache_with_a_graph(model, config):
    """Deep copies and pickles hold the values alone; a clone stays in the graph; `detach` leaves it."""
    cache = model(token_ids(config, 2, 4), use_cache=True).past_key_values
    cache.activate_past_recording()
    model(token_ids(config, 2, 3), past_key_values=cache)
    deep, pickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    layer, output = copy.deepcopy(cache.layers[0]), copy.deepcopy({"past_key_values": cache})["past_key_values"]
    for other in (deep, pickled, output, cache.detach()):
        assert equal(other, cache) and not any(state.requires_grad for state in states(other))
        assert other.get_seq_length() == 7
    assert not any(state.requires_grad for state in layer.states.values())
    assert all(state.requires_grad for state in states(cache) + states(cache.clone()))
    deep.crop(-3)
    assert deep.get_seq_length() == 4
    call = copy.deepcopy(cache.layers[0].calls[0])
    assert torch.equal(call.x, cache.layers[0].calls[0].x) and not call.x.requires_grad


@each_family
@torch.no_grad()
def test_concatenation(model, config):
    one, three = filled(model, batch=1, length=7), filled(model)
    joined = RecurrentCache.concatenate([one, three])
    assert joined.batch_size == 4 and joined.get_seq_length() == 7
    assert equal(joined[1:], three) and equal(joined[0], one)
    text = token_ids(config, 4, 2)
    got = model(text, past_key_values=joined).logits
    for rows, cache in ((slice(0, 1), one), (slice(1, 4), three)):
        torch.testing.assert_close(got[rows], model(text[rows], past_key_values=cache).logits, rtol=1e-9, atol=1e-11)
    with pytest.raises(ValueError, match="there is no cache to concatenate"):
        RecurrentCache.concatenate([])
    with pytest.raises(ValueError, match="cache 1 is empty"):
        RecurrentCache.concatenate([one, RecurrentCache(config)])
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    other = filled(causal_lm(type(config)(**{**options, "norm_eps": 0.5})))
    with pytest.raises(ValueError, match="cache 1 belongs to a model with norm_eps = 0.5, the first has 1e-0"):
        RecurrentCache.concatenate([one, other])


@torch.no_grad()
def test_a_cache_of_another_family_with_the_same_shapes():
    minlstm, mingru = (causal_lm(FIRST[name][0](**FIRST[name][1])) for name in ("minlstm", "mingru"))
    cache = filled(minlstm)
    before = cache.clone()
    with pytest.raises(ValueError, match="belongs to a model with model_type = 'minlstm', MinGRUModel has 'mingru'"):
        mingru(token_ids(mingru.config, 3, 2), past_key_values=cache)
    vanilla = causal_lm(type(mingru.config)(**{**FIRST["mingru"][1], "candidate": "vanilla"}))
    with pytest.raises(ValueError, match="belongs to a model with candidate = 'vanilla', MinGRUModel has 'positive'"):
        mingru(token_ids(mingru.config, 3, 2), past_key_values=filled(vanilla))
    assert equal(cache, before) and cache.get_seq_length() == 5


@each_family
@torch.no_grad()
def test_offloading(model, config):
    """There and back: the same bits, in memory of their own."""
    cache = filled(model)
    away = cache.to("cpu")
    back = away.to(model.device)
    assert equal(back, cache) and back.get_seq_length() == 5
    assert not {x.data_ptr() for x in states(away)} & {x.data_ptr() for x in states(cache)}
    text = token_ids(config, 3, 2)
    assert torch.equal(model(text, past_key_values=back).logits, model(text, past_key_values=cache).logits)


@each_family
def test_use_cache_decides_what_is_returned_and_written(model):
    input_ids = token_ids(model.config, 3, 4)
    cache = filled(model)
    before = [x.clone() for x in states(cache)]
    out = model(input_ids, past_key_values=cache, use_cache=False)
    assert out.past_key_values is None and cache.get_seq_length() == 5
    assert all(torch.equal(x, y) for x, y in zip(states(cache), before, strict=True))
    written = model(input_ids, past_key_values=cache)
    assert written.past_key_values is cache and torch.equal(out.logits, written.logits)
    assert model(input_ids, use_cache=False).past_key_values is None
    model.config.use_cache = False
    assert model(input_ids).past_key_values is None
    assert model(input_ids, use_cache=True).past_key_values.get_seq_length() == 4


@each_family
def test_a_cache_that_does_not_fit(model, config):
    input_ids = token_ids(config, 3, 2)
    with pytest.raises(TypeError, match="past_key_values must be a RecurrentCache, got a DynamicCache"):
        model(input_ids, past_key_values=DynamicCache())
    with pytest.raises(TypeError, match="past_key_values must be a RecurrentCache, got a tuple"):
        model(input_ids, past_key_values=((input_ids, input_ids),))
    with pytest.raises(ValueError, match="holds the states of 2 rows, the input has 3"):
        model(input_ids, past_key_values=filled(model, batch=2))

    def other(**changes):
        options = {field.name: getattr(config, field.name) for field in fields(config)}
        return filled(causal_lm(type(config)(**{**options, **changes})))

    with pytest.raises(ValueError, match="past_key_values has 3 layers, .*Model has 2"):
        model(input_ids, past_key_values=other(num_hidden_layers=3))
    with pytest.raises(ValueError, match="states of another model: layer 0 has the shapes .*'recurrent'"):
        size = "state_size" if hasattr(config, "state_size") else "hidden_size"
        model(input_ids, past_key_values=other(**{size: getattr(config, size) * 2}))


@each_family
def test_a_call_that_fails_leaves_the_cache_as_it_was(model):
    cache = filled(model)
    before = [x.clone() for x in states(cache)]

    def fail(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(token_ids(model.config, 3, 2), past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == 5
    assert all(torch.equal(x, y) for x, y in zip(states(cache), before, strict=True))


@each_family
@torch.no_grad()
def test_offload_and_prefetch(model, config):
    """On the CPU everything is where it is to be moved to; elsewhere it comes back to where it was."""
    cache, other = recording(model), recording(model)
    cache.offload()
    cache.offload(1)
    cache.prefetch(0)
    assert equal(cache, other)
    layer = cache.layers[0]
    layer.device = torch.device("meta")  # as if it had been there
    cache.prefetch()
    assert {state.device.type for state in layer.states.values()} == {"meta"} and layer.device is None
    assert cache.layers[1].states["recurrent"].device.type == "cpu"


@each_family
@pytest.mark.parametrize("window", [None, 4])
def test_a_call_that_fails_after_the_backbone(config, window):
    """Leaves the cache as it was, with what is recorded."""
    model, ids = causal_lm(config), token_ids(config, 2, 12)
    cache = RecurrentCache(config)
    cache.activate_past_recording(window)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
        before, recorded = cache.clone(), cache.layers[0].recorded_tokens

        def fails(error, **options):
            with pytest.raises(error):
                model(ids[:, 6:], past_key_values=cache, **options)
            assert cache.seen_tokens == 6 and cache.layers[0].recorded_tokens == recorded
            for held, other in zip(cache.layers, before.layers, strict=True):
                assert all(torch.equal(state, other.states[name]) for name, state in held.states.items())

        fails(ValueError, labels=ids[:, :3])
        fails(IndexError, labels=ids[:, 6:] + 500)
        fails(ValueError, logits_to_keep=-1)
        fails(TypeError, labels=ids[:, 6:].float())
        handle = model.lm_head.register_forward_hook(lambda *_: ids[100])
        fails(IndexError)
        handle.remove()
        logits = model(ids[:, 6:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(ids).logits[:, 6:])
        cache.crop(-4)
        want = model(ids[:, :8], use_cache=True).past_key_values
        for held, other in zip(cache.layers, want.layers, strict=True):
            torch.testing.assert_close(held.states, other.states)


@each_family
def test_labels_of_any_integers(config):
    model, ids = causal_lm(config), token_ids(config, 2, 5)
    want = model(ids, labels=ids).loss
    torch.testing.assert_close(model(ids, labels=ids.int()).loss, want, rtol=0, atol=0)
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(ids, shift_labels=shifted.short()).loss, want)
    with pytest.raises(TypeError, match="labels must be integers, got torch.bool"):
        model(ids, labels=ids > 3)


@each_family
def test_a_state_of_before_a_token_was_added(config, tmp_path):
    model, ids = causal_lm(config), token_ids(config, 1, 5)
    cache = model(ids, use_cache=True).past_key_values
    cache.save(tmp_path / "state")
    model.resize_token_embeddings(config.vocab_size + 2)
    loaded = RecurrentCache.load(tmp_path / "state", model.config)
    for held in (cache, loaded):
        assert model(ids, past_key_values=held).logits.shape[-1] == config.vocab_size
    torch.testing.assert_close(loaded.layers[0].states, cache.layers[0].states)


@each_family
def test_one_prefix_for_several_rows(config):
    """Repeated, as the message says."""
    model, ids = causal_lm(config), token_ids(config, 1, 9)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    options = {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 3, "pad_token_id": 0}
    with pytest.raises(ValueError, match=r"of 1 rows, .* has 3 \(past_key_values.batch_repeat_interleave\(3\) repeats"):
        model.generate(ids, past_key_values=cache.clone(), **options)
    cache.batch_repeat_interleave(3)
    torch.testing.assert_close(model.generate(ids, past_key_values=cache, **options), model.generate(ids, **options))
