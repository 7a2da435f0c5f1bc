"""The families under test and their configurations: one line in FAMILIES, and a family is in every test here."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSequenceClassification

import hf_recurrent

# Each family's configuration class, with the options of its own to be tried out.
FAMILIES = {
    hf_recurrent.GateLoopConfig: [
        {"transition": "polar"},
        {"num_heads": 2, "use_sub_ln": True, "post_norm": True},
        {"transition": "cartesian", "complex_transition": False, "data_controlled": False, "use_gate": False},
    ],
    hf_recurrent.LonghornConfig: [{"state_size": 4}, {"state_size": 3, "dt_rank": 2}],
    hf_recurrent.MinGRUConfig: [{"candidate": "positive"}, {"candidate": "vanilla"}],
    hf_recurrent.MinLSTMConfig: [{"candidate": "positive"}, {"candidate": "vanilla"}],
    hf_recurrent.S5Config: [
        {"state_size": 8, "num_blocks": 2, "pooling": "last"},
        {"state_size": 6, "num_blocks": 2, "conj_sym": False, "discretization": "bilinear", "norm": "batch"}
        | {"prenorm": False, "final_norm": False, "activation": "half_glu2", "pooling": "last"},
    ],
}

# Options that every family has. The wide initialisation makes outputs depend strongly on states and inputs.
TINY = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "initializer_range": 0.4}
VARIANTS = {
    "default": {},
    "bare": {"conv_kernel": 0, "mlp_ratio": 0, "expansion": 1, "residual_in_fp32": False},
    "full": {
        "conv_kernel": 3,
        "expansion": 1.5,
        "mlp_ratio": 1.5,
        "use_bias": True,
        "use_conv_bias": False,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "hidden_dropout": 0.1,
        "learned_initial_state": True,
    },
}


def name(config_class: type, options: dict) -> str:
    return "-".join([config_class.model_type, *map(str, options.values())])


FIRST = {config_class.model_type: (config_class, {**TINY, **options[0]}) for config_class, options in FAMILIES.items()}
ALL = {
    f"{name(config_class, own)}-{variant}": (config_class, {**TINY, **own, **shared})
    for config_class, options in FAMILIES.items()
    for own in options
    for variant, shared in VARIANTS.items()
}

# Under each head that reads tokens, the last options of each family: with parameters that are in no Linear, and with
# buffers. (Images: test_vision_longhorn.py.)
HEADS = {
    f"{config_class.model_type}-{auto_class.__name__}": (auto_class, (config_class, {**TINY, **options[-1]}))
    for config_class, options in FAMILIES.items()
    for auto_class in hf_recurrent.FAMILIES[config_class]
    if auto_class is not AutoModelForImageClassification
}

# Decorators for tests that take a `config`: every family once, or every family with all of its options; or, with an
# `auto_class` beside it, every family under each of its heads.
each_family = pytest.mark.parametrize("config", FIRST.values(), ids=FIRST, indirect=True)
each_variant = pytest.mark.parametrize("config", ALL.values(), ids=ALL, indirect=True)
each_head = pytest.mark.parametrize("auto_class, config", HEADS.values(), ids=HEADS, indirect=["config"])


def causal_lm(config, dtype: torch.dtype = torch.float64, seed: int = 0):
    """A fresh language model in evaluation mode, whose embeddings are wide enough for texts that vary, and whose
    initial states, where they are learned, have been."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(4)
        for name, parameter in model.named_parameters():
            if name.endswith("initial_state"):
                parameter.normal_()
    return model.to(dtype).eval()


def classifier(config, dtype: torch.dtype = torch.float64, seed: int = 0):
    """A fresh sequence classifier in evaluation mode."""
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(config).to(dtype).eval()


def token_ids(config, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """(batch, length) random ids, without 0, which the tests of `generate` pad with."""
    return torch.randint(1, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def states(cache) -> list[torch.Tensor]:
    """All states of a cache, in a fixed order."""
    return [layer.states[key] for layer in cache.layers for key in sorted(layer.states)]
