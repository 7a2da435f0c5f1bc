"""Loading: sharded, on the meta device, with device maps, in other dtypes, from other heads; and importing."""

import json
import subprocess
import sys

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from families import causal_lm, classifier, each_family, each_variant, token_ids
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_recurrent


def assert_same_weights(got, expected):
    expected = dict(expected.named_parameters())
    assert {name for name, _ in got.named_parameters()} == set(expected)
    for name, parameter in got.named_parameters():
        assert parameter.device.type == "cpu"
        assert torch.equal(parameter, expected[name]), name


@each_variant
def test_trained_weights_survive_every_way_of_loading(config, tmp_path):
    """The most reported trouble with custom models: an initialisation that runs over what was just loaded."""
    model = causal_lm(config, torch.float32)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(i + 1.5)
    model.save_pretrained(tmp_path)
    for kwargs in ({}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"low_cpu_mem_usage": True}):
        assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path, **kwargs), model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16())


@each_family
def test_sharded_checkpoints(config, tmp_path):
    model = causal_lm(config, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto"), model)


@each_family
def test_the_meta_device(config, tmp_path):
    model = causal_lm(config, torch.float32)
    model.save_pretrained(tmp_path)
    for context in (init_empty_weights(), torch.device("meta")):
        with context:
            empty = AutoModelForCausalLM.from_config(config)
        assert all(p.device.type == "meta" for p in empty.parameters())
    filled = load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"})
    assert_same_weights(filled, model)


@each_family
def test_layers_on_the_disk(config, tmp_path):
    """Blocks that are fetched one at a time: states and masks follow each block's device."""
    model = causal_lm(config, torch.float32)
    model.save_pretrained(tmp_path / "model")
    device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    device_map |= {"model.norm": "cpu", "model.dropout": "cpu", "lm_head": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    input_ids = token_ids(config, 2, 5)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1] * 5])
    with torch.no_grad():
        expected, got = model(input_ids, attention_mask=mask).logits, loaded(input_ids, attention_mask=mask).logits
    assert torch.equal(got[mask == 1], expected[mask == 1])
    arguments = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(input_ids, **arguments), model.generate(input_ids, **arguments))


@each_family
def test_only_what_is_missing_is_initialised(config, tmp_path):
    """A language model's checkpoint under a classifier: its backbone is loaded, the new head drawn."""
    config.num_labels = 3
    model = causal_lm(config, torch.float32)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert_same_weights(loaded.model, model.model)
    assert report["missing_keys"] == {name for name, _ in loaded.named_parameters() if name.startswith("score.")}
    head = classifier(config, torch.float32).score.weight
    assert loaded.score.weight.std().item() == pytest.approx(head.std().item(), rel=0.5)
    assert_same_weights(AutoModel.from_pretrained(tmp_path), model.model)


@each_family
def test_a_lost_layer_is_drawn_like_a_fresh_one(config, tmp_path):
    config.hidden_size, config.initializer_range = 64, None
    model = causal_lm(config, torch.float32)
    lost = [name for name in model.state_dict() if name.startswith("model.layers.1.")]
    kept = {name: x for name, x in model.state_dict().items() if name not in lost}
    model.save_pretrained(tmp_path, state_dict=kept)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert report["missing_keys"] == set(lost)
    for name, parameter in loaded.named_parameters():
        if name in lost:
            assert parameter.std().item() == pytest.approx(model.get_parameter(name).std().item(), rel=0.3), name
        else:
            assert torch.equal(parameter, model.get_parameter(name)), name


@each_variant
def test_tied_embeddings_are_saved_once(config, tmp_path):
    config.tie_word_embeddings = True
    model = causal_lm(config, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "model.embed_tokens.weight" in index["weight_map"] and "lm_head.weight" not in index["weight_map"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same_weights(loaded, model)


def test_importing_the_package_is_enough_and_light(tmp_path):
    """A fresh interpreter that knows the folder and the package's name only. Nothing is loaded but what any model or
    image processor of Transformers loads."""
    config_class = next(iter(hf_recurrent.FAMILIES))
    config = config_class(vocab_size=11, hidden_size=8, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    code = """
import sys
from transformers import AutoModelForCausalLM, GenerationMixin, LlamaForCausalLM
from transformers.image_processing_backends import PilBackend
from transformers.models.auto.image_processing_auto import AutoImageProcessor
before = set(sys.modules)
import hf_recurrent
new = {name.split(".")[0] if name.split(".")[0] != "transformers" else name for name in set(sys.modules) - before}
assert new - sys.stdlib_module_names <= {"hf_recurrent"}, f"imported {new}"
assert hf_recurrent.__version__ and all(hasattr(hf_recurrent, name) for name in hf_recurrent.__all__)
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = hf_recurrent.FAMILIES[config_class][AutoModelForCausalLM].__name__
    assert done.stdout.split() == [expected]
