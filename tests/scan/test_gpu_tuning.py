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
    with pytest.raises(SystemExit):
        tuning.main(["--compile", "sm_90", "--shape", "1", "0", "8"])
    assert "--shape: must be between 1 and 2147483648, got 0" in capsys.readouterr().err


def test_an_architecture_that_the_compiler_does_not_know(tuning, tmp_path, monkeypatch, capsys):
    """Is said once, not of each kernel."""
    pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")
    monkeypatch.setenv("HF_RECURRENT_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "compile_all", None)
    with pytest.raises(SystemExit) as stopped:
        tuning.main(["--compile", "sm_1", "--only", "s5"])
    *_, said = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert "error: --compile sm_1: NVRTC could not compile the kernels scan_cuda (" in said and " for sm_1: " in said


def test_kernels_that_cannot_be_compiled_are_named(tuning, monkeypatch, capsys):
    class Broken:
        __init__ = __exit__ = lambda *_: None

        def __enter__(self):
            return self

        def run(self, tasks):
            return [(0, None, 0.0), (1, "BackendUnavailable: out of order", 0.0)]

    monkeypatch.setattr(tuning.gpu_check, "Pool", Broken)
    monkeypatch.setattr(cuda_kernels, "cubin", lambda module, architecture: b"")
    monkeypatch.setattr(cuda_kernels, "is_compiled", lambda module, architecture: False)
    plans = [tuning.Plan(128, 8, cuda.Tuning(4, 2), None), tuning.Plan(256, 8, cuda.Tuning(4, 2), cuda.Tuning(2, 1))]
    monkeypatch.setattr(tuning.Case, "plans", lambda self: plans)
    assert tuning.main(["--compile", "sm_90", "--only", "s5_zoh"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("s5_zoh complex64, ") and said.endswith("blocks: BackendUnavailable: out of order\n")
    assert " threads, 8 side by side; forward 4 steps, 2 blocks" in said and len(said) < 160


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu(tuning, capsys):
    with pytest.raises(SystemExit):
        tuning.main([])
    assert "PyTorch sees no CUDA device; --compile needs none" in capsys.readouterr().err
