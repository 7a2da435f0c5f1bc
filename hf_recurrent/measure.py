"""Paired timing, and what a reader must know about the machine that a number came from."""

import argparse
import datetime
import gc
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from tqdm import tqdm

from .versions import version_of

SLOW_SECONDS = 20.0  # a candidate that has used this much is not repeated further,
FEWEST_ROUNDS = 3  # once it has been timed this often


@dataclass
class Timing:
    """One candidate's times, and each divided by the time of the limit measured just before it."""

    seconds: list[float]
    ratios: list[float]

    def summary(self) -> dict:
        """Medians with their quartiles: milliseconds, and the ratio to the limit."""
        low, middle, high = np.percentile(self.seconds, [25, 50, 75]) * 1e3
        ratio_low, ratio, ratio_high = np.percentile(self.ratios, [25, 50, 75])
        return {
            "milliseconds": round(middle, 4),
            "milliseconds_quartiles": [round(low, 4), round(high, 4)],
            "ratio": round(ratio, 4),
            "ratio_quartiles": [round(ratio_low, 4), round(ratio_high, 4)],
            "rounds": len(self.seconds),
        }


def seconds_of(function: Callable[[int], object], index: int) -> float:
    """The time of one call, its result's release included: every candidate pays for the memory that it takes."""
    start = time.perf_counter()
    function(index)
    return time.perf_counter() - start


def paired(
    limit: Callable[[int], object],
    candidates: dict[str, Callable[[int], object]],
    rounds: int,
    limit_factor: float = 1.0,
    title: str = "",
) -> dict[str, Timing]:
    """Times the candidates in turn, each just after the limit, for `rounds` rounds.

    Whatever slows the machine for a while slows the two of a pair alike, so the ratio of a pair is steadier than the
    ratio of two medians. Each function takes a running number, by which it chooses among several input sets: no call
    finds its input in a cache because the call before it has just read it. `limit_factor` scales the limit's time, for
    a candidate that must move more bytes than the limit does.
    """
    timings = {name: Timing([], []) for name in candidates}
    count = 0
    gc.collect()
    gc.disable()
    try:
        with tqdm(total=rounds * len(candidates), desc=title, leave=False, unit="run", disable=None) as bar:
            for name, candidate in candidates.items():  # warm-up: compilation, thread pools, memory pools
                bar.set_postfix_str(name)
                candidate(0)
                limit(1)
            for done in range(rounds):
                for name, candidate in candidates.items():
                    timing = timings[name]
                    if done < FEWEST_ROUNDS or sum(timing.seconds) < SLOW_SECONDS:
                        bar.set_postfix_str(name)
                        limit_seconds = seconds_of(limit, count) * limit_factor
                        seconds = seconds_of(candidate, count + 1)
                        timing.seconds.append(seconds)
                        timing.ratios.append(seconds / limit_seconds)
                        count += 2
                    bar.update()
    finally:
        gc.enable()
    return timings


def peak_bytes(function: Callable[[], object]) -> int:
    """Resident memory that a call takes at its peak, beyond the process before it. Only where `can_measure_peaks`."""
    before = psutil.Process().memory_info().rss
    # Linux keeps the highest resident size so far; writing 5 here forgets the peak of the imports.
    Path("/proc/self/clear_refs").write_text("5")
    function()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 - before


def can_measure_peaks() -> bool:
    return Path("/proc/self/clear_refs").exists()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def positive(text: str) -> int:
    """A type for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make the folder of --output, or leave with an error that says why it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        parser.error(f"--output {folder} cannot be written: {error.strerror}")


def machine(packages: tuple[str, ...]) -> dict:
    """The processor, the threads and the versions behind the numbers."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {package: version_of(package) for package in packages},
    }
