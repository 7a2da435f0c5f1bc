"""`hf-recurrent evaluate perplexity`: of a text of any length, by position."""

from pathlib import Path

from ..messages import counted
from .parser import Parser, add_model_flags, add_output_folder, check_output_folder, load_model_and_tokenizer, number


def _parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent evaluate perplexity",
        usage="hf-recurrent evaluate perplexity --model DIR --data-files FILE [FILE ...] [--flags]",
        description="Perplexity and bits per byte of a text of any length, over all of it and by position.",
        epilog="""\
examples:
  hf-recurrent evaluate perplexity --model runs/books --data-files book.txt
  hf-recurrent evaluate perplexity --model runs/books --data-files 'test/*.txt' --window 32768 --output runs/length
""",
    )
    add = parser.add_argument
    add_model_flags(parser, "compute")
    add("--data-files", required=True, nargs="+", metavar="FILE", help="text files (globs too), read as one text")
    add("--text-column", default="text", metavar="NAME", help="of JSON lines, CSV and Parquet files")
    add(
        "--window",
        type=number(int, 2),
        metavar="N",
        help="start again from nothing after N tokens (default: read on to the end)",
    )
    add("--chunk-size", type=number(int, 1), default=1024, metavar="N", help="tokens that are read at once")
    add_output_folder(parser, "also write perplexity.json and perplexity.png there")
    return parser


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)

    from tqdm import tqdm

    from ..evaluation import measure_perplexity
    from ..evaluation.perplexity import save, shown
    from ..hub.card import run_facts
    from ..training.report import table
    from ..training.sources import expand, file_documents
    from ..training.tokens import pieces

    files = expand(args.data_files, "--data-files")
    if args.output is not None:
        check_output_folder(args, "perplexity.json")
    model, tokenizer = load_model_and_tokenizer(args)
    texts = list(file_documents(files, args.text_column).texts())
    text_bytes = sum(len(text.encode()) for text in texts)
    tokens = (
        token
        for text in texts
        for piece in pieces(text)
        # As in training: special tokens that occur in a text are the characters they are.
        for token in tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    )
    with tqdm(desc="reading", unit=" tokens", unit_scale=True, disable=None, leave=False) as bar:
        try:
            result = measure_perplexity(model, tokens, text_bytes, args.window, args.chunk_size, bar.update)
        except IndexError as error:
            raise ValueError(f"--model {args.model}: its tokenizer does not fit: {error}") from error
    whole = result.as_dict()
    rows = [("tokens before", "tokens  perplexity")]
    rows += [
        (f"{row['from']:,} to {row['to']:,}", f"{row['tokens']:,}  {shown(row['perplexity']):>10}")
        for row in whole["by_position"]
    ]
    rows.append(("all", f"{whole['tokens']:,}  {shown(whole['perplexity']):>10}"))
    print(table(rows))
    print(f"{whole['bits_per_byte']:.4f} bits per byte, over {counted(text_bytes, 'byte')}")
    if args.output is not None:
        title = f"{Path(args.model).name} on {counted(text_bytes, 'byte')} of text"
        save(result, Path(args.output), title, run_facts(Path(args.model))[0].get("sequence_length"))
        print(f"Written: perplexity.json and perplexity.png in {args.output}")
    return 0
