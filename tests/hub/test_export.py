"""`hf-recurrent export --standalone`: the model without this package, the same to the bit."""

import json
import subprocess
import sys
import sysconfig

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.dynamic_module_utils import get_imports

import hf_recurrent
from hf_recurrent import cli
from hf_recurrent.hub.code import standalone
from hf_recurrent.hub.staging import load, stage
from hf_recurrent.scan import cpu, elementwise, gateloop_heads, longhorn, ops
from hf_recurrent.training.tokenizer import byte_tokenizer

TINY = {"vocab_size": 257, "hidden_size": 12, "num_hidden_layers": 2, "initializer_range": 0.4, "pad_token_id": 256}
TINY |= {"eos_token_id": 256}
CAUSAL = {
    "gateloop": (hf_recurrent.GateLoopForCausalLM, {}),
    "gateloop-heads": (hf_recurrent.GateLoopForCausalLM, {"num_heads": 2, "post_norm": True, "conv_kernel": 3}),
    "longhorn": (hf_recurrent.LonghornForCausalLM, {"state_size": 4}),
    "mingru": (hf_recurrent.MinGRUForCausalLM, {}),
    "minlstm": (hf_recurrent.MinLSTMForCausalLM, {"candidate": "vanilla"}),
    "s5": (hf_recurrent.S5ForCausalLM, {"state_size": 8, "num_blocks": 2}),
}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 1, "bidirectional": True, "state_size": 3}
OTHERS = {
    "s5-matching": (hf_recurrent.S5ForDocumentMatching, {"state_size": 8, "num_blocks": 2, "bidirectional": True}),
    "s5-batch": (
        hf_recurrent.S5ForSequenceClassification,
        {"state_size": 6, "num_blocks": 2, "conj_sym": False, "norm": "batch", "activation": "half_glu2"},
    ),
    "longhorn-images": (hf_recurrent.LonghornForImageClassification, IMAGES),
}
# Runs where this package cannot be imported: what a user does with an exported folder.
PROGRAM = """
import sys
sys.path.append(sys.argv[1])
try:
    import hf_recurrent
except ModuleNotFoundError:
    pass
else:
    sys.exit("hf_recurrent can be imported")
import json, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer
from transformers import AutoModelForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.image_processing_auto import AutoImageProcessor

work = Path(sys.argv[2])
inputs = load_file(work / "inputs.safetensors")
ids, mask, labels = inputs["ids"], inputs["mask"], inputs["labels"]
out = {}
for name in json.loads(sys.argv[3]):
    folder = work / name
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    if architecture.endswith("ForCausalLM"):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("ab")["input_ids"] == [97, 98]
        out[f"{name}.logits"] = model(ids, attention_mask=mask).logits
        out[f"{name}.text"] = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        loss = model(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        out[f"{name}.loss"] = loss
        for key, parameter in model.named_parameters():
            out[f"{name}.grad.{key}"] = parameter.grad
        cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
        cache.activate_past_recording()
        model(ids[:, 5:], past_key_values=cache)
        cache.crop(-2)
        cache.save(work / f"{name}.state")
        out[f"{name}.cropped"] = model(ids[:, -2:], past_key_values=cache).logits
        model.save_pretrained(work / f"{name}-again")
        again = AutoModelForCausalLM.from_pretrained(work / f"{name}-again", trust_remote_code=True)
        assert torch.equal(again(ids, attention_mask=mask).logits, out[f"{name}.logits"])
    elif architecture.endswith("ForImageClassification"):
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True, backend="pil")
        pixels = processor([inputs["image"].numpy()], return_tensors="pt")["pixel_values"]
        model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
        out[f"{name}.pixels"], out[f"{name}.logits"] = pixels, model(pixels).logits
    elif architecture.endswith("ForDocumentMatching"):
        kind = get_class_from_dynamic_module(f"modeling_s5.{architecture}", folder)
        out[f"{name}.logits"] = kind.from_pretrained(folder)(ids[None]).logits
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
        out[f"{name}.logits"] = model(ids, attention_mask=mask).logits
assert not [module for module in sys.modules if module.startswith("hf_recurrent")]
save_file({key: value.detach().contiguous() for key, value in out.items()}, work / "outputs.safetensors")
"""


def small(name: str):
    kind, options = (CAUSAL | OTHERS)[name]
    torch.manual_seed(0)
    model = kind(kind.config_class(**TINY, **options)).eval()
    if name == "s5-batch":
        for key, buffer in model.named_buffers():
            if "running" in key:
                buffer.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    image = torch.arange(100, dtype=torch.uint8).view(10, 10, 1)
    return {"ids": ids, "mask": mask, "labels": ids.masked_fill(mask == 0, -100), "image": image}


@pytest.fixture(scope="module")
def exported(tmp_path_factory, inputs):
    """Every model exported and run where this package is not; the folder of it all, and what came out."""
    work = tmp_path_factory.mktemp("exported")
    save_file(inputs, work / "inputs.safetensors")
    tokenizer = byte_tokenizer()
    for name in CAUSAL | OTHERS:
        source, folder = work / "sources" / name, work / name
        small(name).save_pretrained(source)
        tokenizer.save_pretrained(source)
        if name == "longhorn-images":
            processor = hf_recurrent.LonghornImageProcessor(
                size=8, do_center_crop=False, do_convert_rgb=False, image_mean=[0.5], image_std=[0.5]
            )
            processor.save_pretrained(source)
        folder.mkdir()
        stage(load(source), folder, source=source, code="standalone")
    (work / "program.py").write_text(PROGRAM)
    # Without `site` no editable installation is found, and with -I no PYTHONPATH.
    command = [sys.executable, "-I", "-S", str(work / "program.py"), sysconfig.get_paths()["purelib"], str(work)]
    command.append(json.dumps(list(CAUSAL | OTHERS)))
    environment = {"HF_HOME": str(work / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return work, load_file(work / "outputs.safetensors")


@pytest.fixture
def chunked(monkeypatch):
    """The package's models without compiled kernels, on one thread, as the exported ones run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for module in (ops, gateloop_heads, longhorn, elementwise):
        monkeypatch.setattr(module, "choose_backend", lambda backend, device: "chunked")
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "not here")
    monkeypatch.setattr(cpu, "kernel", lambda *_: None)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CAUSAL)
def test_language_models_are_the_same_to_the_bit(exported, inputs, chunked, name):
    work, outputs = exported
    # From the same file: where the weights lie in memory decides which way a product is summed.
    model, ids, mask = load(work / name).eval(), inputs["ids"], inputs["mask"]
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    real = mask.bool()
    assert torch.equal(outputs[f"{name}.logits"][real], logits[real])
    # The cache: read to the end and on, taken back, saved to a file.
    text = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(outputs[f"{name}.text"], text)
    with torch.no_grad():
        cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
        cache.activate_past_recording()
        model(ids[:, 5:], past_key_values=cache)
        cache.crop(-2)
        theirs = hf_recurrent.RecurrentCache.load(work / f"{name}.state", model.config)
        for layer, other in zip(cache.layers, theirs.layers, strict=True):
            assert all(torch.equal(layer.states[key], other.states[key]) for key in layer.states)
        assert torch.equal(outputs[f"{name}.cropped"], model(ids[:, -2:], past_key_values=cache).logits)


@pytest.mark.parametrize("name", CAUSAL)
def test_language_models_agree_with_the_compiled_ones(exported, inputs, name):
    """Gradients too, which PyTorch derives for the exported model."""
    _, outputs = exported
    model, ids, mask = small(name), inputs["ids"], inputs["mask"]
    out = model(ids, attention_mask=mask, labels=inputs["labels"])
    out.loss.backward()
    torch.testing.assert_close(outputs[f"{name}.loss"], out.loss.detach(), rtol=1e-5, atol=0)
    logits, real = outputs[f"{name}.logits"], mask.bool()
    torch.testing.assert_close(logits[real], out.logits[real].detach(), rtol=1e-5, atol=1e-5)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(outputs[f"{name}.grad.{key}"], parameter.grad, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_other_heads_are_the_same_to_the_bit(exported, inputs, chunked, name):
    work, outputs = exported
    # From the same file: where the weights lie in memory decides which way a product is summed.
    model, ids = load(work / name).eval(), inputs["ids"]
    if isinstance(model, hf_recurrent.LonghornForImageClassification):
        pixels = outputs[f"{name}.pixels"]
        assert pixels.shape == (1, 1, 8, 8)
        expected = model(pixels).logits
    elif isinstance(model, hf_recurrent.S5ForDocumentMatching):
        expected = model(ids[None]).logits
    else:
        expected = model(ids, attention_mask=inputs["mask"]).logits
    assert torch.equal(outputs[f"{name}.logits"], expected)


@pytest.mark.parametrize("config_class", hf_recurrent.FAMILIES)
def test_a_generated_module_imports_nothing_else(config_class, tmp_path):
    file = tmp_path / "modeling.py"
    file.write_text(standalone(config_class))
    imported = set(get_imports(file)) - set(sys.stdlib_module_names)
    assert imported == {"torch", "transformers", "safetensors", "huggingface_hub"}
    for word in ("ctypes", "torch.library", "torch.ops", "push_to_hub"):
        assert word not in file.read_text()


def test_the_command(exported, tmp_path, capsys):
    work, _ = exported
    source, out = work / "sources" / "mingru", tmp_path / "out"
    assert cli.main(["export", str(source), str(out), "--standalone"]) == 0
    assert f"Written: {out}" in capsys.readouterr().out
    files = {path.name for path in out.iterdir()}
    assert files >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_mingru.py",
        "tokenizer.json",
    }
    # A folder with this package's own code goes first, where it has been imported.
    assert isinstance(load(out), hf_recurrent.MinGRUForCausalLM)

    assert cli.main(["export", str(source), str(out), "--standalone"]) == 2
    assert f"{out}: exists, and is not empty: replace it by --overwrite" in capsys.readouterr().err
    assert cli.main(["export", str(source), str(out), "--standalone", "--overwrite", "--max-shard-size", "20KB"]) == 0
    assert len(list(out.glob("model-*.safetensors"))) > 1 and not (out / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert all(torch.equal(a, b) for a, b in zip(load(out).parameters(), load(source).parameters(), strict=True))


def test_what_is_refused(exported, tmp_path, capsys):
    def refusal(*argv) -> str:
        assert cli.main(["export", *map(str, argv)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error.removeprefix("hf-recurrent: error: ").rstrip()

    source = exported[0] / "sources" / "mingru"
    assert refusal(source, tmp_path / "x") == "the following arguments are required: --standalone"
    assert "no such folder" in refusal(tmp_path / "nothing", tmp_path / "x", "--standalone")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    assert "holds no model, and is not replaced" in refusal(source, tmp_path / "notes", "--standalone", "--overwrite")
    for output in (source, source / "x", source.parent):
        assert f"OUT {output}: must lie apart from DIR {source}" in refusal(source, output, "--standalone")
    (tmp_path / "file").write_text("")
    assert "a file of that name is in the way" in refusal(source, tmp_path / "file", "--standalone")
    for size in ("0GB", "large", "5"):
        assert "must be a size such as 500MB" in refusal(
            source, tmp_path / "x", "--standalone", "--max-shard-size", size
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "notes"]
