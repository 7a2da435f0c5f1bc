"""`hf-recurrent push`: a model to the Hugging Face Hub."""

from .parser import Parser, add_shard_size, no_bars_for_files


def _parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent push",
        usage="hf-recurrent push DIR USER/REPO [--flags]",
        description="Upload a model to the Hugging Face Hub in one commit: weights, configurations, tokenizer, a model "
        "card from what is known of the run, and the code to load it. The token is `hf auth login`'s, or HF_TOKEN.",
        epilog="""\
examples:
  hf-recurrent push runs/books me/books --license mit --language en
  hf-recurrent push runs/books me/books --private --revision experiment
  hf-recurrent push runs/books me/books --standalone      loads where hf_recurrent is not installed
""",
    )
    add = parser.add_argument
    add("folder", metavar="DIR", help="folder of a model; a README.md in it becomes the card as it is")
    add("repo", metavar="USER/REPO", help="the repository, made if there is none")
    add(
        "--license", metavar="ID", help="of the model, for its card: mit, apache-2.0 ... (default: the run's, if given)"
    )
    add("--language", nargs="+", metavar="ID", help="of the corpus, for the card: en, de ... (default: the run's)")
    add("--private", action="store_true", help="if the repository is made, hide it from others")
    add("--revision", metavar="BRANCH", help="branch to commit to, made if there is none (default: main)")
    add("--commit-message", default="Upload a model of hf_recurrent", metavar="TEXT", help="of the commit")
    add("--standalone", action="store_true", help="with the model's code, as hf-recurrent export writes it")
    add_shard_size(parser)
    return parser


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)

    from ..hub.push import push_folder

    no_bars_for_files()
    url = push_folder(
        args.folder,
        args.repo,
        code="standalone" if args.standalone else "shim",
        license=args.license,
        language=args.language,
        private=args.private or None,
        revision=args.revision,
        commit_message=args.commit_message,
        max_shard_size=args.max_shard_size,
    )
    print(f"Pushed: {url}")
    return 0
