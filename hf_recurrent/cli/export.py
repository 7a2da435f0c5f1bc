"""`hf-recurrent export`: a model's folder with the code to load it."""

from pathlib import Path

from .parser import CommandLineError, Parser, add_shard_size, no_bars_for_files


def _parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent export",
        usage="hf-recurrent export DIR [OUT] --standalone [--flags]",
        description="Write a model with all the code that it needs in one file of plain PyTorch: it then loads with "
        "Transformers alone, by trust_remote_code=True, where this package is not installed.",
        epilog="""\
examples:
  hf-recurrent export runs/books books-standalone --standalone
  hf-recurrent export runs/books books-standalone --standalone --overwrite --max-shard-size 2GB

  and in Python, with Transformers alone:
  AutoModelForCausalLM.from_pretrained("books-standalone", trust_remote_code=True)
""",
    )
    add = parser.add_argument
    add("folder", metavar="DIR", help="folder of a model")
    add("output", nargs="?", metavar="OUT", help="folder to write (default: DIR-standalone)")
    add("--standalone", action="store_true", required=True, help="with the model's code in one file")
    add_shard_size(parser)
    add("--overwrite", action="store_true", help="replace a model that is in OUT, as a whole")
    return parser


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)
    output = Path(args.output or f"{args.folder.rstrip('/')}-standalone")

    from ..hub.staging import check_destination, load, new_folder, stage

    here, there = Path(args.folder).resolve(), output.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise CommandLineError(f"OUT {output}: must lie apart from DIR {args.folder}")
    check_destination(output, args.overwrite)
    no_bars_for_files()
    model = load(args.folder)
    with new_folder(output, args.overwrite) as folder:
        stage(model, folder, source=Path(args.folder), code="standalone", max_shard_size=args.max_shard_size)
    print(f"Written: {output}, which loads with Transformers alone (trust_remote_code=True)")
    return 0
