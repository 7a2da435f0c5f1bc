"""What Transformers' `PipelineTesterMixin` runs for each task, and small models for it.

Its own checks and models are in neither the source distribution nor the package. The mixin asks for a class per task
with the two methods of `PipelineChecks`, and for saved models with tokenizers.
"""

import json
import math
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, pipeline

TEXTS = ["one", "a longer text, of two parts"]


def save_tiny_models(folder: Path, tiny_models: dict[type[PreTrainedModel], PreTrainedConfig]) -> None:
    """Writes a model of each class and a tokenizer of single characters into `folder`, laid out as the mixin wants."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", *string.printable[:95]])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")
    torch.manual_seed(0)
    for model_class, config in tiny_models.items():
        target = folder / config.model_type / model_class.__name__
        model_class(config).save_pretrained(target)
        tokenizer.save_pretrained(target)
    summary = folder / "reports" / "tiny_model_summary.json"
    summary.parent.mkdir()
    entry = {"tokenizer_classes": ["PreTrainedTokenizerFast"], "processor_classes": []}
    summary.write_text(json.dumps({model_class.__name__: entry for model_class in tiny_models}))


class PipelineChecks:
    """A text gives the same result alone and in a batch with padding on the left, and the result has the right form."""

    task: str
    options = {}

    def get_test_pipeline(self, model, tokenizer=None, dtype="float32", **processors):
        pipe = pipeline(self.task, model=model, tokenizer=tokenizer, dtype=dtype, device="cpu", **self.options)
        return pipe, TEXTS

    def run_pipeline_test(self, pipe, texts):
        assert pipe.model.dtype == pipe.dtype
        alone = [self.numbers(pipe([text])[0], text) for text in texts]
        together = [self.numbers(*pair) for pair in zip(pipe(texts, batch_size=len(texts)), texts, strict=True)]
        tolerance = 1e-5 if pipe.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(together, alone, rtol=tolerance, atol=tolerance)

    def numbers(self, result, text: str) -> torch.Tensor:
        """The numbers to compare in what the pipeline gives for one text, whose form is checked."""
        raise NotImplementedError


class FeatureExtractionPipelineTests(PipelineChecks):
    task = "feature-extraction"
    options = {"return_tensors": True}

    def numbers(self, result, text):
        assert result.ndim == 3 and len(result) == 1
        return result[:, -len(text) :].float()


class TextGenerationPipelineTests(PipelineChecks):
    task = "text-generation"
    options = {"max_new_tokens": 5, "do_sample": False}

    def numbers(self, result, text):
        (generated,) = result
        assert generated["generated_text"].startswith(text) and len(generated["generated_text"]) > len(text)
        return torch.tensor([ord(character) for character in generated["generated_text"]])


class TextClassificationPipelineTests(PipelineChecks):
    task = "text-classification"
    options = {"top_k": None}

    def numbers(self, result, text):
        scores = {entry["label"]: entry["score"] for entry in result}
        assert sorted(scores) == ["LABEL_0", "LABEL_1"]
        assert math.isclose(sum(scores.values()), 1, rel_tol=1e-2)
        return torch.tensor([scores[label] for label in sorted(scores)])


class TokenClassificationPipelineTests(PipelineChecks):
    task = "token-classification"

    def numbers(self, result, text):
        assert [entry["word"] for entry in result] == list(text)
        return torch.tensor([float(entry["score"]) for entry in result])


class ZeroShotClassificationPipelineTests(PipelineChecks):
    task = "zero-shot-classification"
    options = {"candidate_labels": ["true", "untrue", "neither"]}

    def numbers(self, result, text):
        assert result["sequence"] == text
        scores = dict(zip(result["labels"], result["scores"], strict=True))
        assert math.isclose(sum(scores.values()), 1, rel_tol=1e-2)
        return torch.tensor([scores[label] for label in self.options["candidate_labels"]])


def __getattr__(name: str) -> type:
    """Older versions import the classes of all tasks; ours do only the tasks above."""
    if name.endswith("PipelineTests"):
        return PipelineChecks
    raise AttributeError(name)
