"""The benchmark that finds how a scan is best divided, its kernels run on the host."""

import json
import sys
from pathlib import Path

import pytest
import torch

from hf_recurrent.scan import cuda, cuda_kernels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tuning(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])
    import gpu_tuning

    return gpu_tuning


def test_every_case_has_plans_that_fit(tuning):
    b = tuning.gpu.Bench(torch.device("cpu"), False, 1.0)
    for case in tuning.cases(b, []):
        plans = case.plans()
        for backward in (False, True):
            steps = [(plan, plan.back if backward else plan.ahead) for plan in plans]
            steps = [(plan, found) for plan, found in steps if found is not None]
            assert len({(plan.threads, plan.row, found) for plan, found in steps}) == len(steps) > 10, case.name
            for plan, found in steps:
                assert case.registers(found.steps, backward) < 65536 / (plan.threads * found.blocks)
        assert len({case.module(plan) for plan in plans}) == len(plans)
    assert cuda.module_for("linear", torch.float32, 4).macros[3] == ("HFR_THREADS", "256")  # nothing of it stays


def test_a_run(tuning, host, tmp_path, monkeypatch):
    """Two divisions of one cell; a launch that fails is recorded, and the others go on."""
    b = tuning.gpu.Bench(torch.device("cpu"), True, 1.0)
    [case] = tuning.cases(b, ["mingru_positive bfloat16"])
    plans = [plan for plan in case.plans() if plan.threads == 128][:2]
    monkeypatch.setattr(tuning.Case, "plans", lambda self: plans)
    monkeypatch.setattr(tuning, "seconds_of", lambda calls, *_: len([call() for call in calls[:1]]))
    threads = []

    def launch(module, entry, device, grid, count, arguments):
        threads.append(count)
        if entry == "scan_backward" and dict(module.macros)["HFR_STEPS_BACK"] == str(plans[1].back.steps):
            raise RuntimeError("too many resources requested for launch")
        host.launch(module, entry, device, grid, count, arguments)

    monkeypatch.setattr(cuda_kernels, "launch", launch)
    document = tuning.run(b, [case], (2, 9, 40), tmp_path, "a command")
    assert set(threads) == {256, 128}
    rows = json.loads((tmp_path / "no-gpu-tuning.json").read_text())["results"]
    assert rows == document["results"] and len(rows) == 6
    assert ["steps" in row for row in rows] == [False, False, True, True, True, True]
    assert [row.get("error") for row in rows] == [None] * 5 + ["RuntimeError: too many resources requested for launch"]
    table = (tmp_path / "no-gpu-tuning.md").read_text()
    assert f"128 threads, {plans[0].row} side by side, {plans[0].ahead.steps} steps" in table


def test_what_reads_once_has_kernels_of_its_own(tuning, monkeypatch):
    b = tuning.gpu.Bench(torch.device("cpu"), False, 1.0)
    [case] = tuning.cases(b, ["mingru_positive bfloat16"])
    twice = {case.module(plan) for plan in case.plans()}
    monkeypatch.setattr(cuda, "READ_ONCE", True)
    assert not twice & {case.module(plan) for plan in case.plans()}


def test_bad_input_is_said(tuning, capsys):
    with pytest.raises(SystemExit):
        tuning.main(["--compile", "sm_90", "--only", "mamba"])
    assert "--only mamba: there are linear float32, " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu(tuning, capsys):
    with pytest.raises(SystemExit):
        tuning.main([])
    assert "PyTorch sees no CUDA device; --compile needs none" in capsys.readouterr().err
