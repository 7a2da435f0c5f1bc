"""Configurations: what each field accepts, and what goes through files and Auto classes unchanged."""

import json

import pytest
import torch
from families import FAMILIES, TINY, each_family, each_variant
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

import hf_recurrent
from hf_recurrent import MinGRUConfig, RecurrentConfig

BAD_FIELDS = [
    ("vocab_size", 0, "expected an integer of at least 1, got 0"),
    ("vocab_size", "many", r"expected int, got str \(value: 'many'\)"),
    ("hidden_size", -4, "expected an integer of at least 1, got -4"),
    ("hidden_size", 8.0, r"expected int, got float \(value: 8.0\)"),
    ("hidden_size", True, r"expected int, got bool \(value: True\)"),
    ("num_hidden_layers", 0, "expected an integer of at least 1, got 0"),
    ("expansion", 0, "expected a finite number above 0, got 0"),
    ("expansion", float("nan"), "expected a finite number above 0, got nan"),
    ("expansion", 1.3, r"expansion \* hidden_size must be a whole number, got 1.3 \* 16 = 20.8"),
    ("conv_kernel", 1, r"expected 0 \(no convolution\) or at least 2 taps, got 1"),
    ("conv_kernel", -2, r"expected 0 \(no convolution\) or at least 2 taps, got -2"),
    ("mlp_ratio", -1, "expected a finite number, 0 or above, got -1"),
    ("mlp_ratio", float("inf"), "expected a finite number, 0 or above, got inf"),
    ("mlp_ratio", 0.7, r"mlp_ratio \* hidden_size must be a whole number, got 0.7 \* 16 = 11.2"),
    ("hidden_act", "gelo", "expected one of .*gelu.*, got 'gelo'"),
    ("hidden_dropout", 1, r"expected a probability in \[0, 1\), got 1"),
    ("hidden_dropout", -0.1, r"expected a probability in \[0, 1\), got -0.1"),
    ("norm_eps", 0.0, "expected a finite number above 0, got 0.0"),
    ("norm_eps", None, "'norm_eps' with value None doesn't match any type"),
    ("use_bias", "no", r"expected bool, got str \(value: 'no'\)"),
    ("use_conv_bias", 1, r"expected bool, got int \(value: 1\)"),
    ("tie_word_embeddings", None, "expected bool, got NoneType"),
    ("residual_in_fp32", "yes", "expected bool, got str"),
    ("initializer_range", 0, "expected a finite number above 0, got 0"),
    ("use_cache", 2, "expected bool, got int"),
    ("pad_token_id", "<pad>", "'pad_token_id' with value '<pad>' doesn't match any type"),
    ("num_labels", 0, "num_labels must be at least 1, got 0"),
    # Before 5.18 Transformers is the first to refuse.
    (
        "problem_type",
        "ranking",
        "problem_type must be None or one of 'regression', .*, got 'ranking'"
        "|'problem_type' with value 'ranking' doesn't match any type",
    ),
]


@pytest.mark.parametrize("config_class", FAMILIES)
@pytest.mark.parametrize("field, value, message", BAD_FIELDS, ids=str)
def test_bad_values_are_named(config_class, field, value, message):
    with pytest.raises(StrictDataclassError, match=message) as error:
        config_class(**{"hidden_size": 16, field: value})
    assert field in str(error.value)
    # The same when it is set later, and at the latest when a model is made.
    config = config_class(hidden_size=16)
    with pytest.raises(StrictDataclassError, match=message):
        setattr(config, field, value)
        AutoModel.from_config(config)


def test_candidate():
    with pytest.raises(StrictDataclassError, match="'candidate' expected one of .*'positive', 'vanilla'.*, got log"):
        MinGRUConfig(candidate="log")


@pytest.mark.parametrize("config_class", FAMILIES)
@pytest.mark.parametrize("wrong, right", [("hiden_size", "hidden_size"), ("rms_norm_eps", "norm_eps")])
def test_a_misspelt_field_is_not_ignored(config_class, wrong, right):
    with pytest.raises(TypeError, match=f"{config_class.__name__} has no field '{wrong}': did you mean '{right}'?"):
        config_class(**{wrong: 32})


@pytest.mark.parametrize("config_class", FAMILIES)
@pytest.mark.parametrize("name, source", [("intermediate_size", "mlp_ratio"), ("recurrent_size", "expansion")])
def test_what_follows_from_other_fields_cannot_be_set(config_class, name, source):
    with pytest.raises(TypeError, match=rf"{config_class.__name__} has no field '{name}', .*: {source} \* hidden_size"):
        config_class(**{name: 32})


@pytest.mark.parametrize("config_class", FAMILIES)
def test_what_other_tools_write_is_kept(config_class):
    extra = {"sep_token_id": 3, "task_specific_params": {"a": 1}, "num_labels": 4, "dtype": "bfloat16"}
    config = config_class(**extra, note_of_mine="kept")
    assert config.note_of_mine == "kept" and config.num_labels == 4 and config.dtype is torch.bfloat16


@pytest.mark.parametrize("config_class", FAMILIES)
def test_derived_widths(config_class):
    config = config_class(hidden_size=10, expansion=1.1, mlp_ratio=2.3)
    assert (config.recurrent_size, config.intermediate_size) == (11, 23)
    config.num_hidden_layers = 3
    assert config.layer_types == ["linear_attention"] * 3


@each_variant
def test_files_keep_every_field(config, tmp_path):
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == config.model_type
    assert "layer_types" not in saved and "intermediate_size" not in saved
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
    changed = AutoConfig.from_pretrained(tmp_path, hidden_dropout=0.5)
    assert changed.hidden_dropout == 0.5
    with pytest.raises(StrictDataclassError, match=r"expected a probability in \[0, 1\), got 5"):
        AutoConfig.from_pretrained(tmp_path, hidden_dropout=5)


@each_family
def test_auto_classes(config):
    classes = hf_recurrent.FAMILIES[type(config)]
    assert {AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification} <= set(classes)
    for auto_class, model_class in classes.items():
        if auto_class is AutoModelForImageClassification:
            model = auto_class.from_config(type(config)(**TINY, image_size=32, bidirectional=True))
        else:
            model = auto_class.from_config(config)
        assert type(model) is model_class
        assert model.config_class is type(config) and model.base_model_prefix == "model"


@each_family
def test_a_model_takes_its_own_familys_configuration(config):
    for model_class in hf_recurrent.FAMILIES[type(config)].values():
        with pytest.raises(TypeError, match=f"{model_class.__name__} needs a .*, got a RecurrentConfig"):
            model_class(RecurrentConfig())
