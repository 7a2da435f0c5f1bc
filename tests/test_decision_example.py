"""examples/decision.py, on a small budget."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hf_recurrent import RecurrentCache
from hf_recurrent.training.model import families

pytest.importorskip("gymnasium", reason="gymnasium is not installed")
SCRIPT = Path(__file__).parents[1] / "examples" / "decision.py"


@pytest.fixture(scope="module")
def decision():
    spec = importlib.util.spec_from_file_location("decision", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("family", ["mingru", "longhorn"])
def test_playing_reads_what_training_reads(decision, family):
    torch.manual_seed(0)
    config = families()[family](hidden_size=8, num_hidden_layers=2, vocab_size=1)
    model = decision.DecisionModel(config, 4, 2, 10.0).double().eval()
    returns, states = torch.rand(3, 6, dtype=torch.float64) * 10, torch.randn(3, 6, 4, dtype=torch.float64)
    actions, mask = torch.randint(2, (3, 6)), torch.ones(3, 6, dtype=torch.long)
    mask[1, 4:] = 0
    with torch.no_grad():
        expected = model(returns, states, actions, mask)
        cache = RecurrentCache(model.backbone.config)
        given = [model.act(cache, actions[:, t - 1] if t else None, returns[:, t], states[:, t]) for t in range(6)]
    given = torch.stack(given, dim=1)
    torch.testing.assert_close(given[mask.bool()], expected[mask.bool()], rtol=1e-9, atol=1e-9)


def test_windows_are_of_episodes(decision):
    recorded = decision.record(6, 1)
    again = decision.record(6, 1)
    assert all(np.array_equal(a.states, b.states) for a, b in zip(recorded, again, strict=True))
    for episode in recorded:
        assert episode.returns_to_go.tolist() == list(range(len(episode.actions), 0, -1))
    examples = decision.batch(recorded, np.random.default_rng(0), 5, 7)
    assert examples["states"].shape == (*examples["mask"].shape, 4) and examples["mask"].shape[1] <= 7
    for returns, mask in zip(examples["returns"], examples["mask"], strict=True):
        real = returns[mask.bool()]
        assert (real[:-1] - real[1:] == 1).all() and (returns[~mask.bool()] == 0).all()


def test_the_script(decision, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    flags = "--hidden-size 16 --episodes 12 --steps 12 --batch-size 8 --window 8 --asked-for 30 --games 2".split()
    decision.main([*flags, "--output", str(tmp_path / "d.safetensors")])
    said = capsys.readouterr().out
    assert "Recorded: 12 episodes" in said and "Asked for 30:" in said and "in 2 games" in said
    with safe_open(tmp_path / "d.safetensors", "pt") as file:
        assert "embed_return.weight" in file.keys()  # noqa: SIM118  (it is no dict)
    for example in decision.EPILOG.splitlines()[1:]:
        decision.parse(example.split()[2:])
    for bad, message in ((["--games", "0"], "--games must be at least 1"), (["--output", "x.pt"], ".safetensors")):
        with pytest.raises(SystemExit):
            decision.main(bad)
        assert message in capsys.readouterr().err
