"""`hf-recurrent plot`: curves of several runs in one picture."""

from pathlib import Path

from .parser import CommandLineError, Parser, check_writable

EXAMPLES = """\
examples:
  hf-recurrent plot runs/mingru runs/longhorn
  hf-recurrent plot runs/* --metric validation_bits_per_byte grad_norm --x tokens --output curves.svg
  hf-recurrent plot runs/mingru --metric loss --log
  hf-recurrent plot runs/mingru --metric memory_16 memory_256 gates_open gates_open/layer_0
"""
FORMATS = (".png", ".svg", ".pdf")


def run(argv: list[str]) -> int:
    from ..training import curves

    parser = Parser(prog="hf-recurrent plot", description="Draw curves of several runs.", epilog=EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument("--metric", nargs="+", metavar="NAME", help="names in metrics.jsonl (default: both losses)")
    parser.add_argument("--x", choices=curves.X_AXES, default="step", help="what runs to the right")
    parser.add_argument("--log", action="store_true", help="logarithmic upwards")
    parser.add_argument("--output", default="curves.png", metavar="FILE", help="picture")
    args = parser.parse(argv)
    if Path(args.output).suffix.lower() not in FORMATS:
        raise CommandLineError(f"--output {args.output}: expected a name ending in {', '.join(FORMATS)}")
    check_writable("--output", args.output)
    runs = curves.read_runs(args.runs)
    there = {name for lines in runs.values() for line in lines for name in line}
    quantities = args.metric or [name for name in curves.DEFAULT if name in there]
    if not quantities:
        raise CommandLineError(f"no run has a loss yet; --metric takes {', '.join(sorted(there))}")
    curves.check_quantities(runs, quantities)

    from ..files import replacing

    figure = curves.plot_runs(runs, quantities, args.x, logarithmic=args.log)
    with replacing(Path(args.output)) as temporary:  # what fails in there is told as a failing disk
        curves.save_plot(figure, temporary)
    print(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} drawn in {args.output}")
    return 0
