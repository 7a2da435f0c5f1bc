"""`hf-recurrent pull`: a model from the Hugging Face Hub."""

from .parser import Parser


def _parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent pull",
        usage="hf-recurrent pull USER/REPO DIR [--flags]",
        description="Download a model from the Hugging Face Hub into a folder, which appears when all of it is there. "
        "Files that run code when they are read (pickles) are left out.",
        epilog="""\
examples:
  hf-recurrent pull me/books books
  hf-recurrent pull me/books books --revision experiment --overwrite
""",
    )
    add = parser.add_argument
    add("repo", metavar="USER/REPO", help="the repository")
    add("folder", metavar="DIR", help="folder to write")
    add("--revision", metavar="NAME", help="branch, tag or commit (default: main)")
    add("--overwrite", action="store_true", help="replace a model that is in DIR, as a whole")
    return parser


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)

    from ..hub.pull import pull

    commit = pull(args.repo, args.folder, revision=args.revision, overwrite=args.overwrite)
    print(f"Pulled: {args.repo} at {commit} into {args.folder}")
    return 0
