"""Other people's formats and tools: safetensors' metadata, bfloat16, torch.export."""

import copy
import subprocess
import sys
import sysconfig
import warnings

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import hf_recurrent
from hf_recurrent.hub.decode_step import DecodeStep, export_decode_step
from hf_recurrent.hub.staging import load, stage

TINY = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "initializer_range": 0.4}
FAMILIES = {
    "gateloop": hf_recurrent.GateLoopConfig(**TINY, conv_kernel=3),
    "longhorn": hf_recurrent.LonghornConfig(**TINY, state_size=4, dt_rank=2),  # torchao has no place for one column
    "mingru": hf_recurrent.MinGRUConfig(**TINY),
    "minlstm": hf_recurrent.MinLSTMConfig(**TINY, candidate="vanilla"),
    "s5": hf_recurrent.S5Config(**TINY, state_size=8, num_blocks=2, conv_kernel=3),
}
each_family = pytest.mark.parametrize("name", FAMILIES)


def small(name: str, dtype: torch.dtype = torch.float32, **options):
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[name])
    config.update(options)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@each_family
def test_bfloat16_and_metadata_of_the_files(name, tmp_path):
    model = small(name, torch.bfloat16)
    stage(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118  (not a dict)
    back = load(tmp_path).eval()
    assert back.dtype == torch.bfloat16
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name, options",
    [(name, {"learned_initial_state": learned}) for name in FAMILIES for learned in (False, True)]
    + [("gateloop", {"num_heads": 2})],
)
def test_a_decode_step_as_a_program(name, options, tmp_path):
    """Saved, loaded, and run over a text: the logits and the states of the model that reads it at once."""
    model = small(name, **options)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("initial_state"):
            torch.nn.init.normal_(parameter)
    torch.export.save(export_decode_step(model, batch_size=2), tmp_path / "step.pt2")
    program = torch.export.load(tmp_path / "step.pt2")
    assert all("hf_recurrent" not in str(node.target) for node in program.graph.nodes if node.op == "call_function")
    step, wrapper = program.module(), DecodeStep(model, batch_size=2)
    ids = torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    states = wrapper.initial_states
    with torch.no_grad():
        expected = model(ids, use_cache=True)
        for place in range(7):
            logits, states = step(ids[:, place : place + 1], states)
            torch.testing.assert_close(logits, expected.logits[:, place], rtol=1e-4, atol=1e-5)
    for (index, key), state in zip(wrapper.names, states, strict=True):
        torch.testing.assert_close(state, expected.past_key_values.layers[index].states[key], rtol=1e-4, atol=1e-5)


def test_a_decode_step_runs_without_this_package(tmp_path):
    model = small("longhorn")
    torch.export.save(export_decode_step(model), tmp_path / "step.pt2")
    torch.save(DecodeStep(model).initial_states, tmp_path / "states.pt")
    program = (
        f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r}); import torch\n"
        "states = torch.load('states.pt', weights_only=True)\n"
        "logits, _ = torch.export.load('step.pt2').module()(torch.tensor([[5]]), states)\n"
        "assert not [name for name in sys.modules if name.startswith('hf_recurrent')]\n"
        "torch.save(logits, 'logits.pt')\n"
    )
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logits = torch.load(tmp_path / "logits.pt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(torch.tensor([[5]])).logits[:, -1], rtol=1e-5, atol=1e-5)


@each_family
def test_int8_weights_of_torchao(name, tmp_path):
    """On the CPU: near the model's own logits, and the same again from a file."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from transformers import TorchAoConfig

    model = small(name)
    model.save_pretrained(tmp_path / "full")
    settings = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "full", quantization_config=settings)
    assert "Int8Tensor" in {type(parameter).__name__ for parameter in narrow.parameters()}
    ids = torch.arange(9)[None]
    with torch.no_grad():
        logits, full = narrow(ids).logits, model(ids).logits
    assert (logits - full).norm() < 0.05 * full.norm()
    narrow.save_pretrained(tmp_path / "narrow")
    with torch.no_grad():
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow")(ids).logits
    torch.testing.assert_close(back, logits, rtol=0, atol=0)


@each_family
def test_a_model_as_a_program_of_any_size(name):
    model, ids = small(name), torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", min=2)}
    inputs, shapes = {"input_ids": ids, "use_cache": False}, {"input_ids": sizes, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
        for batch, length in ((2, 9), (5, 23), (1, 2)):
            ids = torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(1))
            got, want = program(input_ids=ids, use_cache=False).logits, model(ids, use_cache=False).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@each_family
def test_what_replaces_linear_layers_finds_them(name):
    """Quantisers look for nn.Linear itself, and pass over other classes in silence."""
    model, ids = small(name), torch.arange(9)[None]
    projections = [module for module in model.model.modules() if isinstance(module, torch.nn.Linear)]
    assert projections and all(type(module) is torch.nn.Linear for module in projections)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        narrow = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model.model), {torch.nn.Linear})
    assert not any(isinstance(module, torch.nn.Linear) for module in narrow.modules())
    with torch.no_grad():
        for some in (ids, ids[:, :1]):
            got, want = narrow(some).last_hidden_state, model.model(some).last_hidden_state
            assert 0 < (got - want).abs().max() < 0.3 * want.abs().max()
