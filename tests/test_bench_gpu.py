"""The GPU benchmark's own code, on the CPU with tiny sizes."""

import contextlib
import functools
import json
import operator
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "path", [*sys.path])  # gpu_check adds to it
    import gpu

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield gpu
    torch.set_num_threads(threads)


def test_every_section_runs(gpu, tmp_path, capsys, monkeypatch):
    import gpu_check
    import gpu_timing

    monkeypatch.setattr(gpu_check, "SMALL_SHAPES", [(2, 9, 5)])
    monkeypatch.setattr(gpu_check, "SMALL_LONGHORN_SHAPES", [(2, 9, 5, 3)])
    monkeypatch.setattr(gpu_check, "SMALL_HEADS_SHAPES", [(2, 9, 2, 4, 4)])
    monkeypatch.setattr(gpu_check, "SMALL_ELEMENTWISE_SHAPES", [(2, 9, 8)])
    monkeypatch.setattr(gpu_timing, "_repeated", lambda run, seconds, fewest: run())
    status = gpu.main(["--device", "cpu", "--tiny", "--output", str(tmp_path)])
    document = json.loads((tmp_path / "no-gpu-tiny.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"no-gpu-tiny.json", "no-gpu-tiny.md", "no-gpu-tiny.png"}
    # What is not here is said; nothing else has failed.
    absent = {"flash-linear-attention", "accelerated-scan", "mamba-ssm", "triton", "compute-sanitizer"}
    missed = {what for section in document["not_measured"].values() for what in section}
    assert missed <= absent, document["not_measured"]
    assert status == 0
    [run] = document["runs"]
    assert run["seconds"].keys() == gpu.SECTIONS.keys() and run["copy_gigabytes_per_second"] > 0
    found = {row["section"] for row in document["results"]}
    assert found >= gpu.SECTIONS.keys() - {"peers", "sanitizer"}
    check = next(row for row in document["results"] if row["section"] == "check")
    assert check["cases"] > 15 and check["failures"] == []
    for row in document["results"]:
        if row["section"] in ("scan", "cells", "long", "heads"):
            assert row["of_copy"] > 0 and row["direction"] in ("forward", "backward")
        if row.keys() & {"of_mamba_ssm", "times_ours", "times_faster"} or row["section"] == "elementwise":
            assert row["timed"] == "eager"  # as everything is on a CPU
    said = capsys.readouterr().out
    assert "Tiny sizes" in said and "| direction | timed | µs | times faster than cuDNN |" in said


def test_what_cannot_be_captured_is_timed_as_it_runs_and_says_so(gpu, monkeypatch):
    def refuse(calls, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "eager_seconds_of", lambda call, device: 2.0)
    monkeypatch.setattr(gpu, "seconds_of", lambda calls, device: 1.0)
    device = torch.device("cuda", 0)
    assert gpu._captured_or_eager([None], device) == (1.0, "graph")
    monkeypatch.setattr(gpu, "seconds_of", refuse)
    assert gpu._captured_or_eager([None], device) == (2.0, "eager")


def test_peers_say_how_they_were_timed(gpu, monkeypatch):
    """Longhorn's is timed as it runs, where ours is a graph's replay."""
    monkeypatch.setattr(gpu, "_way_of", lambda device: "graph")
    monkeypatch.setattr(
        gpu.gpu_peers, "selective_scan", lambda: lambda u, delta, A, B, C: u * delta + A.sum() + B.sum() + C.sum()
    )
    monkeypatch.setattr(gpu.gpu_peers, "scans", lambda: {"a scan": ("time", lambda: lambda a, b: a + b)})
    b = gpu.Bench(torch.device("cpu"), True, 1.0)
    gpu._measure_longhorn(b, (2, 8, 8), 4, torch.float32)
    gpu.measure_peers(b)
    timed = {row["name"]: row["timed"] for row in b.results if "timed" in row}
    assert timed == {"longhorn": "graph", "mamba_ssm selective scan": "eager", "a scan": "graph"}


def test_a_failing_section_is_recorded(gpu, tmp_path, monkeypatch):
    def broken(b):
        raise RuntimeError("out of order")

    monkeypatch.setitem(gpu.SECTIONS, "scan", broken)
    arguments = ["--device", "cpu", "--tiny", "--only", "copy", "scan", "--output", str(tmp_path)]
    assert gpu.main(arguments) == 1
    document = json.loads((tmp_path / "no-gpu-tiny.json").read_text())
    assert document["not_measured"] == {"scan": {"scan": "RuntimeError: out of order"}}
    assert document["results"][0]["section"] == "copy"


def test_a_folder_that_cannot_be_written_to(gpu, tmp_path, capsys):
    folder = tmp_path / "file" / "x"
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--device", "cpu", "--tiny", "--output", str(folder)])
    *_, said = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and said.endswith(f"--output {folder} cannot be written: Not a directory")


def test_peers_have_their_turn_while_there_is_time(gpu):
    order = list(gpu.SECTIONS)
    assert max(map(order.index, ("copy", "peers"))) < min(map(order.index, ("layers", "step", "decode")))


def test_out_of_time(gpu, tmp_path):
    gpu.main(["--device", "cpu", "--tiny", "--only", "copy", "--minutes", "0", "--output", str(tmp_path)])
    assert json.loads((tmp_path / "no-gpu-tiny.json").read_text())["not_measured"] == {"copy": {"copy": "out of time"}}


def test_the_report_keeps_goals_that_were_not_measured(gpu):
    about = {"gpu": "a GPU", "packages": {"torch": "2"}, "date": "2026-01-01", "commit": "abc"}
    seconds = {"long": 1.0, "peers": 2.0}  # `peers` began, and ran out of time
    row = {"section": "long", "name": "linear", "microseconds": 1.0, "of_copy": 0.75}
    row |= {"shape": [1, 2**20, 1024], "dtype": "float32", "direction": "forward"}
    document = {
        "tiny": False,
        "runs": [{"command": "a command", "machine": about, "seconds": seconds}],
        "results": [row],
        "not_measured": {"peers": {"a peer": "out of time"}},
    }
    text = gpu.gpu_report.markdown(document)
    assert text.startswith("- long: a GPU")
    assert "| (1, 1M, 1024) forward, of the copy's speed | 0.75 | ≥ 0.7 |" in text
    assert "time over linear_scan's | not measured | > 1 |" in text
    assert "Longhorn m = 16, time over mamba_ssm's | not measured | ≤ 1 |" in text


def test_what_is_not_measured_again_stays(gpu, tmp_path, monkeypatch):
    """Also where the new run is stopped."""
    import gpu_timing

    monkeypatch.setattr(gpu_timing, "_repeated", lambda run, seconds, fewest: run())

    def run(*sections):
        with contextlib.suppress(KeyboardInterrupt):
            gpu.main(["--device", "cpu", "--tiny", "--only", *sections, "--output", str(tmp_path)])
        return json.loads((tmp_path / "no-gpu-tiny.json").read_text())

    first = run("copy", "decode")
    second = run("copy", "longhorn")
    assert [list(run["seconds"]) for run in second["runs"]] == [["decode"], ["copy", "longhorn"]]
    assert [row["section"] for row in second["results"]] == ["copy"] * 2 + ["longhorn"] * 4 + ["decode"] * 3
    assert [row for row in first["results"] if row["section"] == "decode"] == second["results"][-3:]

    def stopped(b):
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu.SECTIONS, "longhorn", stopped)
    third = run("copy", "longhorn")
    assert [list(run["seconds"]) for run in third["runs"]] == [["decode"], ["longhorn"], ["copy"]]
    assert third["results"][2:] == second["results"][2:]
    assert third["not_measured"]["longhorn"] == second["not_measured"]["longhorn"]
    fourth = run("decode", "--minutes", "0")
    assert fourth["results"] == third["results"] and fourth["runs"] == third["runs"]
    assert fourth["not_measured"]["decode"] == {"decode": "out of time"}


def test_all_kernels_of_the_checks_are_compiled_first(gpu, monkeypatch):
    """Side by side; one that cannot be compiled does not keep the others from it."""
    import gpu_check
    from hf_recurrent.scan import (
        BackendUnavailable,
        convolution,
        cpu,
        cuda,
        cuda_kernels,
        elementwise,
        gateloop_heads,
        longhorn,
    )

    monkeypatch.setattr(gpu_check, "SMALL_SHAPES", [(2, 1, 5), (1, 9, 8)])
    launched, compiled = set(), set()

    def launch(module, *arguments):
        launched.add(module)
        raise InterruptedError  # the modules alone are asked for

    def cubin(module, architecture):
        compiled.add((module, architecture))
        raise BackendUnavailable("out of order")

    monkeypatch.setattr(cuda_kernels, "launch", launch)
    monkeypatch.setattr(cuda_kernels, "cubin", cubin)
    monkeypatch.setattr(cuda_kernels, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("forward", "run_forward", "backward"):
        monkeypatch.setattr(cpu, name, getattr(cuda, name))
    for module in (convolution, elementwise, longhorn, gateloop_heads):
        monkeypatch.setattr(module, "choose_backend", lambda backend, device: "cuda")
    for _, check in gpu_check._cases(True):
        with pytest.raises(InterruptedError):
            check("cpu", torch.device("cpu"))
    modules = gpu_check._modules(True, torch.device("cpu"))
    assert launched == modules
    there = next(iter(modules))
    monkeypatch.setattr(cuda_kernels, "is_compiled", lambda module, architecture: module == there)

    class InTurn:
        run = staticmethod(gpu_check._in_turn)

    assert gpu_check._compile(modules, torch.device("cuda", 0), InTurn()) == len(modules) - 1
    assert compiled == {(module, "sm_90") for module in modules - {there}}


def test_kernels_are_compiled_in_other_processes(gpu, tmp_path, monkeypatch):
    """Into the cache, where this one finds them."""
    pytest.importorskip("cuda.core", reason="needs the packages of the extra 'cuda'")
    import gpu_check
    from hf_recurrent.scan import cuda, cuda_kernels

    monkeypatch.setenv("HF_RECURRENT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module = cuda.module_for("linear", torch.float32, 4)
    assert not cuda_kernels.is_compiled(module, "sm_90")
    with gpu_check.Pool(2) as pool:
        assert gpu_check._compile({module}, torch.device("cuda", 0), pool) == 1
        assert gpu_check._compile({module}, torch.device("cuda", 0), pool) == 0
    assert cuda_kernels.is_compiled(module, "sm_90")
    monkeypatch.setattr(cuda_kernels, "compile_module", None)
    assert cuda_kernels.cubin(module, "sm_90").startswith(b"\x7fELF")


def test_a_task_that_dies_or_hangs_costs_no_other(gpu, monkeypatch):
    import gpu_check

    monkeypatch.setattr(gpu_check, "LIMIT", 1.0)
    tasks = [
        functools.partial(os._exit, 3),
        functools.partial(time.sleep, 100),
        functools.partial(operator.truediv, 1, 0),
        *[functools.partial(operator.add, 1, 2)] * 4,
    ]
    with gpu_check.Pool(2) as pool:
        found = {number: error for number, error, _ in pool.run(tasks)}
        again = list(pool.run(tasks[-1:]))
        processes = [psutil.Process(worker.process.pid) for worker in pool.workers]
    assert found.keys() == set(range(7)) and [found[n] for n in range(3, 7)] == [None] * 4
    assert found[0] == "its process died, with exit code 3" and found[1] == "not done in 1 s"
    assert found[2].startswith("ZeroDivisionError at ")
    assert [(number, error) for number, error, _ in again] == [(0, None)]
    assert processes and not any(process.is_running() for process in processes)


def test_processes_that_cannot_start(gpu, monkeypatch):
    import gpu_check

    monkeypatch.setattr(gpu_check, "START_LIMIT", 0.0)
    with gpu_check.Pool(2) as pool:
        found = list(pool.run([functools.partial(operator.add, 1, 2)] * 3))
    assert sorted(found) == [(number, "not run: no process could be started", 0.0) for number in range(3)]


def test_chosen_cases(gpu, tmp_path):
    """In processes of their own; what is said on the way, and at last."""
    command = [sys.executable, BENCHMARKS / "gpu_check.py", "--device", "cpu", "--only", "(1, 1, 1)", "(2, 65"]
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    *_, checked, slowest, right = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    count = int(checked.split()[0])
    assert count > 30 and checked.startswith(f"{count} cases checked in ")
    assert slowest.startswith("slowest: ") and slowest.count(" s, ") == 4
    assert right == f"{count} of {count} cases are right"


def test_a_case_that_fails_is_named(gpu, monkeypatch):
    import gpu_check

    def wrong(backend, device):
        raise AssertionError("another number")

    said = []
    monkeypatch.setattr(gpu_check, "_cases", lambda small: [("right", lambda *_: None), ("wrong", wrong)] * 2)
    found = gpu_check.check_all(torch.device("cpu"), True, only=["wrong"], tell=said.append)
    assert found["cases"] == 2 and [failure["case"] for failure in found["failures"]] == ["wrong", "wrong"]
    assert found["failures"][0]["error"].endswith("another number") and len(found["slowest"]) == 2
    assert said[0].startswith("wrong: AssertionError at ") and said[-1].startswith("2 cases checked in ")


def test_a_gpu_that_cannot_be_cleared_is_recorded(gpu, monkeypatch):
    """As after an illegal access, or a graph whose capture has failed."""

    def refuse():
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def broken():
        raise RuntimeError("out of order")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    b = gpu.Bench(torch.device("cuda", 0), True, 1.0)
    b.attempt("first", broken)
    b.attempt("second", lambda: None)
    assert b.not_measured[""]["first"] == "RuntimeError: out of order"
    assert b.not_measured[""]["second"].startswith("RuntimeError: captures_underway")


def test_a_sanitizer_out_of_time_leaves_nothing_running(gpu, tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nsleep 30 & echo $! > child\nwait\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    b = gpu.Bench(torch.device("cuda", 0), True, 0.01)
    gpu.measure_sanitizer(b)
    reason = "RuntimeError: not done in 1 s"
    assert b.not_measured[""] == {"compute-sanitizer memcheck": reason, "compute-sanitizer racecheck": reason}
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "child").read_text())).wait(timeout=5)


def test_memcheck_sees_each_tensor(gpu, tmp_path, monkeypatch):
    """In the processes' environments: PyTorch's own pieces of memory would hide what lies beyond a tensor."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "SUMMARY $2 ${PYTORCH_NO_CUDA_MEMORY_CACHING:-cached}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    b = gpu.Bench(torch.device("cuda", 0), True, 1.0)
    monkeypatch.setattr(b, "_release", lambda: None)
    gpu.measure_sanitizer(b)
    assert [row["summary"] for row in b.results] == [["SUMMARY memcheck 1"], ["SUMMARY racecheck cached"]]


def test_bytes_of_backward(gpu, monkeypatch):
    """Counted by what moves: of the linear recurrence a, h and dh in, da and db out."""
    monkeypatch.setattr(gpu, "seconds_of", lambda calls, device: 1e-9)
    b = gpu.Bench(torch.device("cpu"), True, 1.0)
    gpu.measure_cells(b)
    rows = [row for row in b.results if row["direction"] == "backward"]
    moved = {(row["name"], row["dtype"]): row["gigabytes_per_second"] for row in rows}
    size, channels = 2 * 64 * 16, 16  # numbers of a tensor
    assert moved["linear, masked", "float32"] == 5 * size * 4
    assert moved["linear, masked", "bfloat16"] == moved["linear, packed", "bfloat16"] == 5 * size * 2
    assert moved["linear, complex", "complex64"] == 5 * size * 8
    assert moved["linear, complex and constant", "complex64"] == (3 * size + 2 * channels) * 8
    assert moved["mingru_vanilla", "float32"] == 6 * size * 4
    assert moved["gateloop_polar_sigmoid", "float32"] == 13 * size * 4
    assert moved["s5_zoh", "complex64"] == (4 * size + 2 * channels) * 8 + 2 * 2 * 64 * 4


def test_kernels_that_do_not_run_are_not_measured(gpu, monkeypatch, capsys):
    """By name another backend would take their place, several times slower."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.cuda, "unavailable_reason", lambda: "NVRTC is missing")
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "the CUDA kernels do not run here" in (said := capsys.readouterr().err) and "NVRTC is missing" in said


def test_nothing_is_compared_with_a_copy_that_was_not_measured(gpu, tmp_path, monkeypatch):
    import gpu_timing

    monkeypatch.setattr(gpu_timing, "_repeated", lambda run, seconds, fewest: run())
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "longhorn", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "no-gpu-tiny.json").read_text())["results"]
    assert rows and not any("times_floor" in row or "of_copy" in row for row in rows)


def test_the_way_from_the_host_is_not_a_graphs_time(gpu, monkeypatch):
    """A replay of 10 us of which the GPU hears 8 us after it was asked for, one after the other."""
    import gpu_timing

    host = gpu_free = 0.0

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(host, gpu_free)

        def synchronize(self):
            nonlocal host
            host = max(host, self.at)

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3

    class Graph:
        def replay(self):
            nonlocal host, gpu_free
            host += 8e-6
            gpu_free = max(host, gpu_free) + 10e-6

        def reset(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    seconds = gpu_timing.seconds_of([lambda: None] * 2, torch.device("cuda", 0), seconds=0.0)
    assert seconds == pytest.approx(5e-6, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "PyTorch sees no CUDA device" in capsys.readouterr().err
