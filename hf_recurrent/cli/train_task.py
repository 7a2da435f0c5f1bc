"""`hf-recurrent train --task`: train on one of the papers' generated tasks."""

import signal

from .parser import CommandLineError, Parser, in_one_process, no_bars_for_files, number


def _parser() -> Parser:
    parser = Parser(
        prog="hf-recurrent train --task",
        usage="hf-recurrent train --task NAME [--flags]",
        description="""\
Trains a new model on a task that is generated from a seed, fresh examples at every step, and prints the share of right
answers on others: selective_copying, associative_recall, memory_horizon, induction_heads, listops, or by S5 pathfinder,
pendulum (the mean squared error), tones (at half the sampling rate, too) and digits, from files of MNIST.""",
        epilog="""\
examples:
  hf-recurrent train --task selective_copying --task-args length=256 --num-hidden-layers 3
  hf-recurrent train --task associative_recall --task-args length=64,pairs=4,vocab_size=64 --model-type longhorn
  hf-recurrent train --task listops --task-args shortest=20,longest=100 --output-dir runs/listops
  hf-recurrent train --task memory_horizon --model-type gateloop --output-dir runs/horizon --resume auto
  hf-recurrent train --task associative_recall --task-args length=128 --model-type longhorn --start-from runs/recall-64
  hf-recurrent train --task tones --task-args rate=4000,seconds=0.5 --learning-rate 1e-3
  hf-recurrent train --task digits --task-args folder=mnist,permutation=0 --num-hidden-layers 4
""",
    )
    add = parser.add_argument
    add("--task", required=True, metavar="NAME", help="one of those above")
    add("--task-args", metavar="KEY=VALUE,...", help="sizes of the task (default: the paper's)")
    add(
        "--model-type",
        metavar="NAME",
        help="mingru (the default), minlstm, longhorn, gateloop or s5; to compare with, Transformers' own mamba",
    )
    add("--hidden-size", type=number(int, 1), default=64, metavar="N", help="width")
    add("--num-hidden-layers", type=number(int, 1), default=2, metavar="N", help="layers")
    add("--config-overrides", metavar="KEY=VALUE,...", help="other fields of the family's configuration")
    add("--max-steps", type=number(int, 1), default=1000, metavar="N", help="steps")
    add("--batch-size", type=number(int, 1), default=64, metavar="N", help="examples of a step")
    add("--learning-rate", type=number(float, 0, above=True), default=3e-3, metavar="X", help="of AdamW")
    add("--weight-decay", type=number(float, 0), default=0.0, metavar="X", help="of matrices")
    add("--start-from", metavar="DIR", help="begin with the weights of an earlier run, of the same model")
    add("--eval-examples", type=number(int, 1), default=1000, metavar="N", help="others, to measure on")
    add("--seed", type=number(int, 0), default=0, metavar="N", help="of weights and examples")
    add("--output-dir", metavar="DIR", help="save the model, task.json and checkpoints there")
    add("--overwrite", action="store_true", help="even where an earlier run is in that folder")
    add(
        "--resume",
        nargs="?",
        choices=("newest", "auto"),
        const="newest",
        metavar="auto",
        help="go on from the newest whole checkpoint in --output-dir; with auto, begin anew where there is none; "
        "where the run has finished, go on for more --max-steps, or print its result",
    )
    add(
        "--save-steps",
        type=number(int, 0),
        default=1000,
        metavar="N",
        help="steps between checkpoints, with another at the end; 0: none",
    )
    add("--keep-checkpoints", type=number(int, 1), default=2, metavar="N", help="the newest ones, which are kept")
    add("--cpu", action="store_true", help="train on the CPU even where there is a GPU")
    return parser


def _said(metric: str, value: float) -> str:
    return f"accuracy {value:.2%}" if metric == "accuracy" else f"mean squared error {value:.5f}"


def run(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):  # also behind a --task without a name, as one asks who does not know them
        argv = ["--help"]
    args = _parser().parse(argv)
    in_one_process("--task trains")

    import torch
    from tqdm import tqdm

    from ..tasks.settings import TaskTraining
    from ..tasks.train import train_task
    from ..training.model import parse_overrides

    no_bars_for_files()
    config = {"hidden_size": args.hidden_size, "num_hidden_layers": args.num_hidden_layers}
    overrides = parse_overrides(args.config_overrides or "")
    for name in overrides.keys() & config.keys():
        raise CommandLineError(f"--config-overrides: {name} has a flag of its own")
    names = ("task", "model_type", "max_steps", "batch_size", "learning_rate", "weight_decay", "eval_examples", "seed")
    names += ("start_from",)
    fields = {name: getattr(args, name) for name in names}
    training = TaskTraining(
        sizes=parse_overrides(args.task_args or "", "--task-args"), config=config | overrides, **fields
    )
    if args.overwrite and args.resume:
        raise CommandLineError("--overwrite and --resume cannot both be given")
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    with tqdm(total=args.max_steps, unit=" steps", disable=None, leave=False) as bar:

        def progress(step: int, loss: float, measured: float | None) -> None:
            bar.update(step - bar.n)
            bar.set_postfix(loss=f"{loss:.3f}")
            if measured is not None:
                tqdm.write(f"step {step:,}: loss {loss:.4f}, {_said(training.metric, measured)}")

        def resumed(step: int) -> None:
            tqdm.write(f"going on from step {step:,}")

        options = {name: getattr(args, name) for name in ("resume", "overwrite", "save_steps", "keep_checkpoints")}
        result = train_task(training, args.output_dir, device, progress, resumed=resumed, **options)
    if "interrupted" in result:
        print(f"stopped after step {result['step']:,}: the same command with --resume goes on")
        return 130 if result["interrupted"] == signal.SIGINT else 0
    of = f"{training.task}, {training.model_type} of {result['parameters']:,} parameters"
    print(f"{of}: {_said(training.metric, result[training.metric])}")
    if "half_rate" in result:
        zero_shot = result["half_rate"]
        print(
            f"at half the sampling rate, untrained: {_said('accuracy', zero_shot['accuracy'])}; "
            f"without step_rescale {zero_shot['accuracy_without_rescaling']:.2%}"
        )
    if args.output_dir is not None:
        print(f"The model and task.json are in {args.output_dir}")
    return 0
