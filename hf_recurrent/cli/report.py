"""`hf-recurrent report`: runs gathered into one page."""

from pathlib import Path

from .parser import CommandLineError, Parser, check_writable, no_bars_for_files

EXAMPLES = """\
examples:
  hf-recurrent report runs
  hf-recurrent report runs/mqar-* runs/copying-* --output report.md
  hf-recurrent report runs --papers --output tables.md
"""
FORMATS = (".html", ".md")


def run(argv: list[str]) -> int:
    parser = Parser(
        prog="hf-recurrent report",
        usage="hf-recurrent report DIR [DIR ...] [--output FILE]",
        description="""\
Gathers runs into one page: of `train --task` the papers' tasks, mean and deviation over seeds, beside the papers'
figures; of `train` the losses; of `evaluate perplexity` the perplexity by position; of `evaluate lm` lm-eval's results.
What cannot be used is named in the page, with the reason.""",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="folder of a run, or one in which runs lie, at any depth")
    add("--output", default="report.html", metavar="FILE", help="page, .html or .md")
    add("--papers", action="store_true", help="also list the papers' figures that no run stands beside, as not run")
    args = parser.parse(argv)
    output = Path(args.output)
    if output.suffix not in FORMATS:
        raise CommandLineError(f"--output {args.output}: expected a name ending in {' or '.join(FORMATS)}")
    check_writable("--output", args.output)

    from ..messages import counted
    from ..report import gather, write_report

    no_bars_for_files()
    runs = gather(args.folders)
    write_report(runs, output, args.papers)
    number = sum(map(len, (runs.tasks, runs.texts, runs.perplexities, runs.evaluations)))
    print(f"{counted(number, 'result')} in {output}")
    for name, why in runs.passed_over:
        print(f"Passed over: {name}: {why}")
    return 0
