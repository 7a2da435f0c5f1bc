"""Longhorn against its paper's equations, written token by token."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError

from hf_recurrent import LonghornConfig, LonghornForCausalLM, LonghornForSequenceClassification, LonghornModel
from hf_recurrent.modeling.longhorn import LonghornMixer

TINY = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "state_size": 5}
CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64


def recurrence_by_token(mixer: LonghornMixer, u: torch.Tensor, suffix: str = "") -> torch.Tensor:
    """What the gate gets for one direction, (L, d) -> the same: arXiv 2407.14207, algorithm 1."""
    weights = {name.replace(suffix, "", 1): p for name, p in mixer.named_parameters() if suffix in name.split(".")[0]}
    d, m = mixer.D.shape[0], mixer.widths[1]
    kernel, bias = weights["conv1d.weight"][:, 0], weights["conv1d.bias"]
    window, state, outputs = u.new_zeros(kernel.shape[1], d), u.new_zeros(d, m), []
    for token in u:
        window = torch.cat([window[1:], token[None]])
        x = F.silu((window * kernel.T).sum(0) + bias)
        dt, k, q = (weights["x_proj.weight"] @ x).split(mixer.widths)
        beta = torch.sigmoid(weights["dt_head.weight"] @ dt + weights["dt_head.bias"])
        eps = beta / (1 + beta * k.dot(k))
        state = (1 - torch.outer(eps, k * k)) * state + torch.outer(eps * x, k)
        outputs.append(state @ q + weights["D"] * x)
    return torch.stack(outputs)


def mixer_by_token(mixer: LonghornMixer, x: torch.Tensor) -> torch.Tensor:
    """One document without padding, (L, hidden_size) -> the same."""
    u, z = (x @ mixer.in_proj.weight.T).chunk(2, dim=-1)
    o = recurrence_by_token(mixer, u)
    if mixer.bidirectional:
        o = (o + recurrence_by_token(mixer, u.flip(0), "_b").flip(0)) / 2
    return (o * F.silu(z)) @ mixer.out_proj.weight.T


def wild_mixer(**options) -> LonghornMixer:
    torch.manual_seed(0)
    mixer = LonghornMixer(LonghornConfig(**TINY, **options)).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.5)
    return mixer


def test_mixer_is_the_papers():
    mixer = wild_mixer()
    x = torch.randn(3, 20, 12, dtype=torch.float64)
    y, state = mixer(x, {}, None, None)
    assert state["recurrent"].shape == (3, 24, 5) and state["conv"].shape == (3, 3, 24)
    torch.testing.assert_close(y, torch.stack([mixer_by_token(mixer, row) for row in x]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_bidirectional_mixer_is_a_forward_and_a_reversed_run(packed, masked):
    """Padding anywhere and two documents in a row, each of which is alone in its own loop over tokens."""
    mixer = wild_mixer(bidirectional=True)
    x = torch.randn(2, 12, 12, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]]).bool()
    reset = torch.zeros(2, 12, dtype=torch.bool)
    reset[0, 5] = reset[1, 7] = True
    reset[0, 7] = True  # at padding, which is no document's first token
    y, state = mixer(x, {}, mask if masked else None, reset & (mask | masked) if packed else None)
    assert state == {} == mixer.state_shapes
    for row in range(2):
        starts = [0, 12]
        if packed:
            starts = [0, 5, 12] if row == 0 else [0, 7, 12]
        for start, end in itertools.pairwise(starts):
            document = torch.arange(start, end)
            if masked:
                document = document[mask[row, document]]
            torch.testing.assert_close(y[row, document], mixer_by_token(mixer, x[row, document]), **CLOSE)


def bidirectional(model_class, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return model_class(LonghornConfig(**TINY, bidirectional=True, initializer_range=0.4, **options)).to(dtype).eval()


@pytest.mark.parametrize("conv_kernel", [0, 4])
@torch.no_grad()
def test_padding_changes_nothing_in_both_directions(conv_kernel):
    """On the left, on the right and in between, and a row of padding; the classifier reads the mean of real tokens."""
    encoder = bidirectional(LonghornModel, conv_kernel=conv_kernel)
    classifier = bidirectional(LonghornForSequenceClassification, conv_kernel=conv_kernel, num_labels=3)
    ids = torch.randint(0, 61, (4, 9))
    mask = torch.tensor(
        [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1, 0, 1, 0], [0] * 9]
    )
    hidden, logits = encoder(ids, mask).last_hidden_state, classifier(ids, mask).logits
    assert hidden.isfinite().all() and logits.isfinite().all()
    for row in range(3):
        alone = ids[row, mask[row] == 1][None]
        torch.testing.assert_close(hidden[row, mask[row] == 1], encoder(alone).last_hidden_state[0], **CLOSE)
        expected = classifier.score(classifier.model(alone).last_hidden_state.mean(1))
        torch.testing.assert_close(logits[row], expected[0], **CLOSE)


@torch.no_grad()
def test_packed_documents_in_both_directions():
    model = bidirectional(LonghornModel)
    ids = torch.randint(0, 61, (1, 9))
    alone = [model(ids[:, a:b]).last_hidden_state for a, b in ((0, 4), (4, 7), (7, 9))]
    for arguments in (
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])},
        {"seq_idx": torch.tensor([[0] * 4 + [1] * 3 + [0] * 2])},
        {"cu_seq_lens_q": torch.tensor([0, 4, 7, 9])},
    ):
        got = model(ids, **arguments).last_hidden_state
        torch.testing.assert_close(got, torch.cat(alone, dim=1), **CLOSE)


@torch.no_grad()
def test_both_directions_reach_every_token():
    model = bidirectional(LonghornModel)
    ids = torch.randint(0, 60, (1, 7))
    changed = ids.clone()
    changed[0, 3] = 60
    difference = (model(ids).last_hidden_state - model(changed).last_hidden_state).abs().amax(-1)
    assert (difference > 1e-6).all()


def test_bidirectional_models_carry_no_state():
    model = bidirectional(LonghornModel)
    ids = torch.randint(0, 61, (1, 5))
    assert model(ids).past_key_values is None
    cache = LonghornModel(LonghornConfig(**TINY))(ids, use_cache=True).past_key_values
    for arguments in ({"use_cache": True}, {"past_key_values": cache}):
        with pytest.raises(
            ValueError, match="a bidirectional Longhorn has no state to carry on: use_cache must be Fal"
        ):
            model(ids, **arguments)
    with pytest.raises(ValueError, match="reads from left to right: LonghornForCausalLM needs bidirectional=False"):
        bidirectional(LonghornForCausalLM)


def test_bidirectional_training_with_checkpointing_and_compiled():
    model = bidirectional(LonghornForSequenceClassification).train()
    batch = {"input_ids": torch.randint(0, 61, (2, 9)), "labels": torch.tensor([0, 1])}
    batch["attention_mask"] = torch.tensor([[1] * 9, [0, 0] + [1] * 7])
    batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 0, 1, 2]])

    def gradients(model):
        model.zero_grad()
        model(**batch).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(model)
    assert all(g.abs().sum() > 0 for g in expected)
    compiled = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    model.gradient_checkpointing_enable()
    for x, y, z in zip(expected, compiled, gradients(model), strict=True):
        torch.testing.assert_close(y, x, **CLOSE)
        torch.testing.assert_close(z, x, **CLOSE)


def test_bidirectional_autocast_and_round_trip(tmp_path):
    model = bidirectional(LonghornForSequenceClassification, torch.float32)
    ids = torch.randint(0, 61, (2, 9))
    expected = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=torch.tensor([0, 1]))
    out.loss.backward()
    assert (out.logits - expected).square().mean() < 0.05**2 * expected.square().mean()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model.save_pretrained(tmp_path)
    loaded, report = LonghornForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(loaded(ids).logits, expected)


def test_the_state_answers_what_it_was_taught():
    """The update solves an online regression: with beta near 1 and a unit one-hot key, S k moves halfway to x, exactly
    (eps = beta / (1 + beta)), and what other keys hold is untouched."""
    from hf_recurrent.scan import longhorn_scan

    keys = torch.eye(4, dtype=torch.float64)[None]
    x = torch.randn(1, 4, 3, dtype=torch.float64)
    _, state = longhorn_scan(x, torch.full_like(x, 40.0), keys, keys)
    torch.testing.assert_close(state, x.mT / 2)


def test_names_of_the_original():
    """Parameters have the names of the authors' checkpoints, so that conversion is a rename."""
    names = {
        name.removeprefix("model.layers.0.mixer.") for name in LonghornForCausalLM(LonghornConfig(**TINY)).state_dict()
    }
    assert {
        "D",
        "in_proj.weight",
        "conv1d.weight",
        "conv1d.bias",
        "x_proj.weight",
        "dt_head.weight",
        "dt_head.bias",
        "out_proj.weight",
    } <= names


def test_initialisation():
    model = LonghornForCausalLM(LonghornConfig(**TINY))
    for layer in model.model.layers:
        assert (layer.mixer.D == 1).all() and (layer.mixer.dt_head.bias == 0).all()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for layer in LonghornModel(LonghornConfig(**TINY, bidirectional=True)).layers:
        assert (layer.mixer.D_b == 1).all() and (layer.mixer.dt_head_b.bias == 0).all()


@pytest.mark.parametrize(
    "name, layers, width, parameters",
    [("longhorn-125m", 24, 768, 125e6), ("longhorn-350m", 48, 1024, 350e6), ("longhorn-1.3b", 48, 2048, 1.3e9)],
)
def test_presets(name, layers, width, parameters):
    """The sizes that the paper rounds to; as many blocks as Mamba has at that size."""
    config = LonghornConfig.from_preset(name)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size % 8) == (layers, width, 0)
    assert config.step_rank == width // 16
    with torch.device("meta"):
        model = LonghornForCausalLM(config)
    inner, rank, states = 2 * width, width // 16, 16
    block = width * 2 * inner + 5 * inner + inner * (rank + 2 * states) + (rank + 1) * inner + inner + inner * width
    assert model.num_parameters() == config.vocab_size * width + layers * (block + width) + width
    assert model.num_parameters() == pytest.approx(parameters, rel=0.06)


@pytest.mark.parametrize(
    "options", [{"state_size": 0}, {"dt_rank": 0}, {"dt_rank": "small"}, {"conv_kernel": 1}], ids=str
)
def test_bad_options(options):
    with pytest.raises(StrictDataclassError, match=next(iter(options))):
        LonghornConfig(**options)
