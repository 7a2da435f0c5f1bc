"""`hf-recurrent train --dry-run`: what a recipe asks for, counted without its data and without training."""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..messages import counted
from .arguments import DataArguments, ModelArguments, TrainArguments, check_together
from .costs import matrix_rate
from .model import checkpoint_activations, planned_config
from .report import table
from .trackers import check_names

STATE_BYTES = 16  # of AdamW in float32, per parameter: the weight, its gradient, and two moments
GIB = 2**30
UNITS = (("days", 86400), ("h", 3600), ("min", 60), ("s", 1))


@dataclass
class Counts:
    """One forward pass of one process.

    Args:
        parameters: of the model, tied ones once.
        flops: of its matrix products and convolutions, 2 for a multiplication and an addition.
        activations: bytes that are kept for the backward pass.
    """

    parameters: int
    flops: int
    activations: int


def count(model: PreTrainedModel, rows: int, length: int, **loss_options: bool) -> Counts:
    """Count on the meta device, where shapes are computed and nothing else.

    Args:
        model: on the meta device, in training mode.
        loss_options: what else its call is given.
    """
    kept: dict[int, int] = {}
    alive = []  # so that no address is counted for two tensors

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        alive.append(storage)
        return x

    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(ids, labels=ids, use_cache=False, **loss_options).loss
    parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    del loss
    activations = sum(size for storage, size in kept.items() if storage not in weights)
    return Counts(parameters, counter.get_total_flops(), activations)


def dry_run(model_args: ModelArguments, data_args: DataArguments, train_args: TrainArguments) -> dict:
    """Print what a run of these arguments would be. Nothing is read, written or downloaded but a model or tokenizer
    in a folder that the arguments name.

    Returns:
        `parameters`, `tokens_per_step`, `flops_per_step`, `activation_bytes`, `state_bytes`, and where the arguments
        tell the number of steps, `steps` and `seconds`: the least that the matrix products take here. Of one process,
        but for the tokens, which are those of all processes that share a row.

    Raises:
        ValueError: arguments that `train` would refuse before it looks at the data.
    """
    check_together(model_args, data_args, train_args)
    check_names(train_args.log_with)
    parts = train_args.context_parallel
    batch_size, passes = train_args.passes(replicas=1)
    length = -(-data_args.sequence_length // parts)
    config = planned_config(model_args, data_args, train_args)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).train()
    counts = count(model, batch_size, length)
    whole = train_args.bptt_chunk is None or train_args.bptt_carry_gradients  # a row's activations are there at once
    options = checkpoint_activations(model) if train_args.gradient_checkpointing else {}
    if options or not whole:
        chunk = length if whole else train_args.bptt_chunk
        options = {} if train_args.bptt_carry_gradients else options  # as in training
        counts.activations = count(model, batch_size, chunk, **options).activations
    tokens = batch_size * passes * data_args.sequence_length
    flops = 3 * counts.flops * passes  # backward, each matrix product is two
    if train_args.gradient_checkpointing:  # the forward pass is done twice, but for the head's
        flops += counts.flops * passes - 2 * batch_size * passes * length * model.lm_head.weight.numel()
    state = counts.parameters * STATE_BYTES
    rate = matrix_rate("cpu" if train_args.cpu else None)
    result = {
        "parameters": counts.parameters,
        "tokens_per_step": tokens,
        "flops_per_step": flops,
        "activation_bytes": counts.activations,
        "state_bytes": state,
    }
    rows = [
        ("model", f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}"),
        ("vocabulary", counted(config.vocab_size, "token")),
        ("parameters", f"{counts.parameters:,}"),
        (
            f"step, on {'one process' if parts == 1 else f'{parts} processes'}",
            f"{passes} x {batch_size} rows of {data_args.sequence_length} = {tokens:,} tokens",
        ),
        (f"matrix products per step{'' if parts == 1 else ', of each'}", f"{flops:.3g} FLOP"),
        ("weights, gradients, AdamW", f"{state / GIB:.2f} GiB"),
        (f"activations of one {'pass' if whole else 'chunk'}, in float32", f"{counts.activations / GIB:.2f} GiB"),
        ("this machine", f"{rate / 1e9:,.0f} GFLOP/s in float32"),
    ]
    if train_args.max_steps is not None:
        result["steps"], result["seconds"] = train_args.max_steps, train_args.max_steps * flops / rate
        rows.append(("steps", f"{train_args.max_steps:,}, {train_args.max_steps * tokens:,} tokens"))
        rows.append(("time of the matrix products here", duration(result["seconds"])))
    else:
        rows.append(("time of the matrix products here", f"{duration(flops / rate)} per step"))
    if train_args.max_minutes is not None:
        rows.append(("at most", duration(60 * train_args.max_minutes)))
    print(table(rows))
    return result


def duration(seconds: float) -> str:
    """0.25 s, 12 min, 3.4 h, 250 days."""
    unit, size = next(((unit, size) for unit, size in UNITS if seconds >= size), UNITS[-1])
    return f"{seconds / size:,.2g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
