"""Times of work on a device, free of what its launches cost the host: by the replay of a captured CUDA graph."""

import statistics
import time
from collections.abc import Callable

import torch

# What events enclose of a graph's replays. The GPU waits for the first to come from the host, some microseconds, which
# would otherwise be a good part of a short graph's time.
ENCLOSED = 5e-3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(calls: list[Callable[[], object]], device: torch.device, seconds: float = 0.2, fewest: int = 5) -> float:
    """The median time of one of `calls`, which work on different tensors, so that none is served from a cache that the
    one before has filled. Rounds over all of them are repeated for about `seconds`, at least `fewest` times.

    On a GPU the round is captured into a graph and replayed, timed by events around as many replays as take ENCLOSED.
    """
    for call in calls:  # compilation and memory pools
        call()
    synchronize(device)
    if device.type != "cuda":
        return _repeated(lambda: _host_seconds(calls), seconds, fewest) / len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # alive, so that no two share an output
    one = min(_event_seconds(graph.replay) for _ in range(2))
    replays = max(1, round(ENCLOSED / one))
    result = _repeated(lambda: _event_seconds(graph.replay, replays), seconds, fewest) / len(calls)
    del kept
    graph.reset()
    return result


def eager_seconds_of(call: Callable[[], object], device: torch.device, seconds: float = 1.0, fewest: int = 3) -> float:
    """The median time of a call as it runs, launches included: for training steps, which are long."""
    for _ in range(2):
        call()
    synchronize(device)
    run = (lambda: _event_seconds(call)) if device.type == "cuda" else (lambda: _host_seconds([call]))
    return _repeated(run, seconds, fewest)


def _repeated(run: Callable[[], float], seconds: float, fewest: int) -> float:
    times, end = [run()], time.perf_counter() + seconds
    while len(times) < fewest or time.perf_counter() < end:
        times.append(run())
    return statistics.median(times)


def _host_seconds(calls) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def _event_seconds(call, times: int = 1) -> float:
    """Of one call, where so many follow each other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times
