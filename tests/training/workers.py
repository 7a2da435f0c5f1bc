"""Runs in processes of their own, forked from one server that has the slow imports behind it: each starts in a moment,
with no threads to inherit."""

import functools
import multiprocessing
import os
import socket
import sys

PRELOADED = ["torch", "transformers", "accelerate", "datasets", "hf_recurrent.training", "hf_recurrent.cli.train"]
PRELOADED += ["matplotlib.backends.backend_agg", "matplotlib.figure"]


@functools.cache
def _context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _call(function, args, environment, log):
    os.environ.update(environment)
    if log is not None:
        file = open(log, "w")  # noqa: SIM115 (for the process's whole life)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115
    import torch

    torch.set_num_threads(1)
    function(*args)


def start(function, *args, log=None, **environment):
    """A process that calls `function(*args)`, with more environment variables; its output goes to the file `log`."""
    process = _context().Process(target=_call, args=(function, args, environment, log))
    process.start()
    return process


def start_group(function, *args, processes, log=None):
    """`processes` of them, with the variables that a launcher sets for torch.distributed. Logs end in their rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    return [
        start(function, *args, log=None if log is None else f"{log}.{rank}", RANK=str(rank), LOCAL_RANK=str(rank),
              LOCAL_WORLD_SIZE=str(processes), OMP_NUM_THREADS="1", **group)
        for rank in range(processes)
    ]  # fmt: skip


def finish(processes, timeout=120):
    """Wait for processes; their exit codes. Those that outlast the time are killed, and count as None."""
    codes = []
    for process in processes:
        process.join(timeout)
        codes.append(process.exitcode)
        if process.is_alive():
            process.kill()
            process.join()
    return codes


def command_line(*argv):
    """`hf-recurrent ARGV` in this process, whose exit code becomes the command's."""
    from hf_recurrent import cli

    sys.exit(cli.main(list(map(str, argv))))
