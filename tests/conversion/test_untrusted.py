"""Files from strangers: whatever they hold, nothing is run, nothing is written, and one line says why."""

import io
import json
import os
import pickle
import zipfile

import msgpack
import numpy as np
import pytest
import torch
from references import longhorn_checkpoint, longhorn_config, s5_checkpoint

from hf_recurrent.conversion import convert
from hf_recurrent.conversion.flax_msgpack import write_msgpack


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def refused(tmp_path):
    """Convert a file or folder; returns the one line of the refusal, after which nothing is there."""

    def call(source, **kwargs):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError) as caught:
            convert(source, tmp_path / "dest", **kwargs)
        assert sorted(tmp_path.rglob("*")) == before
        message = str(caught.value)
        assert "\n" not in message and str(source) in message and len(message) < 1000
        return message

    return call


def saved(path, tensors):
    torch.save(tensors, path)
    return path


def npz(path, arrays, **kwargs):
    np.savez(path, **arrays, **kwargs)
    return path


# ---- code ------------------------------------------------------------------------------------------------------------


def test_a_pickle_payload_is_not_run(refused, tmp_path):
    target = tmp_path / "owned"
    for number, tree in enumerate((Payload(target), longhorn_checkpoint() | {"x": Payload(target)})):
        assert "could run code" in refused(saved(tmp_path / f"{number}.pt", tree))
    path = tmp_path / "legacy.pt"  # a bare pickle, as before PyTorch 1.6
    path.write_bytes(pickle.dumps(Payload(target)))
    assert "damaged, or holds more than tensors and numbers" in refused(path)
    tensors = longhorn_checkpoint() | {"x": Payload(target)}
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "could run code" in refused(tmp_path / "old.pt")
    np.savez(tmp_path / "objects.npz", **{"params/x": np.array([Payload(target)], dtype=object)})
    assert "holds Python objects, which could run code" in refused(tmp_path / "objects.npz")
    assert not target.exists()


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_bombs(refused, tmp_path):
    np.savez_compressed(tmp_path / "bomb.npz", **{"params/x": np.zeros(1 << 22, np.float32)})
    assert "would inflate to 16,777,344 bytes" in refused(tmp_path / "bomb.npz")
    path = saved(tmp_path / "stored.pt", {"x": torch.zeros(1 << 16)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    assert "is compressed, which PyTorch never does" in refused(tmp_path / "bomb.pt")


def npy(shape, dtype="<f4", data=b"1234"):
    """An .npy whose header says what it likes."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 40, 1 << 40), (2, 2)])
def test_absurd_shapes_in_numpys_headers(refused, tmp_path, shape):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("params/x.npy", npy(shape))
    assert f"claims the shape {shape}, its data has 4 bytes" in refused(tmp_path / "a.npz")


def test_absurd_shapes_in_pytorchs_tensors(refused, tmp_path):
    tensors = longhorn_checkpoint() | {"lm_head.weight": torch.zeros(1).expand(1 << 30, 1 << 12)}
    assert "far more than its data" in refused(saved(tmp_path / "a.pt", tensors))
    tensors["lm_head.weight"] = torch.empty(1 << 40, 0)
    assert "with nothing in it" in refused(saved(tmp_path / "a.pt", tensors))


# ---- formats ---------------------------------------------------------------------------------------------------------


def array(shape, dtype, data):
    return msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))


MSGPACK = {
    "deep": (b"\x81\xa1x" * 100_000 + b"\xc0", "not msgpack"),
    "long-array": (b"\xdd\xff\xff\xff\xff", "not msgpack"),
    "long-map": (b"\xdf\xff\xff\xff\xff", "not msgpack"),
    "long-text": (b"\xdb\xff\xff\xff\xff", "not msgpack"),
    "cut": (msgpack.packb({"params": {"x": 1.0}})[:-3], "not msgpack"),
    "trailing": (msgpack.packb({"params": {}}) + b"x", "not msgpack"),
    "list": (msgpack.packb([1, 2]), "must hold a dict of tensors, got a list"),
    "numbers": (msgpack.packb({"params": {"x": 1.0}}), "params/x must be a tensor, got a float"),
    "keys": (msgpack.packb({"params": {1: 2}}), "not msgpack"),
    "twice": (b"\x82\xa1x\xc0\xa1x\xc0", "names 'x' twice"),
    "objects": (msgpack.packb({"x": array([1], "object", b"12345678")}), "of dtype object"),
    "void": (msgpack.packb({"x": array([1], "V8", b"12345678")}), "of dtype V8"),
    "shape": (msgpack.packb({"x": array([1 << 60], "float32", b"1234")}), "its data has 4 bytes"),
    "negative": (msgpack.packb({"x": array([-1], "float32", b"1234")}), "an array of the shape [-1]"),
    "extension": (msgpack.packb({"x": msgpack.ExtType(77, b"")}), "an extension of type 77"),
    "not-an-array": (msgpack.packb({"x": msgpack.ExtType(1, b"\xff\xff")}), "not msgpack"),
}


@pytest.mark.parametrize("data, reason", MSGPACK.values(), ids=MSGPACK)
def test_msgpack(refused, tmp_path, data, reason):
    (tmp_path / "a.msgpack").write_bytes(data)
    assert reason in refused(tmp_path / "a.msgpack")


@pytest.mark.parametrize("suffix", ["pt", "npz", "msgpack", "safetensors", "zip", "bin"])
@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + bytes(40), b"\x80\x02.", b"\xff" * 64, b"text\n" * 9])
def test_noise(refused, tmp_path, suffix, data):
    (tmp_path / f"a.{suffix}").write_bytes(data)
    refused(tmp_path / f"a.{suffix}")


def test_every_cut_of_a_file(refused, tmp_path):
    write_msgpack(tmp_path / "whole.msgpack", s5_checkpoint(layers=1))
    npz(tmp_path / "whole.npz", {name: x.numpy() for name, x in s5_checkpoint(layers=1).items()})
    saved(tmp_path / "whole.pt", longhorn_checkpoint(layers=1))
    for path in sorted(tmp_path.glob("whole.*")):
        data, cut = path.read_bytes(), tmp_path / f"cut{path.suffix}"
        for size in range(1, len(data), len(data) // 9):
            cut.write_bytes(data[:size])
            refused(cut, assume_defaults=path.suffix != ".pt")
        cut.unlink()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(refused, tmp_path, value):
    tensors = longhorn_checkpoint()
    tensors["backbone.layers.1.mixer.D"][3] = value
    message = refused(saved(tmp_path / "a.pt", tensors))
    assert f"model.layers.1.mixer.D: is not finite: it holds {value}" in message
    tensors = s5_checkpoint()
    tensors["batch_stats/encoder/layers_0/norm/var"][0] = value
    write_msgpack(tmp_path / "a.msgpack", tensors)
    assert "running_var: is not finite" in refused(tmp_path / "a.msgpack", assume_defaults=True)


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "..", ".hidden", "a\\b", "", "x\0y"]
)
def test_an_index_that_leads_elsewhere(refused, tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    saved(tmp_path / "secret.bin", longhorn_checkpoint())
    weight_map = dict.fromkeys(longhorn_checkpoint(), name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "expected the plain name of a file beside it" in refused(folder)


INDICES = {
    "[]": "must hold an object, got a list",
    "{}": "has no weight_map",
    '{"weight_map": {"x": "a.bin"}, "weight_map": {}}': "names 'weight_map' twice",
    '{"weight_map": {"x": "a.bin", "x": "b.bin"}}': "names 'x' twice",
    '{"weight_map": {"x": "lost.bin"}}': "half a checkpoint: it lacks lost.bin",
    '{"weight_map": {"x": "a.bin", "y": "a.bin"}}': "its shards lack y",
    '{"weight_map": {"x": ': "not JSON",
    "[" * 100_000: "not JSON",
    "\udcff": "not JSON",
    f'{{"weight_map": {"9" * 5000}}}': "not JSON",
}


@pytest.mark.parametrize("text, reason", INDICES.items(), ids=range(len(INDICES)))
def test_broken_indices(refused, tmp_path, text, reason):
    folder = tmp_path / "model"
    folder.mkdir()
    saved(folder / "a.bin", {"x": torch.ones(2)})
    (folder / "pytorch_model.bin.index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert reason in refused(folder)


def test_shards_that_hold_more_than_the_index_says(refused, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    saved(folder / "a.bin", {"x": torch.ones(2), "hidden": torch.ones(1)})
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "a.bin"}}')
    assert "does not name: hidden" in refused(folder)
    saved(folder / "b.bin", {"y": torch.ones(2), "x": torch.ones(1)})
    saved(folder / "a.bin", {"x": torch.ones(2)})
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "a.bin", "y": "b.bin"}}')
    assert "two files hold x" in refused(folder)


CONFIGS = {
    "d_state": ({"d_state": 5}, "its config says d_state = 5, its tensors 3"),
    "d_model": ({"d_model": 2**70}, "its config says d_model ="),
    "vocab": ({"vocab_size": 9}, "its config says vocab_size = 9, padded 16, its embedding has 24 rows"),
    "multiple": ({"pad_vocab_size_multiple": 0}, "its config says pad_vocab_size_multiple = 0"),
    "ssm_cfg": ({"ssm_cfg": [1]}, "ssm_cfg must be an object"),
    "layer-norm": ({"rms_norm": False}, "ours are RMSNorms"),
    "tied": ({"tie_embeddings": "false"}, "its config says tie_embeddings = 'false'"),
    "attention": ({"attn_layer_idx": [1]}, "which ours has not"),
}


@pytest.mark.parametrize("change, reason", CONFIGS.values(), ids=CONFIGS)
def test_configurations_that_do_not_fit_their_weights(refused, tmp_path, change, reason):
    folder = tmp_path / "model"
    folder.mkdir()
    saved(folder / "pytorch_model.bin", longhorn_checkpoint())
    config = longhorn_config()
    config["ssm_cfg"] = {} if "d_state" in change else config["ssm_cfg"]
    (folder / "config.json").write_text(json.dumps(config | change))
    assert reason in refused(folder)


def test_names_twice(refused, tmp_path):
    tensors = longhorn_checkpoint()
    tensors |= {f"_orig_mod.{name}": x for name, x in tensors.items()}
    assert "names tensors twice, with and without _orig_mod." in refused(saved(tmp_path / "a.pt", tensors))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for _ in range(2):
            archive.writestr("params/x.npy", npy((1,)))
    assert "holds params/x.npy twice" in refused(tmp_path / "a.npz")


def test_few_bytes_that_claim_to_be_many(refused, tmp_path):
    tree = {}
    for _ in range(40):
        tree = {"a": tree, "b": tree}  # 2^40 dicts, as one file of a few hundred bytes
    assert "holds more than 131,072 names" in refused(saved(tmp_path / "doubled.pt", tree))
    memory = torch.zeros(1 << 16)
    tensors = {f"backbone.layers.{i}.mixer.dt_head.weight": memory.view(256, 256) for i in range(100)}
    assert "its tensors would take 26,214,400 bytes" in refused(saved(tmp_path / "aliases.pt", tensors))


def test_tensors_of_another_kind(refused, tmp_path):
    tensors = longhorn_checkpoint()
    name = "backbone.layers.0.mixer.D"
    message = refused(saved(tmp_path / "a.pt", tensors | {name: tensors[name].to(torch.complex64)}))
    assert f"{name} must be real, got torch.complex64" in message  # and not without its imaginary part
    message = refused(saved(tmp_path / "a.pt", tensors | {name: tensors[name].to(torch.float8_e4m3fn)}))
    assert f"{name} must hold floats of 16, 32 or 64 bits, got float8_e4m3fn" in message
    tensors = s5_checkpoint()
    tensors["batch_stats/encoder/layers_1/norm/var"][2] = -1
    write_msgpack(tmp_path / "a.msgpack", tensors)
    assert "holds a variance below 0: -1" in refused(tmp_path / "a.msgpack", assume_defaults=True)


def test_a_pipe_is_not_waited_for(refused, tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    assert "not a file" in refused(tmp_path / "pipe.pt")
