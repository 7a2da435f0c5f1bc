"""Loading: sharded, on the meta device, with device maps, in other dtypes, from other heads; and importing."""

import json
import pickle
import subprocess
import sys

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from families import causal_lm, classifier, each_family, each_head, each_variant, token_ids
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_recurrent


def assert_same_weights(got, expected):
    """Parameters and buffers."""
    expected = expected.state_dict()
    assert set(got.state_dict()) == set(expected)
    for name, x in got.state_dict().items():
        assert x.device.type == "cpu"
        assert torch.equal(x, expected[name]), name


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
def test_what_is_saved_names_the_package_that_loads_it(config, tmp_path):
    """For trust_remote_code=True where nobody has imported the package."""
    model = causal_lm(config, torch.float32)
    model.save_pretrained(tmp_path)
    kind, name = type(model).__name__, f"modeling_{config.model_type}"
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForCausalLM"] == f"{name}.{kind}"
    code = {}
    exec(compile((tmp_path / f"{name}.py").read_text(), name, "exec"), code)
    assert code[kind] is type(model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()
    model.save_pretrained(tmp_path / "not main", is_main_process=False)
    assert not list(tmp_path.glob("not main/*.py"))


@each_family
def test_sharded_checkpoints(config, tmp_path):
    model = causal_lm(config, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto"), model)


@each_head
def test_every_head_through_the_meta_device(config, auto_class, tmp_path):
    """What is no Linear too: the parameters and buffers of the recurrences and norms."""
    config.num_labels = 3
    torch.manual_seed(0)
    model = auto_class.from_config(config)
    input_ids = token_ids(config, 2, 9)
    model.train()(input_ids)  # which changes the running statistics of a batch norm
    model.eval().save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model(input_ids)[0]
        for kwargs in ({"device_map": "auto"}, {"low_cpu_mem_usage": True}):
            loaded = auto_class.from_pretrained(tmp_path / "model", **kwargs)
            assert_same_weights(loaded, model)
            assert torch.equal(loaded(input_ids)[0], expected)
        for context in (init_empty_weights(include_buffers=True), torch.device("meta")):
            with context:
                empty = auto_class.from_config(config)
            assert all(x.device.type == "meta" for x in empty.state_dict().values())
        filled = load_checkpoint_and_dispatch(empty, tmp_path / "model", device_map={"": "cpu"})
        assert_same_weights(filled, model)
        assert torch.equal(filled.eval()(input_ids)[0], expected)
        with init_empty_weights():
            empty = auto_class.from_config(config)
        empty.tie_weights()  # which init_empty_weights has undone
        backbone, prefix = (empty, "") if auto_class is AutoModel else (empty.model, "model.")
        names = [name for name, _ in empty.named_children() if name not in ("model", "layers")]
        names += [prefix + name for name, _ in backbone.named_children() if name != "layers"]
        device_map = {name: "cpu" for name in [*names, f"{prefix}layers.0"]} | {f"{prefix}layers.1": "disk"}
        options = {"device_map": device_map, "offload_buffers": True}
        for offloaded in (
            load_checkpoint_and_dispatch(empty, tmp_path / "model", offload_folder=str(tmp_path / "1"), **options),
            auto_class.from_pretrained(tmp_path / "model", offload_folder=str(tmp_path / "2"), **options),
        ):
            assert any(x.device.type == "meta" for x in offloaded.parameters())
            assert torch.equal(offloaded.eval()(input_ids)[0], expected)


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
    if config.model_type == "s5":
        config.state_size = 256  # a few steps, each of which is drawn, would not tell how widely they are spread
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


@each_variant
def test_pickles(config):
    """As `torch.save(model)` writes them and processes hand them on."""
    model = causal_lm(config)
    input_ids = token_ids(config, 2, 5)
    assert torch.equal(pickle.loads(pickle.dumps(model))(input_ids).logits, model(input_ids).logits)
