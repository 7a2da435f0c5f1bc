"""Vision Longhorn: the tokens of an image, the head, the image processor, and what cannot be an image."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    DefaultDataCollator,
    Trainer,
    TrainingArguments,
    pipeline,
)

# As a user of Transformers 5.18 or later, or with torchvision, has it from `transformers`.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from hf_recurrent import (
    LonghornConfig,
    LonghornForCausalLM,
    LonghornForImageClassification,
    LonghornForSequenceClassification,
    LonghornImageProcessor,
    LonghornModel,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64
MNIST = Path(__file__).parents[2].parent / "shared" / "data" / "mnist"
IMAGES = {"image_size": 12, "patch_size": 4, "bidirectional": True}


def tiny(**options) -> LonghornConfig:
    return LonghornConfig(**{**IMAGES, "hidden_size": 12, "num_hidden_layers": 2, "state_size": 4, **options})


def fresh(config, dtype=torch.float64, model_class=LonghornForImageClassification):
    torch.manual_seed(0)
    return model_class(config).to(dtype).eval()


@pytest.mark.parametrize(
    "name, width, parameters, paper", [("tiny", 192, 6853096, 7e6), ("small", 384, 25206760, 26e6)]
)
def test_presets(name, width, parameters, paper):
    config = LonghornConfig.from_preset(f"vision-longhorn-{name}")
    assert (config.num_hidden_layers, config.hidden_size, config.image_size, config.patch_size) == (24, width, 224, 16)
    with torch.device("meta"):
        model = AutoModelForImageClassification.from_config(config)
    # The width and the depth of Vision Mamba, whose A (d x m, in both directions) Longhorn does without.
    assert model.num_parameters() == parameters
    with_a = parameters + 24 * 2 * config.recurrent_size * config.state_size
    assert with_a == pytest.approx(paper, rel=0.022) and parameters == pytest.approx(paper, rel=0.031)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("image_size", [12, 8])
@torch.no_grad()
def test_the_tokens_of_an_image(image_size):
    """Odd and even numbers of patches, each one read by hand."""
    config = tiny(image_size=image_size, num_channels=2)
    model = fresh(config, model_class=LonghornModel)
    embed, image = model.embed_patches, torch.randn(1, 2, image_size, image_size).double()
    rows = range(0, image_size, 4)
    patches = [image[0, :, i : i + 4, j : j + 4] for i in rows for j in rows]
    tokens = [(embed.projection.weight * patch).sum((1, 2, 3)) + embed.projection.bias for patch in patches]
    tokens.insert(len(patches) // 2, embed.class_token[0, 0])
    expected = torch.stack(tokens)[None] + embed.position_embeddings
    torch.testing.assert_close(embed(image), expected, **CLOSE)
    torch.testing.assert_close(
        model(pixel_values=image).last_hidden_state, model(inputs_embeds=expected).last_hidden_state, **CLOSE
    )


@torch.no_grad()
def test_other_sizes_interpolate_the_positions():
    model = fresh(tiny(image_size=16))
    embed, size = model.model.embed_patches, (24, 12)
    images = torch.randn(2, 3, *size).double()
    grid = embed.position_embeddings[0, torch.arange(17) != 8].T.view(1, 12, 4, 4)
    grid = F.interpolate(grid, size=(6, 3), mode="bicubic", align_corners=False)[0].flatten(1).T
    patches = embed.projection(images).flatten(2).mT + grid
    token = (embed.class_token + embed.position_embeddings[:, 8]).expand(2, -1, -1)
    expected = torch.cat([patches[:, :9], token, patches[:, 9:]], dim=1)
    torch.testing.assert_close(embed(images, True), expected, **CLOSE)
    hidden = model.model(inputs_embeds=expected).last_hidden_state
    out = model(images, interpolate_pos_encoding=True)
    torch.testing.assert_close(out.logits, model.score(hidden[:, 9]), **CLOSE)
    own = torch.randn(2, 3, 16, 16).double()
    assert torch.equal(model(own, interpolate_pos_encoding=True).logits, model(own).logits)


def test_initial_weights():
    model = LonghornForImageClassification(tiny(hidden_size=64, image_size=64))
    embed = model.model.embed_patches
    for parameter, std in (
        (embed.projection.weight, 1 / 48**0.5),
        (embed.position_embeddings, 0.25 / 8),
        (embed.class_token, 0.25 / 8),
        (model.score.weight, 0.25 / 8),
    ):
        assert parameter.std().item() == pytest.approx(std, rel=0.3)
    assert (embed.projection.bias == 0).all() and model.get_input_embeddings() is embed
    wide = LonghornForImageClassification(tiny(hidden_size=64, image_size=64, initializer_range=0.5))
    for parameter in (wide.model.embed_patches.projection.weight, wide.model.embed_patches.position_embeddings):
        assert parameter.std().item() == pytest.approx(0.5, rel=0.1)


# ---- the head --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_every_patch_reaches_the_class_token():
    model = fresh(tiny(initializer_range=0.4))
    image = torch.randn(1, 3, 12, 12).double()
    for row in range(0, 12, 4):
        for column in range(0, 12, 4):
            changed = image.clone()
            changed[..., row : row + 4, column : column + 4] += 1
            assert (model(changed).logits - model(image).logits).abs().max() > 1e-6


@torch.no_grad()
def test_masked_patches_change_nothing():
    model = fresh(tiny())
    image = torch.randn(1, 3, 12, 12).double()
    mask = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1, 1, 0]])  # patches 1 and 8; the class token is number 4
    changed = image.clone()
    changed[..., :4, 4:8] += 1
    changed[..., 8:, 8:] += 1
    assert torch.equal(model(image, attention_mask=mask).logits, model(changed, attention_mask=mask).logits)
    assert not torch.equal(model(image).logits, model(changed).logits)


@pytest.mark.parametrize(
    "options, labels, loss",
    [
        ({"num_labels": 3}, torch.tensor([0, 2]), F.cross_entropy),
        ({"num_labels": 1}, torch.randn(2).double(), F.mse_loss),
        ({"num_labels": 3, "problem_type": "regression"}, torch.randn(2, 3).double(), F.mse_loss),
        ({"num_labels": 3}, torch.tensor([[1, 0, 1], [0, 0, 1]]).double(), F.binary_cross_entropy_with_logits),
    ],
    ids=["classes", "number", "numbers", "multi-label"],
)
def test_losses(options, labels, loss):
    model = fresh(tiny(**options))
    out = model(torch.randn(2, 3, 12, 12).double(), labels=labels)
    torch.testing.assert_close(out.loss, loss(out.logits.squeeze(-1), labels))
    out.loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def test_checkpointing_gives_the_same_gradients():
    model = fresh(tiny()).train()
    batch = {"pixel_values": torch.randn(2, 3, 12, 12).double(), "labels": torch.tensor([0, 1])}
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(**batch).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.gradient_checkpointing_enable()
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers(dtype):
    model = fresh(tiny(), torch.float32)
    images = torch.randn(2, 3, 12, 12)
    expected = model(images).logits
    with torch.autocast("cpu", dtype):
        out = model(images, labels=torch.tensor([0, 1]))
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    for logits in (out.logits, model.to(dtype)(images).logits):
        assert logits.dtype is dtype
        assert (logits - expected).square().mean() < 0.05**2 * expected.square().mean()


def test_hidden_states_and_saving(tmp_path):
    model = fresh(tiny(num_labels=4), torch.float32)
    images = torch.randn(2, 3, 12, 12)
    out = model(images, output_hidden_states=True)
    assert [tuple(x.shape) for x in out.hidden_states] == [(2, 10, 12)] * 3
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    for kwargs in ({}, {"device_map": "auto"}):
        loaded, report = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True, **kwargs)
        assert type(loaded) is LonghornForImageClassification and loaded.main_input_name == "pixel_values"
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert torch.equal(loaded(images).logits, out.logits)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(backbone(pixel_values=images).last_hidden_state, out.hidden_states[-1])
    wider = AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=7, ignore_mismatched_sizes=True)
    assert wider(images).logits.shape == (2, 7)
    torch.testing.assert_close(wider.model.state_dict(), model.model.state_dict())


# ---- the image processor and what is built on it ---------------------------------------------------------------------


def picture(height=30, width=20, mode="RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def test_the_processor_does_what_vision_mamba_is_evaluated_with():
    image = picture(300, 400)
    pixels = LonghornImageProcessor()(image, return_tensors="pt").pixel_values
    resized = np.asarray(image.resize((341, 256), Image.Resampling.BICUBIC), dtype=np.float64)
    top, left = (256 - 224) // 2, (341 - 224) // 2
    crop = resized[top : top + 224, left : left + 224] / 255
    expected = (crop - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert pixels.shape == (1, 3, 224, 224) and pixels.dtype is torch.float32
    torch.testing.assert_close(pixels[0].permute(1, 2, 0).double(), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_processor_is_saved_and_found(tmp_path):
    processor = LonghornImageProcessor(
        size=28, do_center_crop=False, do_convert_rgb=False, image_mean=[0.5], image_std=[0.5]
    )
    grey = picture(mode="L")
    pixels = processor([grey, grey.rotate(90)], return_tensors="pt").pixel_values
    assert pixels.shape == (2, 1, 28, 28) and -1 <= pixels.min() < 0 < pixels.max() <= 1
    processor.save_pretrained(tmp_path)
    loaded = AutoImageProcessor.from_pretrained(tmp_path)
    assert type(loaded) is LonghornImageProcessor and loaded.to_dict() == processor.to_dict()
    assert torch.equal(loaded([grey, grey.rotate(90)], return_tensors="pt").pixel_values, pixels)
    assert LonghornImageProcessor()(grey, return_tensors="pt").pixel_values.shape == (1, 3, 224, 224)  # made RGB


def test_pipeline(tmp_path):
    config = tiny(image_size=32, patch_size=8, id2label={0: "cat", 1: "dog", 2: "fox"}, initializer_range=0.4)
    model = fresh(config, torch.float32)
    model.save_pretrained(tmp_path)
    processor = LonghornImageProcessor(size=32, do_center_crop=False)
    processor.save_pretrained(tmp_path)
    images = [picture(), picture(40, 50), picture(mode="L")]
    answers = pipeline("image-classification", model=str(tmp_path))(images, batch_size=2)
    scores = model(**processor(images, return_tensors="pt")).logits.softmax(-1)
    for answer, expected in zip(answers, scores.tolist(), strict=True):
        assert {x["label"]: x["score"] for x in answer} == pytest.approx(
            dict(zip(("cat", "dog", "fox"), expected, strict=True)), rel=1e-4
        )


def test_trainer(tmp_path):
    """Overfits a batch, and the saved model has its loss."""
    model = fresh(tiny(hidden_size=24, num_labels=4), torch.float32)
    data = [{"pixel_values": x, "labels": i % 4} for i, x in enumerate(torch.randn(8, 3, 12, 12))]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=40, learning_rate=1e-2,
        warmup_steps=2, logging_steps=40, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, data_collator=DefaultDataCollator(), train_dataset=data, eval_dataset=data)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    assert loss < 0.05
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "saved")
    batch = DefaultDataCollator()(data)
    with torch.no_grad():
        assert loaded(**batch).loss.item() == pytest.approx(loss, rel=1e-4)


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"no digits at {MNIST.name}")
def test_digits():
    """A small model soon tells most of the unseen ones."""
    images = np.frombuffer(gzip.open(MNIST / "t10k-images-idx3-ubyte.gz").read(), np.uint8, offset=16)
    labels = np.frombuffer(gzip.open(MNIST / "t10k-labels-idx1-ubyte.gz").read(), np.uint8, offset=8)
    processor = LonghornImageProcessor(
        do_resize=False, do_center_crop=False, do_convert_rgb=False, image_mean=[0.13], image_std=[0.31]
    )
    images = [Image.fromarray(image) for image in images.reshape(-1, 28, 28)[:2500]]
    images = processor(images, return_tensors="pt").pixel_values
    labels = torch.tensor(labels[:2500]).long()
    config = tiny(image_size=28, patch_size=7, num_channels=1, hidden_size=32, num_labels=10)
    model = fresh(config, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        chosen = torch.randint(0, 2000, (64,))
        model(images[chosen], labels=labels[chosen]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        predicted = model.eval()(images[2000:]).logits.argmax(-1)
    assert (predicted == labels[2000:]).float().mean() > 0.6


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"image_size": 13}, "image_size must be None or a multiple of patch_size, got image_size=13, patch_size=4"),
        ({"image_size": 0}, "image_size must be None or a multiple of patch_size, got image_size=0"),
        ({"image_size": "12"}, "'image_size'"),
        ({"patch_size": 0}, "expected an integer of at least 1, got 0"),
        ({"num_channels": 0}, "expected an integer of at least 1, got 0"),
        ({"bidirectional": False}, "image_size=12 needs bidirectional=True, got bidirectional=False"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(StrictDataclassError, match=message):
        tiny(**options)


@pytest.mark.parametrize(
    "pixel_values, message",
    [
        (
            torch.zeros(3, 12, 12),
            r"must be floats of the shape \(batch, 3, height, width\), got torch.float32 .* \(3, 12",
        ),
        (
            torch.zeros(2, 1, 12, 12),
            r"shape \(batch, 3, height, width\), got torch.float32 of the shape \(2, 1, 12, 12\)",
        ),
        (torch.zeros(2, 3, 12, 12, dtype=torch.uint8), "must be floats of the shape .* got torch.uint8"),
        (torch.zeros(2, 3, 16, 12), "images of 12 x 12 pixels, got 16 x 12: other sizes need interpolate_pos_encoding"),
        (torch.zeros(0, 3, 12, 12), r"pixel_values is empty, with the shape \(0, 3, 12, 12\)"),
        (None, "exactly one of pixel_values or inputs_embeds"),
    ],
    ids=["rank", "channels", "integers", "size", "empty", "none"],
)
def test_what_is_no_image(pixel_values, message):
    with pytest.raises(ValueError, match=message):
        fresh(tiny(), torch.float32)(pixel_values)


def test_what_cannot_be_honoured():
    model, image = fresh(tiny(), torch.float32), torch.zeros(1, 3, 12, 12)
    with pytest.raises(ValueError, match="must be multiples of patch_size=4, got 14 x 12"):
        model(torch.zeros(1, 3, 14, 12), interpolate_pos_encoding=True)
    with pytest.raises(IndexError, match=r"labels holds the class 2, outside the 2 classes \(0 to 1\)"):
        model(image, labels=torch.tensor([2]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'bool_masked_pos'"):
        model(image, bool_masked_pos=torch.zeros(1, 9))
    with pytest.raises(ValueError, match="output_attentions=True"):
        model(image, output_attentions=True)
    with pytest.raises(ValueError, match="a bidirectional Longhorn has no state to carry on"):
        model.model(pixel_values=image, use_cache=True)
    with pytest.raises(ValueError, match="LonghornForImageClassification returns no states: use_cache must be False"):
        model(image, use_cache=True)


def test_images_and_token_ids_are_kept_apart():
    ids, image = torch.ones(1, 4, dtype=torch.long), torch.zeros(1, 3, 12, 12)
    with pytest.raises(ValueError, match=r"reads images \(image_size=12\): pass pixel_values, not input_ids"):
        fresh(tiny(), model_class=LonghornModel)(ids)
    text = LonghornModel(LonghornConfig(vocab_size=5, hidden_size=8, num_hidden_layers=1))
    for arguments in ({"pixel_values": image}, {"input_ids": ids, "interpolate_pos_encoding": True}):
        with pytest.raises(ValueError, match=r"reads token ids \(image_size=None\): pass input_ids, not pixel_values"):
            text(**arguments)
    for model_class in (LonghornForCausalLM, LonghornForSequenceClassification):
        with pytest.raises(
            ValueError, match=f"{model_class.__name__} reads token ids: it needs image_size=None, got 12"
        ):
            model_class(tiny())
    with pytest.raises(
        ValueError, match="LonghornForImageClassification reads images: it needs an image_size, got Non"
    ):
        LonghornForImageClassification(LonghornConfig())
