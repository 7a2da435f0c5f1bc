"""`hf-recurrent bench`: how close the scans come to the speed of this machine's memory."""

import json
from pathlib import Path

from .parser import CommandLineError, Parser, check_writable, number


def _parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent bench",
        usage="hf-recurrent bench [--flags]",
        description="Time the scans against torch.add on the same bytes: the limit that memory sets.",
        epilog="""\
A ratio of 1 is the speed of memory. Measure on an otherwise idle machine; the peers that are not installed are named.

examples:
  hf-recurrent bench
  hf-recurrent bench --shape 1 1048576 256 --threads 8
  hf-recurrent bench --output bench.json
""",
    )
    add = parser.add_argument
    add(
        "--shape",
        nargs=3,
        type=number(int, 1, 2**31),
        metavar=("B", "L", "D"),
        help="batch, length and channels (default: 8 1024 768, on a GPU 8 4096 2048)",
    )
    add("--only", metavar="TEXT", help="only what has TEXT in its name: linear_scan, minGRU, Longhorn, plain ...")
    add("--repeats", type=number(int, 1, 10_000), default=9, metavar="N", help="pairs of runs, of which the median")
    add("--threads", type=number(int, 1, 4096), metavar="N", help="threads on the CPU (default: PyTorch's)")
    add("--output", metavar="FILE", help="also write the figures there, as JSON")
    add("--cpu", action="store_true", help="measure the CPU even where there is a GPU")
    return parser


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)
    if args.output is not None:
        check_writable("--output", args.output)

    import torch

    from ..bench import CASES, DTYPES, PEERS, Case, measure_case, peer_scans
    from ..files import write_whole
    from ..malloc import keep_freed_memory
    from ..measure import machine
    from ..messages import within_memory
    from ..versions import version_of

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.cpu else "cpu")
    shape = tuple(args.shape or ((8, 1024, 768) if device.type == "cpu" else (8, 4096, 2048)))
    about = machine(("hf-recurrent", "torch", *PEERS))
    scan = CASES[0]
    peers = [Case(name, scan.inputs, function, scan.moved) for name, function in peer_scans().items()]
    known = [*CASES, *peers]
    cases = [case for case in known if (args.only or "").lower() in case.name.lower()]
    if not cases:
        raise CommandLineError(f"--only {args.only}: no such name; known: {'; '.join(case.name for case in known)}")
    rows, kept = [], keep_freed_memory()
    where = about["cpu"] if device.type == "cpu" else torch.cuda.get_device_name(device)
    print(f"{where}, {about['threads']} threads, torch {about['packages']['torch']}, shape {shape}")
    if not kept and device.type == "cpu":
        print("The times hold page faults: this C library returns freed memory to the system")
    print(f"{'':<37}{'dtype':<11}{'pass':<10}{'ms':>10}{'limit':>10}{'ratio':>8}{'GB/s':>9}")
    with within_memory("try a smaller --shape"):
        for case in cases:
            for dtype in DTYPES[:1] if case.complex or case in peers else DTYPES:
                for row in measure_case(case, shape, dtype, device, args.repeats):
                    rows.append(row)
                    print(
                        f"{row['name']:<37}{row['dtype']:<11}{row['pass']:<10}{row['milliseconds']:>10.3f}"
                        f"{row['limit_milliseconds']:>10.3f}{row['ratio']:>8.2f}{row['gigabytes_per_second']:>9.1f}",
                        flush=True,
                    )
    for package in PEERS:
        if version_of(package) is None:
            print(f"Not measured: {package} is not installed")
    if args.output is not None:
        command = " ".join(["hf-recurrent bench", *argv])
        document = {"command": command, "machine": about, "device": where, "results": rows}
        write_whole(Path(args.output), json.dumps(document, indent=1) + "\n")
    return 0
