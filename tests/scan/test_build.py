"""The CPU kernels' way from sources to a library: cached, rebuilt, safe among processes, explained when it fails."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_recurrent.scan import cpu, kernel_cache
from hf_recurrent.scan.norm import rms_norm

ROOT = Path(__file__).parents[2]
QUICK = "norm_cpu"  # the source that takes least time to compile
SCAN = """
import sys, warnings, torch
from hf_recurrent.scan import linear_scan, backend_report
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        h, final = linear_scan(torch.full((1, 3, 2), 0.5), torch.ones(1, 3, 2))
said = [str(w.message) for w in caught if "hf_recurrent" in str(w.message)]
print(h[0, :, 0].tolist(), backend_report()["cpu"], *said, sep="|")
"""


def environment(folder: Path, **changes: str) -> dict[str, str]:
    return {**os.environ, "HF_RECURRENT_CACHE": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


def python(code: str, env: dict[str, str]) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder and an unloaded library, in this process."""
    monkeypatch.setenv("HF_RECURRENT_CACHE", str(tmp_path))
    cpu._load.cache_clear()
    yield tmp_path
    cpu._load.cache_clear()


NORM = """
import torch
from hf_recurrent.scan.norm import rms_norm
x = torch.ones(1, 1, 3)
with torch.no_grad():
    print(rms_norm(x, x[0, 0], 0.0)[0, 0].tolist())
"""


def test_many_processes_build_once(tmp_path):
    compiler, cache = tmp_path / "c++-slow", tmp_path / "cache"
    compile_slowly = f"""#!/bin/sh
echo x >>{tmp_path}/compiled
[ "$1" = --version ] || sleep 3
exec {" ".join(cpu._compiler())} "$@"
"""
    compiler.write_text(compile_slowly)
    compiler.chmod(0o755)
    env = environment(cache, CXX=str(compiler))
    processes = [
        subprocess.Popen([sys.executable, "-c", NORM], env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = {process.communicate()[0].strip() for process in processes}
    assert outputs == {"[1.0, 1.0, 1.0]"}
    assert len((tmp_path / "compiled").read_text().split()) == 3 + 1  # each asks for the version, one compiles
    assert len(list(cache.glob("*.so"))) == 1
    assert {path.suffix for path in cache.iterdir()} <= {".so", ".sha256", ".lock"}


def test_rebuilt_when_a_source_changes(fresh, tmp_path, monkeypatch):
    sources = tmp_path / "csrc"
    shutil.copytree(kernel_cache.SOURCES, sources)
    monkeypatch.setattr(kernel_cache, "SOURCES", sources)
    first = cpu._build(QUICK)
    stamp = first.stat().st_mtime_ns
    assert cpu._build(QUICK) == first and first.stat().st_mtime_ns == stamp
    with open(sources / "cells.h", "a") as file:
        file.write("// changed\n")
    assert cpu._build(QUICK) != first


def test_compiler_and_flags_are_part_of_the_name(fresh, monkeypatch):
    first = cpu._build(QUICK)
    flags = cpu._flag_sets()
    monkeypatch.setattr(cpu, "_flag_sets", lambda: [[*flags[0], "-DOTHER"]])
    assert cpu._build(QUICK) != first


def test_without_openmp_and_native_flags(fresh, monkeypatch):
    """A compiler that refuses a flag gets the next set of them."""
    flags = cpu._flag_sets()
    monkeypatch.setattr(cpu, "_flag_sets", lambda: [[*flags[0], "-fno-such-flag"], flags[-1]])
    assert cpu.unavailable_reason() is None


@pytest.mark.parametrize(
    "script, reason",
    [
        (None, "the C++ compiler of $CXX, 'c++-broken', is not on the path"),
        ("exit 1", "c++-broken could not compile the kernels"),
        ("echo 'fatal error: no such thing' >&2; exit 1", "could not compile the kernels: fatal error: no such thing"),
        # Claims success, writes nothing: the empty file is not a library.
        ("exit 0", "the compiled kernels could not be loaded"),
    ],
)
def test_broken_compiler(tmp_path, script, reason):
    if script is not None:
        broken = tmp_path / "c++-broken"
        broken.write_text(f"#!/bin/sh\n{script}\n")
        broken.chmod(0o755)
    cache = tmp_path / "cache"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    code = f"{SCAN}from hf_recurrent.scan import BackendUnavailable\n"
    code += "try: linear_scan(torch.ones(1, 1, 1), torch.ones(1, 1, 1), backend='cpu')\n"
    code += "except BackendUnavailable as error: print('|', error)"
    output, report, message, demanded = python(code, environment(cache, CXX="c++-broken", PATH=path))
    assert output == "[1.0, 1.5, 1.75]"
    assert reason in report
    assert reason in message and "g++ or clang++" in message
    assert reason in demanded


def test_no_compiler_at_all(tmp_path):
    (tmp_path / "empty").mkdir()
    env = environment(tmp_path / "cache", PATH=str(tmp_path / "empty"))
    env.pop("CXX", None)
    output, report, *messages = python(SCAN, env)
    assert output == "[1.0, 1.5, 1.75]"
    assert report == "no C++ compiler on the path (c++, g++ or clang++; or set $CXX)"
    assert len(messages) == 1


EVERYTHING = """
import torch
from hf_recurrent import GateLoopConfig, GateLoopForCausalLM, LonghornConfig, LonghornForCausalLM, MinGRUConfig
from hf_recurrent import MinGRUForCausalLM, MinLSTMConfig, MinLSTMForCausalLM, S5Config, S5ForCausalLM
sizes, ids = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 7}, torch.randint(7, (2, 5))
for config, model in [
    (GateLoopConfig(**sizes), GateLoopForCausalLM),
    (GateLoopConfig(**sizes, num_attention_heads=2), GateLoopForCausalLM),
    (LonghornConfig(**sizes), LonghornForCausalLM), (MinGRUConfig(**sizes), MinGRUForCausalLM),
    (MinLSTMConfig(**sizes), MinLSTMForCausalLM), (S5Config(**sizes), S5ForCausalLM),
]:
    model = model(config)
    model(ids, labels=ids).loss.backward()
    model.eval().generate(ids, max_new_tokens=3, do_sample=False)
"""


def test_kernels_that_are_turned_off(tmp_path):
    """All of them, without a word: who has turned them off knows it."""
    cache = tmp_path / "cache"
    env = environment(cache, HF_RECURRENT_KERNELS="none")
    output, report, *messages = python(f"{SCAN}{EVERYTHING}", env)
    assert (output, report, messages) == ("[1.0, 1.5, 1.75]", "left out by HF_RECURRENT_KERNELS=none", [])
    assert not cache.exists()


@pytest.mark.parametrize(
    "value, left_out", [("none", "cpu cuda"), ("cpu", "cuda"), (" CUDA", "cpu"), ("cuda,cpu", ""), ("", ""), (None, "")]
)
def test_which_kernels_are_turned_off(monkeypatch, value, left_out):
    monkeypatch.delenv("HF_RECURRENT_KERNELS", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_RECURRENT_KERNELS", value)
    assert [device for device in ("cpu", "cuda") if kernel_cache.turned_off(device)] == left_out.split()


@pytest.mark.parametrize("value", ["0", "none,cpu", "gpu"])
def test_a_switch_that_says_something_else(fresh, monkeypatch, value):
    monkeypatch.setenv("HF_RECURRENT_KERNELS", value)
    with pytest.raises(ValueError, match=f"HF_RECURRENT_KERNELS must be .*, or none; got '{value}'"):
        cpu.unavailable_reason()


def test_cache_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    _, report, *messages = python(SCAN, environment(tmp_path / "file" / "cache"))
    assert "cannot be written: Not a directory" in report
    assert len(messages) == 1


def test_cache_folder_that_became_read_only(fresh, monkeypatch):
    """As in a container image whose cache was filled when it was made."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    library = cpu._build(QUICK)
    monkeypatch.setattr(kernel_cache.tempfile, "TemporaryFile", refuse)  # root may write whatever the mode says
    monkeypatch.setattr(kernel_cache, "FileLock", refuse)
    assert cpu._build(QUICK) == library
    library.unlink()
    with pytest.raises(kernel_cache.BackendUnavailable, match="cannot be written: Read-only file system"):
        cpu._build(QUICK)


def test_damaged_library_is_built_again(fresh):
    library = cpu._build(QUICK)
    library.write_bytes(library.read_bytes()[:1000])
    x = torch.ones(1, 1, 3)
    with torch.no_grad():
        torch.testing.assert_close(rms_norm(x, x[0, 0], 0.0), x)
    assert library.stat().st_size > 1000


def test_scans_in_forked_children_and_threads():
    """A fork after a threaded scan, and scans from several threads at once."""
    code = """
import os, threading, torch
from hf_recurrent.scan import linear_scan
torch.set_num_threads(2)
a, b = torch.rand(4, 300, 256), torch.rand(4, 300, 256)
want = linear_scan(a, b)[0]
results = []
threads = [threading.Thread(target=lambda: results.append(torch.equal(linear_scan(a, b)[0], want))) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # what a DataLoader's worker does
    os._exit(0 if torch.equal(linear_scan(a, b)[0], want) else 1)
print(all(results), os.waitpid(child, 0)[1])
"""
    env = environment(kernel_cache.cache_folder())
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True 0\n", done.stderr


def test_one_openmp_runtime():
    """The kernels run on PyTorch's own pool of threads; a second pool would fight it for the cores."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads the process's map of Linux")
    code = """
import torch
from hf_recurrent.scan import linear_scan
def runtimes():
    return {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split()[-1].rsplit("/")[-1]}
before = runtimes()
linear_scan(torch.rand(1, 2, 3), torch.rand(1, 2, 3), backend="cpu")
print(before != set() and runtimes() == before)
"""
    assert python(code, environment(kernel_cache.cache_folder())) == ["True"]
