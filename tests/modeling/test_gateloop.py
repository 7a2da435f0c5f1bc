"""GateLoop against its paper's equations, its surrogate attention, and the released package gateloop-transformer."""

import math

import pytest
import torch
from families import causal_lm, states, token_ids
from gateloop_transformer import Transformer
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from hf_recurrent import GateLoopConfig, GateLoopForCausalLM, GateLoopForSequenceClassification
from hf_recurrent.modeling.gateloop import GateLoopMixer
from hf_recurrent.scan import gateloop_heads_scan

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SIZES = {"vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2}
# Every way to make a transition, with heads of 1, 2, 6 and 12 channels among them.
TRANSITIONS = [
    {"transition": transition, "complex_transition": complex_transition, "data_controlled": data_controlled}
    | {"num_heads": num_heads, "magnitude_activation": magnitude, "phase_activation": phase}
    for transition in ("polar", "cartesian")
    for complex_transition in (True, False)
    for data_controlled in (True, False)
    for num_heads, magnitude, phase in [
        (None, "sigmoid", "identity"),
        (6, "exponential", "tanh"),
        (2, "sigmoid", "tanh"),
        (1, "exponential", "identity"),
    ]
]
each_transition = pytest.mark.parametrize("options", TRANSITIONS, ids=lambda o: "-".join(map(str, o.values())))


def mixer_of(**options):
    mixer = GateLoopMixer(GateLoopConfig(**{**SIZES, **options}))
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer.double()


def transition_by_definition(mixer, config, x):
    """(heads, d_h), or (heads, 1) with a cartesian transition, complex, for one token's x."""
    given = mixer.transition if mixer.transition_proj is None else mixer.transition_proj(x)
    f = {"sigmoid": torch.sigmoid, "exponential": lambda u: (-u.exp()).exp()}[config.magnitude_activation]
    g = {"identity": lambda u: u, "tanh": lambda u: math.pi * u.tanh()}[config.phase_activation]
    if config.transition == "polar":
        alpha, *beta = given.view(-1, config.recurrent_size)
        a = f(alpha) * torch.exp(1j * g(beta[0]) if beta else torch.zeros_like(alpha))
        return a.view(mixer.num_heads, -1) + 0j
    if config.complex_transition:
        a = [f(abs(torch.complex(re, im))) * torch.exp(1j * g(torch.atan2(im, re))) for re, im in given.view(-1, 2)]
    else:
        a = [f(c.abs()) * (1 if c >= 0 else -1) + 0j for c in given]
    return torch.stack(a)[:, None]


def mixer_by_definition(mixer, config, x, state, mask, reset):
    """Token by token and head by head, after the paper's section 3.2: y before norm and gate, and the last state."""
    heads, size = mixer.num_heads, mixer.head_size
    outputs = []
    for row, h, real, first in zip(x, state, mask, reset, strict=True):
        for token, is_real, is_first in zip(row, real, first, strict=True):
            q, k, v = mixer.in_proj(token).view(3, heads, size)
            a = transition_by_definition(mixer, config, token)
            if is_real:
                past = torch.zeros_like(h) if is_first else h
                h = torch.stack([a[n][:, None] * past[n] + torch.outer(k[n], v[n]) for n in range(heads)])
            outputs.append(torch.cat([(q[n] + 0j) @ h[n] for n in range(heads)]).real)
    return torch.stack(outputs).view(*x.shape[:2], -1)


def inputs(batch, length, heads, size, complex_state):
    """x, an initial state, a mask and a reset."""
    x = torch.randn(batch, length, 12, dtype=torch.double)
    state = torch.randn(batch, heads, size, size, dtype=torch.complex128 if complex_state else torch.double)
    return x, state, torch.rand(batch, length) < 0.7, torch.rand(batch, length) < 0.2


@each_transition
@torch.no_grad()
def test_the_mixer_computes_the_papers_equations(options):
    config = GateLoopConfig(**SIZES, **options)
    mixer = mixer_of(**options, use_gate=False)
    x, state, mask, reset = inputs(2, 7, mixer.num_heads, mixer.head_size, config.complex_transition)
    y, new_state = mixer(x, {"recurrent": state}, mask, reset)
    expected = mixer_by_definition(mixer, config, x, state + 0j, mask, reset)
    torch.testing.assert_close(y, expected, **CLOSE)
    assert new_state["recurrent"].dtype == state.dtype and new_state["recurrent"].shape == state.shape


@each_transition
def test_the_surrogate_attention_times_v_is_the_output(options):
    """With padding and documents, and with the same gradients."""
    mixer = mixer_of(**options, use_gate=False)
    x, _, mask, reset = inputs(2, 7, 1, 1, False)
    x.requires_grad_()
    y, _, attentions = mixer(x, {}, mask, reset, output_attentions=True)
    assert attentions.shape == (2, mixer.num_heads, 7, 7)
    assert (attentions.triu(1) == 0).all()
    assert (attentions[~mask[:, None, None].expand_as(attentions)] == 0).all()  # nothing looks at padding
    document = (reset & mask).cumsum(1)
    apart = document[:, None, :, None] != document[:, None, None, :]
    assert (attentions[apart.expand_as(attentions)] == 0).all()  # nor into another document
    v = mixer.in_proj(x)[..., 24:].unflatten(-1, (mixer.num_heads, mixer.head_size)).transpose(1, 2)
    product = (attentions @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(product, y, **CLOSE)
    weights = torch.randn_like(y)
    expected = torch.autograd.grad((y * weights).sum(), x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad((product * weights).sum(), x), expected, **CLOSE)


@pytest.mark.parametrize("num_heads", [None, 2])
@torch.no_grad()
def test_the_surrogate_attention_by_its_formula(num_heads):
    mixer = mixer_of(num_heads=num_heads)
    x = torch.randn(1, 6, 12, dtype=torch.double)
    *_, attentions = mixer(x, {}, None, None, output_attentions=True)
    q, k, _ = mixer.in_proj(x)[0].unflatten(-1, (3, mixer.num_heads, -1)).unbind(1)
    a = mixer.transitions(mixer.transition_proj(x), torch.double)[0]
    for t in range(6):
        for j in range(t + 1):
            expected = (q[t] * a[j + 1 : t + 1].prod(0) * k[j]).real.sum(-1)
            torch.testing.assert_close(attentions[0, :, t, j], expected, **CLOSE)


@pytest.mark.parametrize("scale", [300.0, -300.0])
@torch.no_grad()
def test_transitions_at_their_limits_stay_finite(scale):
    """|a| that rounds to 0 and to 1, over many tokens: nothing is divided by a product of transitions."""
    mixer = mixer_of(num_heads=3).float()
    mixer.transition_proj.bias.fill_(scale)
    x = torch.randn(1, 200, 12)
    y, _, attentions = mixer(x, {}, None, None, output_attentions=True)
    assert y.isfinite().all() and attentions.isfinite().all()
    far = attentions[0, :, 150:, :50].abs().max()
    assert far > 0.1 if scale > 0 else far == 0


def test_gradients_of_transitions_that_all_but_vanish():
    """|a| below the least normal number, which strong forgetting comes to."""
    mixer = mixer_of(num_heads=3, magnitude_activation="exponential").float()
    mixer.transition_proj.bias.data.fill_(4.55)
    y, _ = mixer(torch.randn(1, 5, 12) / 100, {}, None, None)
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in mixer.parameters())


@pytest.mark.parametrize("num_heads", [4, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"use_sub_ln": True},
        {"transition": "cartesian", "phase_activation": "tanh", "use_gate": False},
        {"complex_transition": False, "data_controlled": False, "magnitude_activation": "exponential"},
    ],
    ids=str,
)
def test_gradients(num_heads, options):
    mixer = mixer_of(hidden_size=4, num_heads=num_heads, **options)
    config = mixer.config
    x = torch.randn(2, 4, 4, dtype=torch.double, requires_grad=True)
    dtype = torch.complex128 if config.complex_transition else torch.double
    state = torch.randn(2, *mixer.state_shapes["recurrent"], dtype=dtype, requires_grad=True)
    mask, reset = torch.rand(2, 4) < 0.8, torch.rand(2, 4) < 0.2

    def run(x, state, *parameters):
        named = dict(zip(dict(mixer.named_parameters()), parameters, strict=True))
        y, new = torch.func.functional_call(mixer, named, (x, {"recurrent": state}, mask, reset))
        return y, new["recurrent"]

    assert torch.autograd.gradcheck(run, (x, state, *mixer.parameters()))


@torch.no_grad()
def test_heads_of_other_values_than_keys():
    """The scan takes any d_k and d_v, and transitions of any of the shapes that it names."""
    q, k = torch.randn(2, 2, 5, 3, 4, dtype=torch.double)
    a = torch.polar(torch.rand(2, 5, 3, 4, dtype=torch.double), torch.randn(2, 5, 3, 4, dtype=torch.double))
    for columns in (1, 2):
        v = torch.randn(2, 5, 3, columns, dtype=torch.double)
        for shared in (a, a[:1], a[:, :1], a[..., :1], a[:1, :1, :, :1]):
            h, outputs = torch.zeros(2, 3, 4, columns, dtype=torch.complex128), []
            for t, at in enumerate(shared.expand(2, 5, 3, 4).unbind(1)):
                h = at[..., None] * h + k[:, t, :, :, None] * v[:, t, :, None]
                outputs.append((q[:, t, :, :, None] * h).sum(-2).real)
            y, final = gateloop_heads_scan(q, k, v, shared)
            torch.testing.assert_close(y, torch.stack(outputs, dim=1), **CLOSE)
            torch.testing.assert_close(final, h, **CLOSE)


def weights_of(released, post_norm):
    """The released model's weights by our names."""
    renamed = {"model.embed_tokens": released.token_emb, "lm_head": released.to_logits}
    if not post_norm:
        renamed |= {"model.norm": released.to_logits[0], "lm_head": released.to_logits[1]}
    for i, (mixing, mlp) in enumerate(released.layers):
        parts = {
            "mixer_norm": mixing.norm,
            "mixer.in_proj": mixing.fn.to_qkv,
            "mixer.transition_proj": mixing.fn.to_a[0],
        }
        parts |= {"mlp_norm": mlp.norm, "mlp.up_proj": mlp.fn[0], "mlp.down_proj": mlp.fn[2]}
        parts |= {"mixer.sub_ln": mixing.fn.maybe_sub_ln, "mixer.out_proj": mixing.fn.to_out}
        if mixing.fn.to_gates is not None:
            parts["mixer.gate_proj"] = mixing.fn.to_gates[0]
        renamed |= {f"model.layers.{i}.{name}": module for name, module in parts.items()}
    weights = {f"{name}.{key}": x for name, module in renamed.items() for key, x in module.state_dict().items()}
    return {name.replace(".gamma", ".weight"): x for name, x in weights.items()}


@pytest.mark.parametrize("heads", [None, 1, 3, 6])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"post_norm": True, "use_sub_ln": True},
        {"use_gate": False, "use_sub_ln": True, "expansion": 1.5},
        {"post_norm": True, "use_gate": False, "complex_transition": False},
        {"complex_transition": False, "expansion": 0.5},
    ],
    ids=str,
)
def test_the_language_model_equals_the_released_one(heads, options):
    config = GateLoopConfig(**SIZES, transition="cartesian", num_heads=heads, use_bias=True, mlp_ratio=4, **options)
    # The released RMSNorm has no epsilon (1e-12 below the norm itself), its LayerNorms have PyTorch's own.
    config.norm_eps = 1e-5 if config.post_norm else 1e-30
    torch.manual_seed(0)
    released = Transformer(
        12,
        num_tokens=31,
        depth=2,
        gate_loop_heads=heads,
        dim_gate_looped_attn=config.recurrent_size,
        attn_add_swish_gating=config.use_gate,
        sub_ln=config.use_sub_ln,
        post_ln_norm=config.post_norm,
        ablate_complex=not config.complex_transition,
        frac_gradient_state_transition=1.0,  # it scales a gradient, no value
    ).double()
    with torch.no_grad():
        for name, parameter in released.named_parameters():
            if "norm" in name or "sub_ln" in name or "gamma" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model = causal_lm(config)
    weights = weights_of(released, config.post_norm)
    for name, parameter in model.named_parameters():  # which the released model has not
        if ".mixer." in name and name.endswith("_proj.bias") and "transition" not in name:
            weights[name] = torch.zeros_like(parameter)
        elif name.endswith("transition_proj.weight") or name.endswith("transition_proj.bias"):
            # [real, imaginary] interleaved per head; without the imaginary part, every second row
            weights[name] = weights[name][:: 1 if config.complex_transition else 2]
    model.load_state_dict(weights)
    input_ids = token_ids(config, 2, 20)
    logits, expected = model(input_ids).logits, released(input_ids)
    torch.testing.assert_close(logits, expected, rtol=1e-7, atol=1e-10)
    logits.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(
        model.model.embed_tokens.weight.grad, released.token_emb.weight.grad, rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("options", [{}, {"num_heads": 2}, {"complex_transition": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_state_is_wide_under_autocast_and_in_half_precision(options, dtype):
    config = GateLoopConfig(**SIZES, **options)
    wide = torch.complex64 if config.complex_transition else torch.float32
    input_ids = token_ids(config, 2, 9)
    for half in (False, True):
        model = causal_lm(config, dtype if half else torch.float32)
        with torch.autocast("cpu", dtype, enabled=not half):
            out = model(input_ids, use_cache=True, output_attentions=True)
        assert all(state.dtype is wide for state in states(out.past_key_values))
        assert out.logits.dtype is dtype and all(x.dtype is torch.float32 for x in out.attentions)
        assert out.logits.isfinite().all()


def test_post_norm_and_half_precision_weights():
    config = GateLoopConfig(**SIZES, post_norm=True, use_sub_ln=True)
    model = causal_lm(config, torch.bfloat16)
    input_ids = token_ids(config, 2, 9)
    out = model(input_ids, labels=input_ids, output_hidden_states=True)
    out.loss.backward()
    assert [x.dtype for x in out.hidden_states] == [torch.float32] * 2 + [torch.bfloat16]
    assert all(p.grad.dtype is torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())
    assert not any(name.startswith("model.norm.") for name in model.state_dict())


def test_attentions_of_the_models():
    config = GateLoopConfig(**SIZES, num_heads=3, num_labels=2)
    input_ids = token_ids(config, 2, 5)
    for model in (GateLoopForCausalLM(config), GateLoopForSequenceClassification(config)):
        assert model(input_ids).attentions is None
        out = model(input_ids, output_attentions=True)
        assert [x.shape for x in out.attentions] == [(2, 3, 5, 5)] * 2
        as_tuple = model(input_ids, output_attentions=True, return_dict=False)
        assert all(torch.equal(x, y) for x, y in zip(as_tuple[-1], out.attentions, strict=True))
        config.output_attentions = True
        assert len(model(input_ids).attentions) == 2
        assert model(input_ids, output_attentions=False).attentions is None
        config.output_attentions = False


def test_parameter_counts():
    """The paper gives 125M for WikiText-103; GPT-2's vocabulary with separate embeddings comes to 123.5M."""
    with torch.device("meta"):
        model = GateLoopForCausalLM(GateLoopConfig.from_preset("gateloop-wikitext103-125m"))
    d, inner, vocabulary = 624, 1872, 50257
    layer = 3 * d * d + (2 * d * d + 2 * d) + 2 * d * d + 2 * d * inner + 2 * d
    count = sum(p.numel() for p in model.parameters())
    assert count == 2 * vocabulary * d + 12 * layer + d
    assert count == pytest.approx(125e6, rel=0.02)


def test_presets():
    config = GateLoopConfig.from_preset("gateloop-memory-horizon", vocab_size=9, hidden_dropout=0.1)
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (64, 4, 128)
    assert (config.vocab_size, config.hidden_dropout) == (9, 0.1)
    with pytest.raises(ValueError, match="GateLoopConfig has no preset 'gateloop-1b'.*: gateloop-wikitext103-125m, "):
        GateLoopConfig.from_preset("gateloop-1b")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_heads": 5}, r"num_heads must divide expansion \* hidden_size = 12, got 5"),
        ({"num_heads": 12, "expansion": 0.5}, r"num_heads must divide expansion \* hidden_size = 6, got 12"),
        ({"num_heads": 0}, "expected an integer of at least 1, got 0"),
        ({"num_heads": 2.0}, "num_heads"),
        ({"transition": "polar_linear"}, "'transition' expected one of .*'polar', 'cartesian'.*, got polar_linear"),
        ({"magnitude_activation": "tanh"}, "'magnitude_activation' expected one of .*'sigmoid', 'exponential'"),
        ({"phase_activation": "none"}, "'phase_activation' expected one of .*'identity', 'tanh'"),
        ({"data_controlled": 1}, "'data_controlled'"),
        ({"sub_ln_eps": 0}, "expected a finite number above 0, got 0"),
    ],
    ids=str,
)
def test_bad_configurations(options, message):
    with pytest.raises(StrictDataclassError, match=message):
        GateLoopConfig(**SIZES, **options)


def test_a_cache_of_other_heads():
    cache = causal_lm(GateLoopConfig(**SIZES))(torch.ones(1, 3, dtype=torch.long), use_cache=True).past_key_values
    model = causal_lm(GateLoopConfig(**SIZES, num_heads=2))
    with pytest.raises(ValueError, match=r"layer 0 has the shapes \{'recurrent': \(12, 1, 1\)\}"):
        model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)


def test_a_real_state_in_a_complex_model():
    real, complex_ = (causal_lm(GateLoopConfig(**SIZES, complex_transition=c), torch.float32) for c in (False, True))
    cache = real(torch.ones(1, 3, dtype=torch.long), use_cache=True).past_key_values
    with pytest.raises(TypeError, match="layer 0 has torch.float32, .* expects torch.complex64"):
        complex_(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)
