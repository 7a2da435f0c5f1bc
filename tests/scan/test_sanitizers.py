"""Every CPU kernel under the address and undefined-behaviour sanitizers.

A read or write outside a tensor seldom changes a result, so no comparison of values finds it. The sanitizers' runtime
must be in the process before PyTorch is, hence the process of its own.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize=null,object-size,pointer-overflow -fno-sanitize-recover=all"
SCRIPT = """
from functools import partial

import torch
from hf_recurrent.scan import cpu, gateloop_heads_scan, gateloop_scan, linear_scan, longhorn_scan
from hf_recurrent.scan import mingru_scan, minlstm_scan, s5_scan
from hf_recurrent.scan.convolution import short_convolution
from hf_recurrent.scan.elementwise import gate, silu_gate, skip_gelu, skip_silu_gate
from hf_recurrent.scan.gateloop import channel_loop
from hf_recurrent.scan.linear import linear
from hf_recurrent.scan.longhorn import gated_scan
from hf_recurrent.scan.norm import rms_norm
from hf_recurrent.scan.s5 import drive, read

# At -O3 the instrumented code takes minutes to compile.
flags = [[flag.replace("-O3", "-O0") for flag in flags] for flags in cpu._flag_sets()]
cpu._flag_sets = lambda: flags
torch.set_num_threads(3)
torch.manual_seed(0)


def gradients(function, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # Expanded gradients, which have no strides, for the outputs.
    torch.autograd.grad(sum((y.real if y.is_complex() else y).sum() for y in outputs), inputs)


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, 2, dtype=dtype).flatten(-2)[..., : shape[-1]]  # a slice, as of a projection


def options(batch, length):
    mask, reset = torch.rand(batch, length) < 0.8, torch.rand(batch, length) < 0.01
    return [{"mask": m, "reset": r, "reverse": v} for m, r, v in [(None, None, False), (mask, reset, True)]]


# One element; a piece and a chunk that are not full; pieces of rows; segments of time; outputs past the caches.
SHAPES = [(1, 1, 1), (3, 7, 97), (1, 40, 2500), (1, 1700, 40), (4, 520, 512)]
for dtype in (torch.float32, torch.bfloat16, torch.complex64):
    state_dtype = torch.promote_types(dtype, torch.float32)
    for batch, length, channels in SHAPES:
        state = torch.randn(batch, channels, dtype=state_dtype)
        for option in options(batch, length):
            shape = batch, length, channels
            a, b = rows(*shape, dtype=dtype) / 4, rows(*shape, dtype=dtype)
            gradients(lambda *x: linear_scan(*x, **option, backend="cpu"), a, b, state)
            gradients(lambda *x: linear_scan(*x, **option, backend="cpu"), a[0, 0].contiguous(), b)
            if dtype.is_complex:
                times = torch.rand(length, batch).T
                gradients(lambda *x: s5_scan(*x, **option, backend="cpu"), b, a[0, 0].contiguous(), times, state)
                continue
            z = torch.randn(batch, channels, dtype=torch.complex64)
            gradients(lambda *x: gateloop_scan(*x, **option, backend="cpu"), a, b, a, b, a, z)
            if dtype != torch.float32:
                continue
            for positive in (False, True):
                gradients(lambda *x: mingru_scan(*x, **option, positive=positive, backend="cpu"), a, b, state)
                gradients(lambda *x: minlstm_scan(*x, **option, positive=positive, backend="cpu"), a, b, a, state)
for batch, length, channels in SHAPES[:4]:
    for m in (1, 5):
        x, k = rows(batch, length, channels), rows(batch, length, m)
        state = torch.randn(batch, channels, m)
        for option in options(batch, length):
            gradients(lambda *x: longhorn_scan(*x, **option, backend="cpu"), x, x, k, k, state)
for heads, d_k, d_v in [(1, 1, 1), (3, 5, 3), (17, 4, 6), (2, 16, 16)]:
    for length in (1, 19):
        q, k, v = (torch.randn(2, length, heads, size) for size in (d_k, d_k, d_v))
        a, state = q * 0.1j, torch.randn(2, heads, d_k, d_v, dtype=torch.complex64)
        for option in options(2, length):
            gradients(lambda *x: gateloop_heads_scan(*x, **option, backend="cpu"), q, k, v, a, state)
        starts = {"reset": torch.rand(2, length) < 0.3, "reset_state": state[0]}
        gradients(lambda *x: gateloop_heads_scan(*x, **starts, backend="cpu"), q, k, v, a, state)
for batch, length, channels in SHAPES:
    x = rows(batch, length, channels)
    gradients(skip_gelu, x, x, torch.randn(channels))
    gradients(lambda x, y: gate(x, y, torch.ones(batch, 1, channels)), x, x)
    gradients(silu_gate, x, x)
    gradients(skip_silu_gate, x, x, x, torch.randn(channels))
    for taps in (2, 5):
        state, kernel = rows(batch, taps - 1, channels), torch.randn(channels, 1, taps)
        for option in options(batch, length):
            silu = option.pop("reverse")
            convolve = partial(short_convolution, **option, silu=silu)
            gradients(convolve, x, kernel, kernel[:, 0, 0].clone(), state)
            gradients(lambda x, w: convolve(x, w, None), x, kernel)
torch.set_grad_enabled(False)
for dtype in (torch.float32, torch.bfloat16):
    for batch, length, channels in SHAPES:
        x, weight = rows(batch, length, channels).to(dtype), torch.randn(channels).to(dtype)
        assert linear(x[:1, :1], weight.expand(9, -1).contiguous()).isfinite().all()
        assert rms_norm(x.float(), weight, 1e-5).isfinite().all() and rms_norm(x, weight, 1e-5).isfinite().all()
        for taps in (2, 5):
            state, kernel = rows(batch, taps - 1, channels).to(dtype), torch.randn(channels, 1, taps).to(dtype)
            for option in options(batch, length):
                del option["reverse"]
                short_convolution(x, kernel, weight, state, **option, silu=True)
                short_convolution(x, kernel, None, None, **option)
    for batch, length, states, width in [(1, 1, 1, 1), (2, 3, 37, 1001)]:
        b, c = torch.randn(states, width, 2).to(dtype), torch.randn(width, states, 2).to(dtype)
        driven = drive(rows(batch, length, width).to(dtype), b, *torch.randn(3, states).to(dtype), 1.0, False)[1]
        assert read(driven, c, 2.0, dtype).shape == (batch, length, width)
    for batch, length, channels in SHAPES[:4]:
        x, k, state = rows(batch, length, channels), rows(batch, length, 5), torch.randn(batch, channels, 5)
        x, k = x.to(dtype), k.to(dtype)
        for option in options(batch, length):
            del option["reverse"]
            gated_scan(x, x, k, k, torch.randn(channels).to(dtype), x, state, **option)
            few = x[:1, :8]
            wide = torch.cat([few, few, few], dim=-1)
            option = {name: mask if mask is None else mask[:1, :8] for name, mask in option.items()}
            channel_loop(wide, wide[..., : 2 * channels], few, "exponential", "tanh", **option)
print("done")
"""


# The CUDA kernels' bodies, run on the host.
CUDA_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from cuda_host import Host
from hf_recurrent.scan import cpu, cuda, gateloop_heads_scan, gateloop_scan, linear_scan, longhorn_scan, s5_scan
from hf_recurrent.scan.ops import step_flags
torch.set_num_threads(1)
torch.manual_seed(0)
host = Host(Path(sys.argv[2]), ["-O0"])
host.install(setattr)
cpu.unavailable_reason = lambda: None  # which compiles the CPU's own
for multiprocessors, shape in [(1, (2, 1, 5)), (1, (2, 70, 33)), (4, (1, 1027, 12)), (9, (1, 1027, 12))]:
    host.multiprocessors = multiprocessors
    cuda.READ_ONCE = multiprocessors == 9
    host.seed, host.resident = (1, 3) if cuda.READ_ONCE else (0, 1)
    batch, length, channels = shape
    masks = {"mask": torch.rand(batch, length) < 0.8, "reset": torch.rand(batch, length) < 0.1}
    for option in [{}, {**masks, "reverse": True}]:
        def gradients(function, *inputs):
            inputs = [x.detach().requires_grad_() for x in inputs]
            h, final = function(*inputs, **option, backend="cpu")
            torch.autograd.grad([h, final], inputs, [torch.ones_like(h), torch.ones_like(final)])
        a, b = torch.rand(shape), torch.randn(*shape, 2)[..., 0].contiguous()
        state = torch.randn(batch, channels)
        gradients(linear_scan, a, b, state)
        gradients(linear_scan, a[0, 0].clone(), b)
        z = torch.randn(batch, channels, dtype=torch.complex64)
        gradients(gateloop_scan, a, b, a, b, a, z)
        gradients(s5_scan, torch.complex(a, b), -z[0].abs() + 0j, torch.rand(batch, length), z)
        if cuda.READ_ONCE:
            continue
        flags = step_flags(option.get("mask"), option.get("reset"), False)
        for taps, few in [(4, 8), (4, 5), (7, 8), (7, 5)]:
            shapes = (few, 1, taps), (batch, taps - 1, few)
            inputs = torch.randn(batch, length, 8)[..., :few], *(torch.randn(shape) for shape in shapes)
            inputs = [x.requires_grad_() for x in inputs]
            y, left = torch.ops.hf_recurrent.short_convolution(*inputs, None, flags, taps == 4, "cuda")
            (y.sum() + left.sum()).backward()
        k = torch.randn(batch, length, 3)
        gradients(longhorn_scan, b, a, k, k, torch.randn(batch, channels, 3))
        d_k, d_v = (4, 4) if length > 1000 else (3, 100)  # wide accesses; padded, in slices, with checkpoints filled in
        q, v = torch.randn(batch, length, 1, d_k), torch.randn(batch, length, 1, d_v)
        gradients(gateloop_heads_scan, q, q, v, q * 0.1j, torch.randn(batch, 1, d_k, d_v, dtype=torch.complex64))
print("done")
"""


@pytest.mark.parametrize("script", [SCRIPT, CUDA_SCRIPT], ids=["cpu", "cuda"])
def test_nothing_outside_the_tensors(tmp_path, script):
    compiler = shutil.which("g++")
    if compiler is None or platform.system() != "Linux":
        pytest.skip("needs g++ on Linux")
    # The sanitizer takes over C++ exceptions when it loads, so the library that throws them has to come with it.
    find = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so.6")]
    runtimes = [subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in find]
    if not all(map(os.path.isabs, runtimes)):  # where there is no such file, its bare name comes back
        pytest.skip("g++ has no libasan.so")
    env = {
        **os.environ,
        # The compiler itself goes without. Of what is left out, the address sanitizer sees the use of a null pointer,
        # or of one beyond its object, though not that one was computed. Both halve the time.
        "CXX": f"env -u LD_PRELOAD {compiler} {SANITIZERS}",
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves what it frees last
        "HF_RECURRENT_CACHE": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    arguments = [str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[:4000]
