"""S5: the state space model against the paper's equations and the released package, and what only this family has."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from hf_recurrent import (
    S5Config,
    S5ForCausalLM,
    S5ForDocumentMatching,
    S5ForSequenceClassification,
    S5ForTokenClassification,
    S5Model,
)
from hf_recurrent.modeling.model import mean_token
from hf_recurrent.modeling.s5 import S5SSM, ChannelDropout, S5BatchNorm, S5Block, S5Mixer, hippo_normal

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64
MNIST = Path(__file__).parents[2].parent / "shared" / "data" / "mnist"


def tiny(**options) -> S5Config:
    sizes = {"vocab_size": 31, "hidden_size": 6, "num_hidden_layers": 2, "state_size": 8, "num_blocks": 2}
    return S5Config(**{**sizes, "initializer_range": 0.4, **options})


def fresh(model_class, config, dtype=torch.float64):
    torch.manual_seed(0)
    return model_class(config).to(dtype).eval()


def fresh_ssm(config) -> S5SSM:
    torch.manual_seed(0)
    ssm = S5SSM(config)
    with torch.no_grad():
        ssm.init_weights()
    return ssm.double()


# ---- the state space model -------------------------------------------------------------------------------------------


def dense_scan(ssm: S5SSM, u, times):
    """One direction for one row by the paper's equations with dense matrices: u (L, H), times (L,) -> all states. With
    conjugate symmetry the conjugate half of the states is there too."""
    poles, b = torch.complex(ssm.Lambda_re, ssm.Lambda_im), torch.view_as_complex(ssm.B.contiguous())
    if ssm.config.clip_eigs:
        poles = torch.complex(poles.real.clamp(max=-1e-4), poles.imag)
    delta = ssm.log_step[:, 0].exp() * ssm.config.step_rescale
    if ssm.config.conj_sym:
        poles, b, delta = torch.cat([poles, poles.conj()]), torch.cat([b, b.conj()]), torch.cat([delta, delta])
    a, eye = torch.diag(poles), torch.eye(len(poles), dtype=poles.dtype)
    state, states = torch.zeros(len(poles), dtype=poles.dtype), []
    for sample, time in zip(u, times, strict=True):
        step = torch.diag(delta * time).to(poles.dtype)
        if ssm.config.discretization == "zoh":
            a_bar = torch.linalg.matrix_exp(a @ step)
            b_bar = torch.linalg.solve(a, (a_bar - eye) @ b)
        else:
            inverse = torch.linalg.inv(eye - step / 2 @ a)
            a_bar, b_bar = inverse @ (eye + step / 2 @ a), inverse @ step @ b
        state = a_bar @ state + b_bar @ sample.to(poles.dtype)
        states.append(state)
    return torch.stack(states)


def dense(ssm: S5SSM, u, times):
    """y, (L, H), of one document without padding."""

    def read(states, c):
        c = torch.view_as_complex(c.contiguous())
        c = torch.cat([c, c.conj()], dim=1) if ssm.config.conj_sym else c
        y = states @ c.T
        assert not ssm.config.conj_sym or y.imag.abs().max() < 1e-12  # the whole system is real
        return y.real

    forward = dense_scan(ssm, u, times)
    if not ssm.config.bidirectional:
        return read(forward, ssm.C) + ssm.D * u
    to_next = torch.cat([times[1:], torch.ones(1, dtype=times.dtype)])
    backward = dense_scan(ssm, u.flip(0), to_next.flip(0)).flip(0)  # includes the current position
    return read(forward, ssm.C1) + read(backward, ssm.C2) + ssm.D * u


@pytest.mark.parametrize("irregular", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("conj_sym", [True, False])
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
@torch.no_grad()
def test_the_equations(discretization, conj_sym, bidirectional, irregular):
    """Padding anywhere and two documents in a row, each of which is alone in its own equation."""
    options = {"discretization": discretization, "conj_sym": conj_sym, "bidirectional": bidirectional}
    ssm = fresh_ssm(tiny(**options, dt_min=0.1, dt_max=1.0, step_rescale=1.3))
    u = torch.randn(2, 12, 6, dtype=torch.float64)
    times = torch.rand(2, 12, dtype=torch.float64) * 3 + 0.1 if irregular else None
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 0], [1] * 12], dtype=torch.bool)
    reset = torch.zeros(2, 12, dtype=torch.bool)
    reset[0, 5] = reset[1, 7] = True
    y, final = ssm(u, None, mask, reset, timesteps=times)
    for row, start in ((0, 5), (1, 7)):
        for document in (torch.arange(start), torch.arange(start, 12)):
            real = document[mask[row, document]]
            expected = dense(ssm, u[row, real], torch.ones(len(real)).double() if times is None else times[row, real])
            torch.testing.assert_close(y[row, real], expected, **CLOSE)
    assert (final is None) == bidirectional


@torch.no_grad()
def test_gradients_of_every_parameter():
    ssm = fresh_ssm(tiny(bidirectional=True, dt_min=0.1, dt_max=1.0))
    u, times = torch.randn(1, 5, 6).double(), torch.rand(1, 5).double() + 0.5
    weight = torch.randn(1, 5, 6).double()
    with torch.enable_grad():
        (ssm(u, None, None, None, timesteps=times)[0] * weight).sum().backward()
        got = {name: p.grad.clone() for name, p in ssm.named_parameters()}
        ssm.zero_grad()
        (dense(ssm, u[0], times[0]) * weight[0]).sum().backward()
    for name, parameter in ssm.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-8, atol=1e-10)


@torch.no_grad()
def test_chunks_with_timesteps_and_another_step():
    model = fresh(S5ForCausalLM, tiny())
    ids, times = torch.randint(0, 31, (2, 9)), torch.rand(2, 9).double() + 0.1
    whole = model(ids, timesteps=times, step_rescale=0.7).logits
    first = model(ids[:, :4], timesteps=times[:, :4], step_rescale=0.7, use_cache=True)
    cache = first.past_key_values
    assert cache.layers[0].states["recurrent"].shape == (2, 4) and cache.layers[0].states["recurrent"].is_complex()
    second = model(ids[:, 4:], timesteps=times[:, 4:], step_rescale=0.7, past_key_values=cache)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), whole, **CLOSE)
    assert (model(ids).logits - whole).abs().max() > 1e-3
    greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    model.config.step_rescale = 0.7
    torch.testing.assert_close(model(ids, timesteps=times).logits, whole, **CLOSE)
    expected = model.generate(ids, **greedy)
    model.config.step_rescale = 1.0
    assert torch.equal(model.generate(ids, step_rescale=0.7, **greedy), expected)


@torch.no_grad()
def test_a_signal_of_half_the_sampling_rate():
    """Zero-order hold is exact for a signal that is held: every other sample with twice the step gives the same."""
    ssm = fresh_ssm(tiny(dt_min=0.1, dt_max=1.0))
    slow = torch.randn(2, 10, 6).double()
    fast, _ = ssm(slow.repeat_interleave(2, dim=1), None, None, None)
    for steps in ({"step_rescale": 2.0}, {"timesteps": torch.full((2, 10), 2.0)}):
        torch.testing.assert_close(ssm(slow, None, None, None, **steps)[0], fast[:, 1::2], **CLOSE)


@torch.no_grad()
def test_clipped_eigenvalues_do_not_grow():
    for clip in (True, False):
        ssm = fresh_ssm(tiny(clip_eigs=clip))
        ssm.Lambda_re.fill_(0.5)
        a, _ = ssm.discretize(ssm.log_step[:, 0].exp())
        assert bool((a.abs() < 1).all()) is clip
        y, _ = ssm(torch.ones(1, 3, 6).double(), None, None, None)
        torch.testing.assert_close(y[0], dense(ssm, torch.ones(3, 6).double(), torch.ones(3).double()), **CLOSE)


@torch.no_grad()
def test_small_steps_in_float32():
    """(e^z - 1) / z without cancellation."""
    ssm = fresh_ssm(tiny(dt_min=1e-6, dt_max=1e-5))
    exact = ssm.discretize(ssm.log_step[:, 0].exp())[1]
    single = ssm.float().discretize(ssm.log_step[:, 0].exp())[1]
    assert ((single - exact).abs() / exact.abs()).max() < 1e-5


# ---- initialisation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 8, 33])
def test_hippo(size):
    legs = np.array(
        [
            [-(n + 1.0) if n == k else -np.sqrt((2 * n + 1) * (2 * k + 1)) * (n > k) for k in range(size)]
            for n in range(size)
        ]
    )
    p = np.sqrt(np.arange(size) + 0.5)
    normal = legs + np.outer(p, p)
    eigenvalues, vectors = (x.numpy() for x in hippo_normal(size))
    np.testing.assert_allclose(vectors @ np.diag(eigenvalues) @ vectors.conj().T, normal, atol=1e-10)
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(normal).imag), eigenvalues.imag, atol=1e-8)
    np.testing.assert_allclose(eigenvalues.real, -0.5)


def test_initial_parameters():
    config = tiny(hidden_size=64, state_size=96, num_blocks=3, c_init="lecun_normal", dt_min=1e-3, dt_max=1e-1)
    for c_init, variance in (("lecun_normal", 1 / 64), ("trunc_standard_normal", 1.0), ("complex_normal", 48.0)):
        config.c_init = c_init
        ssm = fresh_ssm(config)
        eigenvalues, vectors = hippo_normal(32)
        poles = torch.complex(ssm.Lambda_re, ssm.Lambda_im).view(3, 16)
        torch.testing.assert_close(poles, eigenvalues[:16].expand(3, 16).to(poles), rtol=1e-6, atol=1e-6)
        assert (poles.imag < 0).all()
        # B is real: with both halves of the eigenvectors, V B~ has no imaginary part and the variance 1 / P.
        b = torch.view_as_complex(ssm.B).view(3, 16, 64)
        b = 2 * (vectors[:, :16].to(b) @ b).real
        assert b.std().item() == pytest.approx((1 / 96) ** 0.5, rel=0.05)
        # per state; V's columns have unit length, and a state of P / 2 pairs sees real and imaginary draws
        c = torch.view_as_complex(ssm.C)
        scale = 1.0 if c_init == "complex_normal" else 2 * variance / 96
        assert c.abs().square().mean().item() == pytest.approx(scale, rel=0.1)
        assert ssm.D.std().item() == pytest.approx(1, rel=0.3)
        step = ssm.log_step.exp()
        assert step.min() >= 1e-3 * 0.999 and step.max() <= 1e-1 * 1.001
        assert ssm.log_step.mean().item() == pytest.approx(np.log(1e-2), abs=0.8)


# The decoder and norms included; 280K is what table 2 of the paper says for Speech Commands.
COUNTS = {
    "s5-lra-listops": 188362, "s5-lra-text": 1320898, "s5-lra-image": 5133706, "s5-lra-pathfinder": 1113602,
    "s5-lra-pathx": 694018, "s5-speech35": 283523, "s5-smnist": 138634, "s5-psmnist": 200970, "s5-scifar": 5134730,
}  # fmt: skip


@pytest.mark.parametrize("name", S5Config.presets)
def test_presets(name):
    config = S5Config.from_preset(name)
    with torch.device("meta"):
        model = S5ForSequenceClassification(config)
    inner, width, layers = config.state_size // 2, config.hidden_size, config.num_hidden_layers
    ssm = 3 * inner + 2 * inner * width * (3 if config.bidirectional else 2) + width
    blocks = layers * (ssm + width * (width + 1) + 2 * width)
    reads = config.vocab_size * width if config.input_size is None else (config.input_size + 1) * width
    count = sum(p.numel() for p in model.parameters())
    assert count == blocks + reads + (width + 1) * config.num_labels
    assert count == COUNTS.get(name, count)
    if name == "s5-speech35":
        assert round(blocks, -4) == 280_000
    assert S5Config.from_preset(name, num_hidden_layers=1).num_hidden_layers == 1


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="S5Config has no preset 's5-lra'; known: s5-lra-listops, s5-lra-text"):
        S5Config.from_preset("s5-lra")


# ---- the released package --------------------------------------------------------------------------------------------


def released(width=6, states=8, bidir=False, init="dense"):
    """A fresh S5 of s5-pytorch in float64, and ours with its weights. Its values stay those of float32: it rounds B."""
    s5 = pytest.importorskip("s5")
    torch.manual_seed(0)
    theirs = s5.S5(width, states, block_count=2, bidir=bidir, bcInit=init, dt_min=0.05, dt_max=0.5)
    theirs.seq.Lambda.data = theirs.seq.Lambda.data.to(torch.complex128)
    theirs.seq.C.data = theirs.seq.C.data.to(torch.complex128)
    for name in ("B", "D", "log_step"):
        getattr(theirs.seq, name).data = getattr(theirs.seq, name).data.double()
    ours = S5SSM(tiny(hidden_size=width, state_size=states, conj_sym=False, bidirectional=bidir)).double()
    c = torch.view_as_real(theirs.seq.C.data)
    weights = {"Lambda_re": theirs.seq.Lambda.real, "Lambda_im": theirs.seq.Lambda.imag, "B": theirs.seq.B}
    weights |= {"C1": c[:, :states], "C2": c[:, states:]} if bidir else {"C": c}
    ours.load_state_dict({**weights, "D": theirs.seq.D, "log_step": theirs.seq.log_step[:, None]})
    return theirs, ours


@pytest.mark.parametrize("init", ["dense", "complex_normal"])
@pytest.mark.parametrize("bidir", [False, True])
@torch.no_grad()
def test_equal_to_the_released_package(bidir, init):
    theirs, ours = released(bidir=bidir, init=init)
    u = torch.randn(3, 17, 6).double()
    for rescale in (1.0, 2.0):
        expected = theirs(u, step_scale=rescale)
        torch.testing.assert_close(ours(u, None, None, None, rescale)[0], expected, rtol=1e-7, atol=1e-9)


@torch.no_grad()
def test_equal_to_the_released_package_at_irregular_steps():
    theirs, ours = released()
    u, times = torch.randn(3, 17, 6).double(), torch.rand(3, 17).double() + 0.1
    expected, state = theirs(u, step_scale=times, return_state=True)
    y, final = ours(u, None, None, None, timesteps=times)
    torch.testing.assert_close(y, expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(final, state, rtol=1e-7, atol=1e-9)


@torch.no_grad()
def test_the_residual_is_not_normed():
    """S5Block of s5-pytorch adds the normed input back, in place of the input."""
    s5 = pytest.importorskip("s5.s5_model")
    torch.manual_seed(0)
    theirs = s5.S5Block(6, 8, bidir=False, block_count=2, bcInit="dense").eval()
    theirs.ff_dec.weight.zero_()  # what is left: ff_norm(norm(x) + gelu(s5(norm(x))))
    config = tiny(conj_sym=False, activation="gelu", hidden_act="gelu", norm_eps=1e-5)
    ours = S5Block(config, S5Mixer(config)).eval()
    seq, c = theirs.s5.seq, torch.view_as_real(theirs.s5.seq.C)
    poles = {"Lambda_re": seq.Lambda.real, "Lambda_im": seq.Lambda.imag}
    ours.mixer.ssm.load_state_dict({**poles, "B": seq.B, "C": c, "D": seq.D, "log_step": seq.log_step[:, None]})
    x = torch.randn(2, 7, 6) * 3 + 1
    y, _ = ours(x, {})
    expected = theirs(x)
    torch.testing.assert_close(theirs.ff_norm(y - x + theirs.attn_norm(x)), expected, rtol=1e-4, atol=1e-5)
    assert (theirs.ff_norm(y) - expected).abs().max() > 0.1


def misaligned(x):
    """A copy of `x` that lies at a multiple of its dtype's size, as in a safetensors file, but not of twice that."""
    copy = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    assert copy.data_ptr() % (2 * x.element_size())
    return copy


@torch.no_grad()
def test_weights_that_lie_anywhere():
    """A complex number in memory must lie at a multiple of its own size: a view of other weights ends the process."""
    model = fresh(S5Model, tiny())
    features = {"input_ids": torch.arange(10).view(2, 5), "step_rescale": 1.5}
    expected = model(**features).last_hidden_state
    for parameter in model.parameters():
        parameter.data = misaligned(parameter)
    assert torch.equal(model(**features).last_hidden_state, expected)
    timesteps = torch.ones(2, 5, dtype=torch.float64)
    torch.testing.assert_close(model(**features, timesteps=timesteps).last_hidden_state, expected, **CLOSE)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mlp_type", ["plain", "glu", "linear"])
@torch.no_grad()
def test_normed_residuals_and_mlps(mlp_type):
    """s5-pytorch's block; against the package itself in conversion/test_sources.py."""
    options = {
        "mlp_type": mlp_type,
        "mlp_ratio": 2,
        "normed_residual": True,
        "final_norm": False,
        "use_mlp_bias": False,
    }
    model = fresh(S5Model, tiny(**options, num_hidden_layers=1, input_size=6, input_projection=False))
    block, x = model.layers[0], torch.randn(2, 5, 6).double()
    normed = block.mixer_norm(x)
    x_mid = normed + block.mixer(normed, {}, None, None)[0]
    normed = block.mlp_norm(x_mid)
    up = normed @ block.mlp.up_proj.weight.T
    if mlp_type == "glu":
        up = up[..., :12] * F.gelu(up[..., 12:], approximate="tanh")
    elif mlp_type == "plain":
        up = F.gelu(up, approximate="tanh")
    expected = normed + up @ block.mlp.down_proj.weight.T
    torch.testing.assert_close(model(input_features=x).last_hidden_state, expected, **CLOSE)
    first = model(input_features=x[:, :2], use_cache=True)
    second = model(input_features=x[:, 2:], past_key_values=first.past_key_values).last_hidden_state
    torch.testing.assert_close(second, expected[:, 2:], **CLOSE)


BLOCK_OPTIONS = {
    "input_projection=False needs input_size = hidden_size = 6, got None": {"input_projection": False},
    "normed_residual=True needs prenorm=True": {"normed_residual": True, "prenorm": False},
    "mlp_type='glu' needs an MLP": {"mlp_type": "glu"},
}


@pytest.mark.parametrize("reason, options", BLOCK_OPTIONS.items())
def test_options_that_do_not_go_together(reason, options):
    with pytest.raises(StrictDataclassError, match=reason):
        tiny(**options)


@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "half_glu1", "half_glu2", "full_glu"])
@torch.no_grad()
def test_activations(activation, prenorm):
    config = tiny(activation=activation, prenorm=prenorm, num_hidden_layers=1, final_norm=False)
    model = fresh(S5Model, config)
    block = model.layers[0]
    x = torch.randn(2, 5, 6).double()
    y, _ = block.mixer.ssm(block.mixer_norm(x) if prenorm else x, None, None, None)
    g = F.gelu(y, approximate="tanh")
    z = {
        "gelu": lambda: g,
        "half_glu1": lambda: g * torch.sigmoid(block.mixer.out2(g)),
        "half_glu2": lambda: y * torch.sigmoid(block.mixer.out2(g)),
        "full_glu": lambda: block.mixer.out1(g) * torch.sigmoid(block.mixer.out2(g)),
    }[activation]()
    expected = x + z if prenorm else block.mixer_norm(x + z)
    torch.testing.assert_close(model(inputs_embeds=x).last_hidden_state, expected, **CLOSE)


def test_batch_norm_sees_real_positions_only():
    x = torch.randn(3, 7, 4).double() * 2 + 1
    mask = torch.rand(3, 7) < 0.6
    norm = S5BatchNorm(4, 1e-5, 0.1).double().train()
    peer = nn.BatchNorm1d(4, eps=1e-5, momentum=0.1).double().train()
    wild = torch.where(mask[..., None], x, torch.tensor(float("nan")).double())
    torch.testing.assert_close(norm(wild, mask)[mask], peer(x[mask]), **CLOSE)
    torch.testing.assert_close(norm.running_mean, peer.running_mean, **CLOSE)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * x[mask].var(0, unbiased=False), **CLOSE)
    before = norm.running_var.clone()
    assert norm(x, torch.zeros_like(mask)).isfinite().all()  # a batch of padding
    assert torch.equal(norm.running_var, before)
    peer.running_var.copy_(norm.running_var)
    torch.testing.assert_close(norm.eval()(x, mask), peer.eval()(x.transpose(1, 2)).transpose(1, 2), **CLOSE)
    torch.testing.assert_close(norm.train()(x, None), norm.train()(x, torch.ones_like(mask)), **CLOSE)


@torch.no_grad()
def test_statistics_and_means_of_long_rows_in_half_precision():
    """Their sums are far outside the range of float16, which ends at 65504."""
    torch.manual_seed(0)
    x, mask = 5 + 3 * torch.randn(1, 40000, 4), torch.ones(1, 40000, dtype=torch.bool)
    mask[0, 0] = False
    for training in (True, False):
        outputs = []
        for dtype in (torch.float16, torch.float32):
            norm = S5BatchNorm(4, eps=1e-5, momentum=0.5).to(dtype).train(training)
            outputs += [[norm(x.to(dtype), mask), norm.running_mean, norm.running_var]]
        for half, single in zip(*outputs, strict=True):
            assert half.dtype is torch.float16
            torch.testing.assert_close(half.float(), single, rtol=2e-3, atol=4e-3)
    mean = mean_token(x.half(), mask)
    assert mean.dtype is torch.float16
    torch.testing.assert_close(mean.float(), mean_token(x, mask), rtol=1e-3, atol=0)


def test_dropout_takes_whole_channels():
    y = ChannelDropout(0.5).train()(torch.ones(4, 9, 50))
    assert ((y == 0) | (y == 2)).all() and torch.equal(y, y[:, :1].expand_as(y))
    assert 0.3 < (y == 0).float().mean() < 0.7
    x = torch.randn(2, 3, 4)
    assert ChannelDropout(0.5).eval()(x) is x


# ---- bidirectional models and padding --------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("bidirectional", [True, False])
@torch.no_grad()
def test_padding_changes_nothing(bidirectional, pooling):
    """Features at irregular times with padding on the left, on the right and in between, and a row of padding."""
    config = tiny(input_size=3, bidirectional=bidirectional, pooling=pooling, norm="batch", num_labels=4)
    model = fresh(S5ForSequenceClassification, config)
    per_step = fresh(S5ForTokenClassification, config)
    x, times = torch.randn(4, 9, 3).double(), torch.rand(4, 9).double() + 0.1
    mask = torch.tensor(
        [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1, 0, 1, 0], [0] * 9]
    )
    times[mask == 0] = 0.0  # anything may stand at padding
    logits = model(input_features=x, attention_mask=mask, timesteps=times).logits
    steps = per_step(input_features=x, attention_mask=mask, timesteps=times).logits
    for row in range(3):
        real = mask[row] == 1
        alone = {"input_features": x[row, real][None], "timesteps": times[row, real][None]}
        torch.testing.assert_close(logits[row], model(**alone).logits[0], **CLOSE)
        torch.testing.assert_close(steps[row, real], per_step(**alone).logits[0], **CLOSE)
    assert logits.isfinite().all() and steps.isfinite().all()


@torch.no_grad()
def test_packed_documents_in_both_directions():
    model = fresh(S5Model, tiny(bidirectional=True))
    ids, times = torch.randint(0, 31, (1, 9)), torch.rand(1, 9).double() + 0.1
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    got = model(ids, position_ids=positions, timesteps=times).last_hidden_state
    alone = [model(ids[:, a:b], timesteps=times[:, a:b]).last_hidden_state for a, b in ((0, 4), (4, 7), (7, 9))]
    torch.testing.assert_close(got, torch.cat(alone, dim=1), **CLOSE)


def test_bidirectional_models_carry_no_state():
    model = fresh(S5Model, tiny(bidirectional=True))
    ids = torch.randint(0, 31, (1, 5))
    assert model(ids).past_key_values is None and model.layers[0].mixer.state_shapes == {}
    cache = fresh(S5Model, tiny())(ids, use_cache=True).past_key_values
    for arguments in ({"use_cache": True}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match="a bidirectional S5 has no state to carry on: use_cache must be False"):
            model(ids, **arguments)


# ---- heads -----------------------------------------------------------------------------------------------------------


def test_per_step_losses():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    x, real = torch.randn(2, 4, 3).double(), mask == 1
    for labels, options, loss in [
        (torch.tensor([[0, 2, -100, 1], [2, 1, 0, 0]]), {"num_labels": 3}, F.cross_entropy),
        (torch.randn(2, 4).double(), {"num_labels": 1}, F.mse_loss),
        (torch.randn(2, 4, 2).double(), {"num_labels": 2, "problem_type": "regression"}, F.mse_loss),
        (torch.randint(0, 2, (2, 4, 3)).double(), {"num_labels": 3}, F.binary_cross_entropy_with_logits),
    ]:
        model = fresh(S5ForTokenClassification, tiny(input_size=3, **options))
        out = model(input_features=x, attention_mask=mask, labels=labels)
        assert out.logits.shape == (2, 4, model.num_labels)
        targets = labels[real]
        if loss is F.mse_loss:
            targets = targets.view(len(targets), -1)
        torch.testing.assert_close(out.loss.double(), loss(out.logits[real], targets), rtol=1e-6, atol=1e-7)
        out.loss.backward()
        with pytest.raises(ValueError, match=r"labels must have the shape \(2, 4.* got \(2, 3"):
            model(input_features=x, labels=labels[:, :3])


@torch.no_grad()
def test_document_matching():
    model = fresh(S5ForDocumentMatching, tiny(bidirectional=True, num_labels=2))
    ids = torch.randint(0, 31, (3, 2, 7))
    mask = torch.ones_like(ids)
    mask[0, 1, 4:] = mask[2, 0, :3] = 0
    labels = torch.tensor([0, 1, 1])
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    for row in range(3):
        encode = [model.model(ids[row, i][mask[row, i] == 1][None]).last_hidden_state.mean(1) for i in (0, 1)]
        features = torch.cat([encode[0], encode[1], encode[0] - encode[1], encode[0] * encode[1]], dim=-1)
        expected = model.score(F.gelu(model.dense(features), approximate="tanh"))
        torch.testing.assert_close(out.logits[row], expected[0], **CLOSE)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, labels))
    with pytest.raises(ValueError, match=r"input_ids must hold pairs, with the shape \(batch, 2, ...\), got \(3, 7\)"):
        model(input_ids=ids[:, 0])


@pytest.mark.parametrize(
    "model_class", [S5Model, S5ForSequenceClassification, S5ForTokenClassification, S5ForDocumentMatching]
)
def test_round_trip(model_class, tmp_path):
    """Batch norm's running statistics included, and features in place of token ids."""
    config = tiny(
        input_size=3, bidirectional=True, norm="batch", final_norm=False, num_labels=3, c_init="complex_normal"
    )
    model = fresh(model_class, config, torch.float32)
    x = torch.randn((2, 2, 9, 3) if model_class is S5ForDocumentMatching else (2, 9, 3))
    model.train()(input_features=x)
    model.eval().save_pretrained(tmp_path)
    loaded, report = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(p, loaded.state_dict()[name]) for name, p in model.state_dict().items())
    assert torch.equal(loaded(input_features=x)[0], model(input_features=x)[0])
    assert loaded.main_input_name == "input_features"
    assert loaded.get_input_embeddings() is loaded.base_model.embed_features  # what LoRA and checkpointing hook into
    if model_class is S5ForTokenClassification:
        assert type(AutoModelForTokenClassification.from_pretrained(tmp_path)) is model_class
    if model_class is S5ForSequenceClassification:
        assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path)) is model_class


def train(model, steps, batch, lr=1e-2):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        loss = model(**batch()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize(
    "model_class, norm",
    [(S5ForSequenceClassification, "batch"), (S5ForTokenClassification, "layer"), (S5ForDocumentMatching, "batch")],
)
def test_one_batch_is_learnt(model_class, norm):
    config = tiny(
        hidden_size=16, initializer_range=None, input_size=3, bidirectional=True, norm=norm, num_labels=3,
        activation="full_glu",
    )  # fmt: skip
    torch.manual_seed(0)
    model = model_class(config)
    shape = {S5ForSequenceClassification: (8,), S5ForTokenClassification: (8, 10), S5ForDocumentMatching: (8,)}
    labels = torch.randint(0, 3, shape[model_class])
    x = torch.randn((8, 2, 10, 3) if model_class is S5ForDocumentMatching else (8, 10, 3))
    assert train(model, 80, lambda: {"input_features": x, "labels": labels}, lr=2e-2) < 0.1


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"no digits at {MNIST.name}")
def test_sequential_digits():
    """Rows of pixels of 7 x 7 digits, one after the other: a small model soon tells most of the unseen ones."""
    images = np.frombuffer(gzip.open(MNIST / "t10k-images-idx3-ubyte.gz").read(), np.uint8, offset=16)
    labels = np.frombuffer(gzip.open(MNIST / "t10k-labels-idx1-ubyte.gz").read(), np.uint8, offset=8)
    images = torch.tensor(images).view(-1, 7, 4, 7, 4).float().mean((2, 4)).view(-1, 49, 1) / 255
    labels = torch.tensor(labels).long()
    torch.manual_seed(0)
    config = S5Config.from_preset("s5-smnist", num_hidden_layers=2, hidden_size=32, state_size=32, hidden_dropout=0.0)
    model = S5ForSequenceClassification(config)

    def batch():
        chosen = torch.randint(0, 4000, (64,))
        return {"input_features": images[chosen], "labels": labels[chosen]}

    train(model, 120, batch, lr=1e-2)
    with torch.no_grad():
        predicted = model.eval()(input_features=images[-500:]).logits.argmax(-1)
    assert (predicted == labels[-500:]).float().mean() > 0.6


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"state_size": 7, "num_blocks": 1}, r"conj_sym needs an even number .* / num_blocks = 7 / 1 = 7"),
        ({"state_size": 6, "num_blocks": 2}, r"conj_sym needs an even number of states in each block, .* 6 / 2 = 3"),
        ({"state_size": 8, "num_blocks": 3}, "num_blocks must divide state_size, got num_blocks=3, state_size=8"),
        ({"dt_min": 0.2, "dt_max": 0.1}, "dt_min must not be above dt_max, got dt_min=0.2, dt_max=0.1"),
        ({"dt_min": 0}, "expected a finite number above 0, got 0"),
        ({"step_rescale": -1.0}, "expected a finite number above 0, got -1.0"),
        ({"input_size": 0}, "input_size must be None or at least 1, got 0"),
        ({"discretization": "euler"}, "'discretization' expected one of .*zoh.*, got euler"),
        ({"activation": "glu"}, "'activation' expected one of .*half_glu1.*, got glu"),
        ({"norm": "rms"}, "'norm' expected one of .*batch.*, got rms"),
        ({"c_init": "normal"}, "'c_init' expected one of .*lecun_normal.*, got normal"),
        ({"pooling": "max"}, "'pooling' expected one of .*mean.*, got max"),
    ],
    ids=str,
)
def test_impossible_configurations(options, message):
    with pytest.raises(StrictDataclassError, match=message):
        tiny(**options)


def test_odd_states_without_conjugate_symmetry():
    assert fresh_ssm(tiny(state_size=9, num_blocks=3, conj_sym=False)).states == 9


def test_a_language_model_reads_tokens_from_left_to_right():
    for options in ({"bidirectional": True}, {"input_size": 2}):
        with pytest.raises(ValueError, match="needs bidirectional=False and input_size=None, got bidirectional="):
            S5ForCausalLM(tiny(**options))


@torch.no_grad()
def test_generation_after_a_prompt_with_timesteps():
    model = fresh(S5ForCausalLM, tiny())
    ids, times = torch.randint(0, 31, (2, 5)), torch.rand(2, 5).double() + 0.1
    new = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match="generate takes no timesteps"):
        model.generate(ids, timesteps=times, **new)
    cache = model(ids[:, :4], timesteps=times[:, :4], use_cache=True).past_key_values
    tokens = model.generate(ids, past_key_values=cache, **new)
    for _ in range(3):
        steps = torch.cat([times[:, :4], torch.ones(2, ids.shape[1] - 4)], dim=1)
        ids = torch.cat([ids, model(ids, timesteps=steps).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(tokens, ids)


@pytest.mark.parametrize("model_class", [S5Model, S5ForSequenceClassification, S5ForTokenClassification])
def test_bad_inputs(model_class):
    tokens, features = fresh(model_class, tiny()), fresh(model_class, tiny(input_size=3))
    ids, x = torch.randint(0, 31, (2, 5)), torch.randn(2, 5, 3).double()
    for model, arguments, message in [
        (tokens, {"input_features": x}, r"reads token ids \(input_size=None\): pass input_ids, not input_features"),
        (features, {"input_ids": ids}, r"reads features \(input_size=3\): pass input_features, not input_ids"),
        (tokens, {"input_ids": x[..., 0]}, "input_ids must be integers .* got torch.float64"),
        (features, {"input_features": x.long()}, "input_features must be floats .* got torch.int64"),
        (features, {"input_features": x[..., :2]}, r"floats of the shape \(batch, length, 3\), .* \(2, 5, 2\)"),
        (features, {"input_features": x[:, :0]}, r"input_features is empty, with the shape \(2, 0, 3\)"),
        (features, {"input_features": x, "inputs_embeds": x}, "exactly one of input_ids, inputs_embeds or input_feat"),
        (features, {}, "exactly one of input_ids or inputs_embeds"),
        (tokens, {"input_ids": ids, "timesteps": torch.ones(2, 4)}, r"shape \(2, 5\), got \(2, 4\)"),
        (tokens, {"input_ids": ids, "timesteps": torch.zeros(2, 5)}, "timesteps must be finite and above 0, got 0.0"),
        (tokens, {"input_ids": ids, "timesteps": -torch.ones(2, 5)}, "timesteps must be finite and above 0, got -1.0"),
        (tokens, {"input_ids": ids, "timesteps": torch.full((2, 5), float("nan"))}, "above 0, got nan"),
        (tokens, {"input_ids": ids, "step_rescale": 0.0}, "step_rescale must be a finite number above 0, got 0.0"),
        (tokens, {"input_ids": ids, "step_rescale": float("inf")}, "a finite number above 0, got inf"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**arguments)


def test_labels_outside_the_classes():
    x = torch.randn(2, 5, 3)
    with pytest.raises(IndexError, match="labels holds the class 4, outside the 4 classes"):
        model = fresh(S5ForSequenceClassification, tiny(input_size=3, num_labels=4), torch.float32)
        model(input_features=x, labels=torch.tensor([0, 4]))
    with pytest.raises(IndexError, match="labels holds the class 4, outside the 4 classes"):
        model = fresh(S5ForTokenClassification, tiny(input_size=3, num_labels=4), torch.float32)
        model(input_features=x, labels=torch.full((2, 5), 4))


def test_heads_that_return_no_states():
    ids = torch.randint(0, 31, (2, 2, 5))
    for model_class, given in ((S5ForTokenClassification, ids[0]), (S5ForDocumentMatching, ids)):
        model = fresh(model_class, tiny())
        with pytest.raises(ValueError, match=f"{model_class.__name__} returns no states: use_cache must be False"):
            model(given, use_cache=True)
        assert torch.equal(model(given, use_cache=False).logits, model(given).logits)


def test_the_second_half_of_a_text_with_a_mask_for_all_of_it():
    model = fresh(S5ForTokenClassification, tiny(num_labels=3))
    ids, labels, mask = torch.randint(0, 31, (2, 8)), torch.randint(0, 3, (2, 8)), torch.ones(2, 8)
    mask[0, 6:] = 0
    cache = model.model(ids[:, :5], use_cache=True).past_key_values
    out = model(ids[:, 5:], attention_mask=mask, labels=labels[:, 5:], past_key_values=cache)
    labels[:, :5] = -100
    torch.testing.assert_close(out.loss, model(ids, attention_mask=mask, labels=labels).loss, **CLOSE)


def test_timesteps_compile():
    model = fresh(S5ForTokenClassification, tiny(input_size=3, bidirectional=True, num_labels=2, norm="batch")).train()
    x, times = torch.randn(2, 5, 3).double(), torch.rand(2, 5).double() + 0.1
    mask = torch.tensor([[1, 1, 1, 0, 1], [1] * 5])
    arguments = {"input_features": x, "timesteps": times, "attention_mask": mask, "step_rescale": 1.5}
    expected = model(**arguments).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**arguments).logits[mask == 1], expected[mask == 1], **CLOSE)
    torch._dynamo.reset()
