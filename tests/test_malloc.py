"""What becomes of freed memory, by page faults and resident size, in a process whose settings are its own."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")

PROGRAM = """
import resource, sys, psutil, torch
from hf_recurrent.malloc import keep_freed_memory, return_freed_memory

def use():
    "Page faults of a tensor of 64 MiB, and the MiB that stay resident when it is gone."
    faults, size = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, psutil.Process().memory_info().rss
    torch.ones(1 << 24)
    now = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, psutil.Process().memory_info().rss
    return now[0] - faults, (now[1] - size) >> 20

assert keep_freed_memory()
_, kept = use()
assert kept > 60, kept
for _ in range(40):  # until there are pieces that an aligned tensor fits into
    use()
faults, more = use()
assert faults < 100 and more < 2, (faults, more)
assert return_freed_memory()
_, stays = use()
assert stays < 2, stays
"""


def test_freed_memory_is_kept_and_then_returned():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
