"""LoRA by peft on every Linear: adapters train, the base stays, merging and files change nothing."""

import pytest
import torch
from families import causal_lm, classifier, each_family, each_variant, token_ids
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64


def linears(model: nn.Module) -> set[str]:
    """The names of all Linear modules but the head."""
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}


def adapted(model: nn.Module, **options) -> PeftModel:
    """`model` with adapters that are not zero, so that they do something from the start."""
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **options))


def loss_and_step(model: nn.Module, **inputs) -> float:
    """One step of training on all that is trainable; the loss before it."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    return loss.item()


@each_variant
@pytest.mark.parametrize("targets", ["all-linear", "named"])
def test_every_linear_takes_an_adapter(config, targets, tmp_path):
    config.hidden_dropout = 0.0
    base = causal_lm(config)
    weights = {name: x.clone() for name, x in base.state_dict().items()}
    names = linears(base)
    input_ids = token_ids(config, 2, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    plain = base(input_ids).logits
    if targets == "named":
        targets = sorted({name.split(".")[-1] for name in names})
    model = adapted(base, target_modules=targets, task_type="CAUSAL_LM")
    assert {name for name, module in base.named_modules() if isinstance(module, LoraLayer)} == names
    assert (model(input_ids).logits - plain).abs().max() > 1e-3

    # In evaluation: in training, a batch norm would change its running statistics, which belong to no adapter.
    loss_and_step(model, input_ids=input_ids, attention_mask=mask, labels=input_ids.masked_fill(mask == 0, -100))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.requires_grad and parameter.grad.abs().sum() > 0, name
        else:
            assert not parameter.requires_grad and parameter.grad is None, name
    (group,) = model.parameter_groups(0.1)
    assert sum(p.numel() for p in group["params"]) == model.get_nb_trainable_parameters()[0]

    logits = model(input_ids).logits
    text = model.generate(input_ids=input_ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.save_pretrained(tmp_path)
    fresh = AutoModelForCausalLM.from_config(config).double().eval()
    fresh.load_state_dict(weights)
    torch.testing.assert_close(PeftModel.from_pretrained(fresh, tmp_path)(input_ids).logits, logits, rtol=0, atol=0)

    with model.disable_adapter():
        assert torch.equal(model(input_ids).logits, plain)
    merged = model.merge_and_unload()
    assert type(merged) is type(base) and not any(isinstance(module, LoraLayer) for module in merged.modules())
    torch.testing.assert_close(merged(input_ids).logits, logits, **CLOSE)
    assert torch.equal(merged.generate(input_ids, max_new_tokens=3, do_sample=False, pad_token_id=0), text)


@each_family
def test_a_classifiers_head_is_trained_beside_the_adapters(config, tmp_path):
    config.num_labels = 3
    model = classifier(config)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    model = adapted(model, target_modules="all-linear", task_type="SEQ_CLS")
    input_ids = token_ids(config, 4, 7)
    labels = torch.tensor([0, 1, 2, 0])
    before = loss_and_step(model.train(), input_ids=input_ids, labels=labels)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("score" in name for name in trained) and any("lora_" in name for name in trained)
    model.eval()
    out = model(input_ids=input_ids, labels=labels)
    assert out.loss.item() < before
    model.save_pretrained(tmp_path)
    fresh = classifier(config)
    fresh.load_state_dict(weights)
    torch.testing.assert_close(PeftModel.from_pretrained(fresh, tmp_path)(input_ids).logits, out.logits, rtol=0, atol=0)


@each_family
def test_adapters_train_under_gradient_checkpointing(config):
    """Nothing before the first adapter needs a gradient, so the checkpoints must be told to keep one."""
    config.hidden_dropout = 0.0
    model = adapted(causal_lm(config), target_modules="all-linear", task_type="CAUSAL_LM").train()
    input_ids = token_ids(config, 2, 9)

    def gradients():
        model.zero_grad()
        model(input_ids=input_ids, labels=input_ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    expected = gradients()
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()
        for got, want in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(got, want, **CLOSE)
