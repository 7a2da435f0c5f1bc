"""Every source: ours computes what the original computes, and the way back gives the same bits."""

import copy
import json

import numpy as np
import pytest
import torch
from gateloop_transformer import Transformer
from minGRU_pytorch.minLM import minLM
from references import longhorn_checkpoint, longhorn_config, longhorn_logits, s5_checkpoint, s5_logits
from s5.s5_model import S5SSM, S5Block
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
)

from hf_recurrent import LonghornForCausalLM, S5ForDocumentMatching
from hf_recurrent.conversion import convert
from hf_recurrent.conversion.flax_msgpack import read_msgpack, write_msgpack
from hf_recurrent.conversion.reading import read

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-7}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def assert_close(got, expected, own_error=0.0):
    """Largest deviation, in units of the largest logit where that is above 1; beyond what the original's own result is
    known to be off by."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    scale = max(1.0, expected.abs().max().item())
    assert (got - expected).abs().max().item() <= TOLERANCES[got.dtype] * scale + own_error


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype and torch.equal(got[name], x), name


def spread(module: nn.Module) -> nn.Module:
    """Norms and biases that are not 1 and 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1 and not parameter.is_complex():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def ids(vocab=31):
    return torch.randint(0, vocab, (2, 17))


@each_dtype
@pytest.mark.parametrize("lstm", [False, True])
@pytest.mark.parametrize("conv", [0, 3, 4])
@pytest.mark.parametrize("expansion, ff_mult", [(1.0, 4), (1.5, 1.5)])
@torch.no_grad()
def test_minlm(dtype, lstm, conv, expansion, ff_mult, tmp_path):
    sizes = {"num_tokens": 31, "dim": 12, "depth": 2, "expansion": expansion, "ff_mult": ff_mult, "use_lstm": lstm}
    original = spread(minLM(**sizes, enable_conv=conv > 0, conv_kernel_size=conv or 3)).to(dtype)
    torch.save(original.state_dict(), tmp_path / "minlm.pt")
    report = convert(tmp_path / "minlm.pt", tmp_path / "ours")
    assert report.model_class == ("MinLSTMForCausalLM" if lstm else "MinGRUForCausalLM")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_close(ours(x := ids()).logits, original(x))
    convert(tmp_path / "ours", tmp_path / "back.pt", to_format="mingru-pytorch")
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), original.state_dict())


GATELOOP = [
    {},
    {"gate_loop_heads": 3, "ff_mult": 2},
    {"sub_ln": True, "post_ln_norm": True, "gate_loop_heads": 4},
    {"dim_gate_looped_attn": 18, "gate_loop_heads": 6, "attn_add_swish_gating": False},
    {"attn_add_swish_gating": False, "sub_ln": True, "gate_loop_heads": 1},
]


@each_dtype
@pytest.mark.parametrize("options", GATELOOP)
@torch.no_grad()
def test_gateloop_transformer(dtype, options, tmp_path):
    original = spread(Transformer(12, num_tokens=31, depth=2, **options)).to(dtype)
    torch.save(original.state_dict(), tmp_path / "original.pt")
    convert(tmp_path / "original.pt", tmp_path / "ours")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    # The phase of a transition near 0 has few digits: how far off the original itself is in float32, float64 shows.
    x = ids()
    expected, exact = original(x), copy.deepcopy(original).double()(x)
    assert_close(ours(x).logits, expected, own_error=(expected - exact).abs().max().item())
    assert_close(copy.deepcopy(ours).double()(x).logits, exact)
    convert(tmp_path / "ours", tmp_path / "back.pt", to_format="gateloop-transformer")
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), original.state_dict())


def save_longhorn(folder, tensors, config):
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_tied", [True, False])
@torch.no_grad()
def test_official_longhorn(dtype, bias, is_tied, tmp_path):
    tensors = longhorn_checkpoint(bias=bias, dtype=dtype)
    config = longhorn_config(tie_embeddings=is_tied, d_state=3)
    config["ssm_cfg"]["bias"] = bias
    if not is_tied:
        tensors["lm_head.weight"] = torch.randn_like(tensors["lm_head.weight"])
    save_longhorn(tmp_path / "original", tensors, config)
    convert(tmp_path / "original", tmp_path / "ours")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert (ours.config.vocab_size, ours.config.tie_word_embeddings) == (24, is_tied)  # padded from 22
    assert_close(ours(x := ids(22)).logits, longhorn_logits(tensors, x))
    convert(tmp_path / "ours", tmp_path / "back", to_format="longhorn")
    assert_same(torch.load(tmp_path / "back" / "pytorch_model.bin", weights_only=True), tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


@pytest.mark.parametrize("prefix", ["transformer.", "_orig_mod.transformer.", "module._orig_mod.transformer."])
def test_longhorns_training_checkpoint(prefix, tmp_path):
    tensors = longhorn_checkpoint()
    checkpoint = {
        "model": {prefix + name: x for name, x in tensors.items()},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
        "model_config": longhorn_config() | {"d_state": 3},
        "iter_num": 7,
    }
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    report = convert(tmp_path / "ckpt.pt", tmp_path / "ours")
    assert report.left_out == ["optimizer", "iter_num"]
    convert(tmp_path / "ours", tmp_path / "back", to_format="longhorn")
    assert_same(torch.load(tmp_path / "back" / "pytorch_model.bin", weights_only=True), tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == checkpoint["model_config"]


S5 = {
    "half_glu1": ({}, {}),
    "half_glu2-bilinear-post": ({}, {"activation": "half_glu2", "discretization": "bilinear", "prenorm": False}),
    "full_glu-layer-last": ({"glu": ("out1", "out2"), "batch": False}, {"activation": "full_glu", "pooling": "last"}),
    "gelu-whole": ({"glu": ()}, {"activation": "gelu", "conj_sym": False}),
    "bidirectional-clipped": ({"bidirectional": True}, {"clip_eigs": True}),
    "bidirectional-complex": ({"bidirectional": True, "complex_normal": True}, {}),
    "retrieval": ({"retrieval": True}, {}),
    "retrieval-bidirectional": ({"retrieval": True, "bidirectional": True}, {"activation": "half_glu2"}),
}


@each_dtype
@pytest.mark.parametrize("sizes, options", S5.values(), ids=S5)
@pytest.mark.parametrize("suffix", ["msgpack", "npz"])
@torch.no_grad()
def test_official_s5(dtype, sizes, options, suffix, tmp_path):
    tensors = s5_checkpoint(**sizes, dtype=dtype)
    if options.get("clip_eigs"):
        tensors["params/encoder/layers_0/seq/Lambda_re"][0] = 0.3
    file, back = tmp_path / f"original.{suffix}", tmp_path / f"back.{suffix}"
    write, load = writer(suffix)
    write(file, tensors)
    given = {name.replace("_", "-"): str(value).lower() for name, value in options.items()}
    if given.get("activation") in ("full_glu", "gelu"):
        del given["activation"]  # the tensors say it
    report = convert(file, tmp_path / "ours", options=given, assume_defaults=True)
    head = S5ForDocumentMatching if sizes.get("retrieval") else AutoModelForSequenceClassification
    ours = head.from_pretrained(tmp_path / "ours")
    assert type(ours).__name__ == report.model_class
    assert AutoModel.from_pretrained(tmp_path / "ours").dtype == dtype
    x = torch.randn(3, 2, 9, 3, dtype=dtype) if sizes.get("retrieval") else torch.randn(3, 9, 3, dtype=dtype)
    assert_close(ours(input_features=x).logits, s5_logits(tensors, x, **options))
    convert(tmp_path / "ours", back, to_format="s5")
    assert_same(load(back), tensors)


def writer(suffix):
    if suffix == "msgpack":
        return write_msgpack, lambda path: {name: tensor() for name, tensor in read(path).tensors.items()}
    return (
        lambda path, tensors: np.savez_compressed(path, **{name: x.numpy() for name, x in tensors.items()}),
        lambda path: {name: torch.from_numpy(x) for name, x in np.load(path).items()},
    )


def test_flaxs_training_state(tmp_path):
    """`to_bytes` of the whole state, with the optimiser's; the nested dicts are those of flax."""
    tensors = s5_checkpoint()
    extra = {"step": torch.tensor(3, dtype=torch.int32), "opt_state/0/mu": torch.ones(2)}
    write_msgpack(tmp_path / "state.msgpack", tensors | extra)
    tree = read_msgpack(tmp_path / "state.msgpack")
    assert tree["params"]["encoder"]["layers_1"]["seq"]["B"].shape == (4, 6, 2)
    report = convert(tmp_path / "state.msgpack", tmp_path / "ours", assume_defaults=True)
    assert report.left_out == ["step", "opt_state"]
    assert report.assumed["discretization"] == "zoh" and "norm" not in report.assumed


def in_double(block, dtype):
    """The released block casts its B to complex64, whatever its other tensors are."""
    block = block.to(dtype)
    for module in block.modules():
        if isinstance(module, S5SSM):
            wide = torch.complex128 if dtype == torch.float64 else torch.complex64
            module.Lambda, module.C = (nn.Parameter(x.detach().to(wide)) for x in (module.Lambda, module.C))
            module.get_BC_tilde = lambda module=module: (torch.view_as_complex(module.B), module.C)
    return block


@each_dtype
@pytest.mark.parametrize("stack", [None, "", "blocks.layers."])
@pytest.mark.parametrize("bidirectional, glu, ff_mult", [(False, True, 1.0), (True, False, 1.5)])
@torch.no_grad()
def test_s5_pytorch(dtype, stack, bidirectional, glu, ff_mult, tmp_path):
    make = lambda: spread(S5Block(6, 4, bidirectional, block_count=2, ff_mult=ff_mult, glu=glu))  # noqa: E731
    blocks = nn.Sequential(*(in_double(make(), dtype) for _ in range(1 if stack is None else 2)))
    tensors = blocks[0].state_dict() if stack is None else blocks.state_dict(prefix=stack)
    torch.save(tensors, tmp_path / "original.pt")
    convert(tmp_path / "original.pt", tmp_path / "ours", options={"liquid": "false", "degree": "1"})
    ours = AutoModel.from_pretrained(tmp_path / "ours")
    x = torch.randn(2, 9, 6, dtype=dtype)
    assert_close(ours(input_features=x).last_hidden_state, blocks(x))
    convert(tmp_path / "ours", tmp_path / "back.pt", to_format="s5-pytorch")
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), tensors)


@torch.no_grad()
def test_a_mamba_as_warm_start(tmp_path):
    sizes = {"vocab_size": 31, "hidden_size": 12, "state_size": 3, "num_hidden_layers": 2, "time_step_rank": 2}
    mamba = MambaForCausalLM(MambaConfig(**sizes, bos_token_id=3, eos_token_id=4, pad_token_id=5))
    mamba.save_pretrained(tmp_path / "mamba")
    report = convert(tmp_path / "mamba", tmp_path / "ours", from_format="transformers-mamba")
    ours = LonghornForCausalLM.from_pretrained(tmp_path / "ours")
    assert (ours.config.state_size, ours.config.dt_rank, ours.config.eos_token_id) == (3, 2, 4)
    theirs = mamba.state_dict()
    mixer, other = ours.model.layers[1].mixer, mamba.backbone.layers[1].mixer
    for name in ("in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "D", "out_proj.weight"):
        assert torch.equal(mixer.get_parameter(name), other.get_parameter(name)), name
    assert torch.equal(ours.lm_head.weight, mamba.backbone.embeddings.weight)
    assert {name.split("mixer.")[1] for name in report.fresh} == {"dt_head.weight", "dt_head.bias"}
    assert {name.split("mixer.")[1] for name in report.dropped} == {"A_log", "dt_proj.weight", "dt_proj.bias"}
    assert len(report.fresh) + len(report.dropped) == 10 and set(report.dropped) < set(theirs)
    assert (mixer.dt_head.bias == 0).all() and 0.3 < mixer.dt_head.weight.std() < 1.2
    again = tmp_path / "again"
    convert(tmp_path / "mamba", again, from_format="transformers-mamba")
    assert_same(LonghornForCausalLM.from_pretrained(again).state_dict(), ours.state_dict())
    convert(tmp_path / "mamba", again, from_format="transformers-mamba", seed=1, overwrite=True)
    other = LonghornForCausalLM.from_pretrained(again).model.layers[1].mixer
    assert not torch.equal(other.dt_head.weight, mixer.dt_head.weight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@torch.no_grad()
def test_the_results_dtype(dtype, tmp_path):
    original = minLM(num_tokens=31, dim=12, depth=1)
    torch.save(original.state_dict(), tmp_path / "minlm.pt")
    assert convert(tmp_path / "minlm.pt", tmp_path / "ours", dtype=dtype).dtype == dtype
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.dtype == getattr(torch, dtype)
    assert torch.equal(ours.lm_head.weight, original.to_logits.weight.to(ours.dtype))
    if dtype == "float64":  # where the original's norms have another epsilon
        with pytest.raises(ValueError, match="cannot say norm_eps"):
            convert(tmp_path / "ours", tmp_path / "back.pt", to_format="mingru-pytorch")
        dtype = "float32"
    convert(tmp_path / "ours", tmp_path / "back.pt", to_format="mingru-pytorch", dtype=dtype)
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["norm.weight"].dtype == getattr(torch, dtype)
    assert torch.equal(back["to_logits.weight"], original.to_logits.weight.to(getattr(torch, dtype)))


def test_sharded_in_and_out(tmp_path):
    """From an index and shards to an index and shards, with the same weights as in one file."""
    tensors = longhorn_checkpoint()
    save_longhorn(tmp_path / "whole", tensors, longhorn_config())
    save_longhorn(tmp_path / "sharded", {}, longhorn_config())
    names, weight_map = sorted(tensors), {}
    for i in range(3):
        part = {name: tensors[name] for name in names[i::3]}
        torch.save(part, tmp_path / "sharded" / f"part-{i}.bin")
        weight_map |= dict.fromkeys(part, f"part-{i}.bin")
    (tmp_path / "sharded" / "pytorch_model.bin").unlink()
    (tmp_path / "sharded" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(tmp_path / "whole", tmp_path / "one")
    report = convert(tmp_path / "sharded", tmp_path / "many", max_shard_size="4KB")
    assert sum(file.endswith(".safetensors") for file in report.files) > 2
    one, many = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many"))
    assert_same(many.state_dict(), one.state_dict())
    convert(tmp_path / "many", tmp_path / "back", to_format="longhorn")
    assert_same(torch.load(tmp_path / "back" / "pytorch_model.bin", weights_only=True), tensors)
