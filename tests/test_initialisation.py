"""benchmarks/initialisation.py at a small size, and what its figures must be: no signal or gradient lost in depth."""

import json
from pathlib import Path

import pytest
import torch

from hf_recurrent import FAMILIES


@pytest.fixture
def initialisation(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import initialisation

    return initialisation


def test_the_files_hold_every_layer(initialisation, tmp_path, capsys):
    flags = ["--layers", "3", "--width", "16", "--length", "50", "--batch", "2"]
    initialisation.main([*flags, "--output", str(tmp_path / "new")])
    document = json.loads((tmp_path / "new" / "initialisation.json").read_text())
    assert document["command"] == " ".join(["python benchmarks/initialisation.py", *flags])
    assert set(document["families"]) == {config_class.model_type for config_class in FAMILIES}
    for found in document["families"].values():
        figures = [x for x in found.values() if isinstance(x, list)]
        assert len(figures) == 4 and all(len(x) == 3 and min(x) > 0 for x in figures)
        assert found["loss"] == pytest.approx(found["loss of a uniform guess"], rel=0.02)
    assert (tmp_path / "new" / "initialisation.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(family in printed for family in document["families"])


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--layers", "0"], "expected a whole number from 1 on, got '0'"),
        (["--families", "mamba"], "invalid choice: 'mamba'"),
        (["--output", __file__], "cannot be written: File exists"),
        (["--length", str(10**9)], "1 rows of 1000000000 bytes are more than the standard library's"),
    ],
)
def test_bad_arguments(initialisation, tmp_path, capsys, flags, complaint):
    with pytest.raises(SystemExit) as caught:
        initialisation.main(["--output", str(tmp_path), *flags])
    assert caught.value.code == 2 and complaint in capsys.readouterr().err


def test_figures_are_root_mean_squares(initialisation):
    config = next(iter(FAMILIES))(vocab_size=256, hidden_size=16, num_hidden_layers=2)
    ids = initialisation.text_bytes(2, 40).long()
    assert ids.shape == (2, 40) and not torch.equal(ids[0], ids[1])
    found = initialisation.measure(config, ids)
    torch.manual_seed(0)
    model = initialisation.AutoModelForCausalLM.from_config(config).train()
    out = model(ids, labels=ids, output_hidden_states=True)
    out.hidden_states[0].retain_grad()
    out.loss.backward()
    assert found["residual"][0] == pytest.approx(out.hidden_states[1].square().mean().sqrt().item(), rel=1e-5)
    assert found["input_gradient"][0] == pytest.approx(
        out.hidden_states[0].grad.square().mean().sqrt().item(), rel=1e-4
    )
    squares = torch.cat([p.grad.flatten() for p in model.model.layers[1].parameters()]).square()
    assert found["parameter_gradient"][1] == pytest.approx(squares.mean().sqrt().item(), rel=1e-4)


@pytest.mark.parametrize("config_class", FAMILIES, ids=lambda config_class: config_class.model_type)
def test_scales_change_with_powers_of_the_depth_only(initialisation, config_class):
    """The residual stream grows at most as sqrt(layers), as a sum of independent terms does, and gradients grow towards
    the first layers, where the stream that norms divide by is small, by no more than the square of the depth."""
    ids = initialisation.text_bytes(1, 256).long()
    growth = {}
    for layers in (6, 24):
        found = initialisation.measure(config_class(vocab_size=256, hidden_size=32, num_hidden_layers=layers), ids)
        assert max(found["residual"]) < 2 * layers**0.5 * max(found["mixer"])
        assert max(found["mixer"]) < 20 * min(found["mixer"])
        # From the second layer on: before the first the stream is the embeddings alone, small for the logits' sake.
        growth[layers] = found["input_gradient"][1] / found["input_gradient"][-1]
    assert 0.5 < growth[24] < (24 / 6) ** 2 * growth[6]
