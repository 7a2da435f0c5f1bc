"""`hf-recurrent convert`: checkpoints of the papers' own codes to ours and back."""

from .parser import Parser, add_shard_size, no_bars_for_files, number

OPTIONS = {  # Format.options, which cannot be imported for the help's sake: it would take seconds
    "activation": "S5: what follows the SSM, half_glu1 or half_glu2",
    "conj-sym": "S5: true where states are halves of conjugate pairs, else false",
    "discretization": "S5: zoh or bilinear",
    "clip-eigs": "S5: true or false",
    "prenorm": "S5: true for norms before the SSM, false for norms after the sum",
    "norm": "S5: layer, where the file has no batch statistics",
    "pooling": "S5: what the classifier reads, mean or last",
    "liquid": "s5-pytorch: false; true has no counterpart here",
    "degree": "s5-pytorch: 1; others have no counterpart here",
}


def _parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent convert",
        usage="hf-recurrent convert SOURCE DEST [--from FORMAT | --to FORMAT] [--flags]",
        description="""\
Convert a checkpoint of another code to a folder that from_pretrained loads, or one of our folders to another code's
format. The format of SOURCE is found by the names of its tensors. Nothing in a checkpoint is run.

formats:
  longhorn              the authors' Longhorn: pytorch_model.bin and config.json, or a training checkpoint
  mingru-pytorch        the state dict of its minLM, with minGRU or minLSTM
  gateloop-transformer  the state dict of its Transformer
  s5                    the authors' S5: flax's msgpack bytes, or a flat .npz
  s5-pytorch            the state dict of an S5Block, or of a stack of them
  transformers-mamba    a Mamba of Transformers, as the warm start of a Longhorn (only --from)""",
        epilog="""\
examples:
  hf-recurrent convert longhorn-130m models/longhorn --tokenizer EleutherAI/gpt-neox-20b
  hf-recurrent convert minlm.pt models/mingru --tokenizer bytes
  hf-recurrent convert listops.msgpack models/s5 --activation half_glu2 --assume-defaults
  hf-recurrent convert mamba-130m models/warm --from transformers-mamba
  hf-recurrent convert models/mingru minlm.pt --to mingru-pytorch
""",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="file or folder")
    add("dest", metavar="DEST", help="folder to write; with --to, the original's file (or for longhorn, its folder)")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--from", dest="from_format", metavar="FORMAT", help="of SOURCE (default: found by its names)")
    formats.add_argument("--to", dest="to_format", metavar="FORMAT", help="of DEST, for a SOURCE of this package")
    add("--tokenizer", metavar="NAME", help="to save with the model: bytes, a folder, or a name on the Hub")
    add("--dtype", metavar="DTYPE", help="float32, float64, float16 or bfloat16 (default: the checkpoint's)")
    add("--overwrite", action="store_true", help="replace what DEST holds, once the new one is whole")
    add_shard_size(parser)
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, metavar="N", help="of what a warm start initialises")
    add("--assume-defaults", action="store_true", help="take the original's defaults for what it does not say")
    group = parser.add_argument_group("what a checkpoint does not say (asked for where it matters)")
    for name, text in OPTIONS.items():
        group.add_argument(f"--{name}", dest=f"option_{name}", metavar="VALUE", help=text)
    return parser


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)

    from tqdm import tqdm

    from ..conversion import convert

    no_bars_for_files()
    given = {name: getattr(args, f"option_{name}") for name in OPTIONS}
    with tqdm(desc="converting", unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        report = convert(
            args.source,
            args.dest,
            from_format=args.from_format,
            to_format=args.to_format,
            tokenizer=args.tokenizer,
            dtype=args.dtype,
            overwrite=args.overwrite,
            options={name: value for name, value in given.items() if value is not None},
            assume_defaults=args.assume_defaults,
            max_shard_size=args.max_shard_size,
            seed=args.seed,
            progress=progress,
        )
    print(_text(report, args))
    return 0


def _text(report, args) -> str:
    arrow = (report.model_class, report.format) if args.to_format else (report.format, report.model_class)
    lines = [f"{arrow[0]} -> {arrow[1]}: {report.parameters:,} parameters, {report.dtype}"]
    if report.assumed:
        assumed = ", ".join(f"{name} {value}" for name, value in report.assumed.items())
        lines.append(f"Assumed, as the checkpoint does not say: {assumed}")
    for what, names in (("Initialised", report.fresh), ("Dropped", report.dropped), ("Left out", report.left_out)):
        if names:
            lines.append(f"{what}: {_by_layer(names)}")
    if report.fresh:
        lines.append("The model is a warm start: it has to be trained")
    lines.append(
        f"Written: {', '.join(report.files)} in {args.dest}" if not args.to_format else f"Written: {args.dest}"
    )
    return "\n".join(lines)


def _by_layer(names: list[str]) -> str:
    """Names with the numbers of layers left out, once each."""
    return ", ".join(dict.fromkeys(".".join("*" if part.isdecimal() else part for part in n.split(".")) for n in names))
