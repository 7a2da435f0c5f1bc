"""Transformers' own common tests, over every class of every family; upstream.py fetches them.

A test runs, or is listed below with the reason why it cannot: one that skips itself and is not listed fails, and so
does one that is listed and runs (conftest.py).
"""

import tempfile
import unittest
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pipeline_checks
import pytest
import torch
import transformers
import upstream
from packaging.version import Version
from transformers.testing_utils import torch_device

import hf_recurrent
from hf_recurrent import FAMILIES

# Why tests, by patterns of their names, do not apply to recurrent models. A suite for which one does apply after all
# has its name in `applicable`.
NOT_APPLICABLE = {
    "test_attention_outputs": "no attention weights",
    "test_attn_implementation_composite_models": "no attention implementations",
    "test_can_set_attention_dynamically*": "no attention implementations",
    "test_eager_matches_sdpa_inference*": "no attention implementations",
    "test_flash_attn_*": "no attention implementations",
    "test_flex_attention_with_grads": "no attention implementations",
    "test_sdpa_*": "no attention implementations",
    "test_sliding_window_mask": "no attention window",
    "test_resize_position_vector_embeddings": "no position embeddings",
    "test_model_rope_*": "no rotary embeddings",
    "test_vision_axial_rope": "no rotary embeddings",
    "test_eager_matches_batched_and_grouped_inference*": "no experts",
    "test_moe_models_record_router_logits": "no experts",
    "test_output_router_logits_from_config": "no experts",
    "test_encoder_decoder_loss_no_double_shift": "not an encoder and a decoder",
    "test_internal_model_config_and_subconfig_are_same": "one configuration, without others inside",
    "test_keep_in_fp32_modules*": "no weights that stay in float32: the scans compute in it whatever the weights are",
    "test_tied_head_has_a_tp_plan_entry": "no plan for tensor parallelism",
    "test_tp_plan_matches_params": "no plan for tensor parallelism",
    "test_can_load_from_already_mapped_keys": "weights are loaded as they were saved, without conversion",
    "test_reverse_loading_mapping": "weights are loaded as they were saved, without conversion",
    "test_kernels_can_load_without_crashing": "no kernels from the Hub",
    "test_pipeline_*": "no head for this pipeline",
}
# The version of Transformers whose tests are all listed. Older ones have fewer of them.
LISTED_FOR = "5.23"
# What tests need, beyond what `make test-hf` installs. Where it is there, they run.
NEEDS = {
    "test_can_load_with_device_context_manager": "an accelerator",
    "test_can_load_with_global_device_set": "an accelerator",
    "test_cpu_offload": "an accelerator",
    "test_disk_offload_*": "an accelerator",
    "test_torch_compile_for_training": "an accelerator",
    "test_model_parallelism": "several accelerators",
    "test_*_with_deepspeed*": "DeepSpeed and an accelerator",
}
# The heads that read rows of token ids, and the pipelines for each. For other heads there are suites below.
PIPELINES = {
    "Model": ["feature-extraction"],
    "ForCausalLM": ["text-generation"],
    "ForSequenceClassification": ["text-classification", "zero-shot"],
    "ForTokenClassification": ["token-classification"],
}
IMAGES = {"image_size": 12, "patch_size": 4, "bidirectional": True}
SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
FAMILY_FIELDS = {
    hf_recurrent.LonghornConfig: {"state_size": 4},
    hf_recurrent.S5Config: {"state_size": 8, "num_blocks": 2},
}


def small_fields(config_class: type) -> dict:
    return {**SMALL, **FAMILY_FIELDS.get(config_class, {})}


def head(model_class: type) -> str:
    """The name of the class without its family's."""
    return model_class.__name__.removeprefix(model_class.config_class.__name__.removesuffix("Config"))


TEXT_CLASSES = {
    config_class: tuple(model_class for model_class in model_classes.values() if head(model_class) in PIPELINES)
    for config_class, model_classes in FAMILIES.items()
}
TINY_MODELS = tempfile.TemporaryDirectory()
pipeline_checks.save_tiny_models(
    Path(TINY_MODELS.name),
    {
        model_class: config_class(**small_fields(config_class))
        for config_class, model_classes in TEXT_CLASSES.items()
        for model_class in model_classes
    }
    | {
        hf_recurrent.LonghornForImageClassification: hf_recurrent.LonghornConfig(
            **small_fields(hf_recurrent.LonghornConfig), **IMAGES
        )
    },
)
MIXINS = upstream.load(TINY_MODELS.name, *pipeline_checks.PROCESSORS)
if not hasattr(MIXINS.test_modeling_common.ModelTesterMixin, "test_can_init_all_missing_weights_before_2023"):
    NEEDS["test_can_init_all_missing_weights"] = (
        "a later Transformers, where models whose files bear no year can ask for it"
    )


class ModelTester:
    """The small configuration and the inputs that the mixins ask for."""

    batch_size = 3
    seq_length = 7
    is_training = True

    def __init__(self, model_classes: tuple[type, ...], fields: dict):
        self.config_class, self.fields = model_classes[0].config_class, fields
        config = self.get_config()
        self.hidden_size, self.num_hidden_layers = config.hidden_size, config.num_hidden_layers
        if isinstance(config, hf_recurrent.GateLoopConfig):
            self.num_attention_heads = config.num_heads or config.recurrent_size
        heads = {head(model_class): model_class for model_class in model_classes}
        self.base_model_class, self.causal_lm_class = heads.get("Model"), heads.get("ForCausalLM")

    def get_config(self):
        return self.config_class(**self.fields)

    def prepare_config_and_inputs_for_common(self):
        config, mask = self.get_config(), self.attention_mask()
        return config, {"input_ids": torch.randint_like(mask, 1, config.vocab_size), "attention_mask": mask}

    def attention_mask(self) -> torch.Tensor:
        """A row without padding, one with it on the right, one on the left."""
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.long, device=torch_device)
        mask[1, -2:] = 0
        mask[2, :3] = 0
        return mask


class PairTester(ModelTester):
    """Two rows of ids for each output, (B, 2, L)."""

    def attention_mask(self):
        mask = super().attention_mask()
        return torch.stack([mask, mask.roll(1, dims=0)], dim=1)


class FeatureTester(ModelTester):
    """Rows of floats, (B, L, input_size)."""

    def prepare_config_and_inputs_for_common(self):
        config, mask = self.get_config(), self.attention_mask()
        features = torch.randn(*mask.shape, config.input_size, device=mask.device)
        return config, {"input_features": features, "attention_mask": mask}


class ImageTester(ModelTester):
    """Images, (B, channels, height, width), of which each patch becomes a token, beside the class token."""

    seq_length = (IMAGES["image_size"] // IMAGES["patch_size"]) ** 2 + 1

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        shape = (self.batch_size, config.num_channels, config.image_size, config.image_size)
        return config, {"pixel_values": torch.randn(shape, device=torch_device)}


class Suite:
    """What all suites have. A subclass sets `all_model_classes`."""

    model_tester = None
    model_tester_class = ModelTester
    extra_fields = {}
    applicable = ()
    not_applicable = {}  # beyond NOT_APPLICABLE
    cannot_pass = {}  # tests that do not notice by themselves that they do not apply

    def setUp(self):
        torch.manual_seed(0)
        fields = {**small_fields(self.all_model_classes[0].config_class), **self.extra_fields}
        self.model_tester = self.model_tester_class(self.all_model_classes, fields)

    @classmethod
    def why_not(cls, test: str) -> str | None:
        """Why `test` does not apply to this suite; None if it does."""
        return None if test in cls.applicable else listed(test, {**cls.not_applicable, **NOT_APPLICABLE})

    @classmethod
    def why_failing(cls, test: str) -> str | None:
        """Why `test` fails in this suite because it does not apply; None if it has to pass."""
        return listed(test, cls.cannot_pass)

    @classmethod
    def missing(cls, test: str) -> str | None:
        """What `test` may skip itself for the lack of."""
        return listed(test, NEEDS)


def listed(test: str, names: dict[str, str]) -> str | None:
    return next((why for pattern, why in names.items() if fnmatch(test, pattern)), None)


def pipeline_tests(tasks: Iterable[str]) -> tuple[str, ...]:
    """The names of the tests for these pipelines."""
    return tuple(f"test_pipeline_{task.replace('-', '_')}{dtype}" for task in tasks for dtype in ("", "_fp16"))


class CommonSuite(Suite, MIXINS.test_modeling_common.ModelTesterMixin, MIXINS.test_pipeline_mixin.PipelineTesterMixin):
    has_attentions = False
    pipeline_model_mapping = {}
    # A file without a year counts as one of before 2023, whose models a test leaves out unless told not to.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        super().setUp()
        self._torch_compile_train_cls = self.model_tester.causal_lm_class

    def test_config(self):
        fields = self.model_tester.fields
        MIXINS.test_configuration_common.ConfigTester(
            self, self.model_tester.config_class, common_properties=["hidden_size", "num_hidden_layers"], **fields
        ).run_common_tests()


class GenerativeSuite(CommonSuite, MIXINS.test_modeling_common.GenerationTesterMixin):
    not_applicable = {
        "test_generation_tester_mixin_inheritance": "the mixin that it looks for is not in the source distribution; "
        "our own tests of generate are in tests/modeling/test_model_generation.py"
    }

    def test_generation_tester_mixin_inheritance(self):
        if upstream.is_stand_in(MIXINS.test_modeling_common.GenerationTesterMixin):
            self.skipTest("nothing to inherit")
        super().test_generation_tester_mixin_inheritance()


class GateLoopSuite(GenerativeSuite):
    has_attentions = True
    applicable = ("test_attention_outputs",)

    def test_retain_grad_hidden_states_attentions(self):
        # Its attention weights are computed beside the recurrence that they equal: no gradient goes through them.
        self.has_attentions = False
        super().test_retain_grad_hidden_states_attentions()


class S5ForDocumentMatchingTest(CommonSuite, unittest.TestCase):
    all_model_classes = (hf_recurrent.S5ForDocumentMatching,)
    model_tester_class = PairTester
    not_applicable = {"test_causal_lm_loss_honors_shift_labels": "not a language model"}

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels:  # this head is unknown to Transformers
            inputs["labels"] = torch.zeros(self.model_tester.batch_size, dtype=torch.long, device=torch_device)
        return inputs


class NoTextSuite(CommonSuite):
    test_resize_embeddings = False
    not_applicable = {
        "test_causal_lm_loss_honors_shift_labels": "not a language model",
        "test_resize_*": "no table of token embeddings",
    }
    cannot_pass = {
        "test_inputs_embeds*": "it passes input_ids",
        "test_model_get_set_embeddings": "it expects a table of token embeddings",
    }


class S5FeaturesTest(NoTextSuite, unittest.TestCase):
    """S5 on features, in both directions."""

    all_model_classes = (
        hf_recurrent.S5Model,
        hf_recurrent.S5ForSequenceClassification,
        hf_recurrent.S5ForTokenClassification,
    )
    model_tester_class = FeatureTester
    extra_fields = {"input_size": 5, "bidirectional": True}
    cannot_pass = {
        **NoTextSuite.cannot_pass,
        "test_load_with_mismatched_shapes": "it changes the vocabulary, on which no weights depend",
    }


class LonghornImagesTest(NoTextSuite, unittest.TestCase):
    """Vision Longhorn."""

    all_model_classes = (hf_recurrent.LonghornModel, hf_recurrent.LonghornForImageClassification)
    model_tester_class = ImageTester
    extra_fields = IMAGES
    pipeline_model_mapping = {"image-classification": (hf_recurrent.LonghornForImageClassification,)}
    applicable = pipeline_tests(pipeline_model_mapping)
    not_applicable = {
        **NoTextSuite.not_applicable,
        "test_enable_input_require_grads_with_gradient_checkpointing": "it looks at embeddings that are one matrix",
        "test_pipeline_image_feature_extraction*": "the small LonghornModel that is saved for the pipelines reads text",
    }


class LonghornBothWaysTest(CommonSuite, unittest.TestCase):
    """Longhorn as an encoder of text."""

    all_model_classes = (hf_recurrent.LonghornModel, hf_recurrent.LonghornForSequenceClassification)
    extra_fields = {"bidirectional": True}
    not_applicable = {"test_causal_lm_loss_honors_shift_labels": "not a language model"}


class TrainingSuite(Suite, MIXINS.test_training_mixin.TrainingTesterMixin):
    """One class, which has to learn a batch by heart."""

    def _get_model_modality(self):
        return "text"  # the only one that the mixin knows how to train with; what the batch holds is up to us

    def _create_text_training_batch(self, batch_size, seq_length, vocab_size):
        batch = super()._create_text_training_batch(batch_size, seq_length, vocab_size)
        (model_class,) = self.all_model_classes
        if head(model_class) == "ForCausalLM":
            return batch
        labels = torch.arange(batch_size)
        if self.model_tester_class in (FeatureTester, ImageTester):
            _, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            (name, x), *_ = inputs.items()
            if head(model_class) == "ForTokenClassification":
                labels = (x.sum(-1) > 0).long()
            return {name: x[:batch_size].cpu(), "labels": labels[:batch_size].cpu()}
        ids = torch.stack([ids.roll(row) for row, ids in enumerate(batch["input_ids"])])
        if head(model_class) == "ForTokenClassification":
            labels = ids % 2
        if self.model_tester_class is PairTester:
            ids = torch.stack([ids, ids[:1].expand_as(ids)], dim=1)
        return {"input_ids": ids, "labels": labels}


def define(name: str, *bases: type, **attributes) -> None:
    """A suite under its name in this module, where pytest finds it."""
    globals()[name] = type(name, (*bases, unittest.TestCase), {"__module__": __name__, **attributes})


for config_class, model_classes in TEXT_CLASSES.items():
    base = GateLoopSuite if config_class is hf_recurrent.GateLoopConfig else GenerativeSuite
    tasks = {task: (model_class,) for model_class in model_classes for task in PIPELINES[head(model_class)]}
    define(
        config_class.__name__.replace("Config", "Test"),
        base,
        all_model_classes=model_classes,
        pipeline_model_mapping=tasks,
        applicable=base.applicable + pipeline_tests(tasks),
    )
    for model_class in model_classes:
        if head(model_class) != "Model":  # which has no loss
            define(f"{model_class.__name__}Training", TrainingSuite, all_model_classes=(model_class,))


class S5ForDocumentMatchingTraining(TrainingSuite, unittest.TestCase):
    all_model_classes = (hf_recurrent.S5ForDocumentMatching,)
    model_tester_class = PairTester
    training_overfit_learning_rate = 3e-3  # its first gradients are small: two pairs with opposite labels


class S5FeaturesForSequenceClassificationTraining(TrainingSuite, unittest.TestCase):
    all_model_classes = (hf_recurrent.S5ForSequenceClassification,)
    model_tester_class = FeatureTester
    extra_fields = S5FeaturesTest.extra_fields


class S5FeaturesForTokenClassificationTraining(S5FeaturesForSequenceClassificationTraining):
    all_model_classes = (hf_recurrent.S5ForTokenClassification,)


class LonghornForImageClassificationTraining(TrainingSuite, unittest.TestCase):
    all_model_classes = (hf_recurrent.LonghornForImageClassification,)
    model_tester_class = ImageTester
    extra_fields = IMAGES


SUITES = [
    x for x in globals().values() if isinstance(x, type) and issubclass(x, Suite) and issubclass(x, unittest.TestCase)
]


def test_every_class_has_a_suite():
    covered = {model_class for suite in SUITES for model_class in suite.all_model_classes}
    classes = [getattr(hf_recurrent, name) for name in hf_recurrent.__all__]
    classes = {x for x in classes if isinstance(x, type) and issubclass(x, transformers.PreTrainedModel)}
    assert classes - covered == set()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version(LISTED_FOR), reason=f"the lists are those of {LISTED_FOR}"
)
def test_every_listed_name_is_that_of_a_test():
    for suite in SUITES:
        names = {name for name in dir(suite) if name.startswith("test_")}
        unknown = [
            name
            for name in (*suite.applicable, *suite.not_applicable, *suite.cannot_pass)
            if not any(fnmatch(x, name) for x in names)
        ]
        assert not unknown, f"{suite.__name__} lists {unknown}"
    names = {name for suite in SUITES for name in dir(suite) if name.startswith("test_")}
    assert [pattern for pattern in (*NOT_APPLICABLE, *NEEDS) if not any(fnmatch(x, pattern) for x in names)] == []
