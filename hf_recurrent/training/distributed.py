"""How a run is spread over processes. Accelerate does it, by DDP, FSDP2 or DeepSpeed; here is what it must be told, and
what differs between them for the loop.

Under FSDP2 (`torch.distributed.fsdp.fully_shard`) weights, gradients and optimiser states are cut over the processes,
and the model's block is the unit that is gathered when it runs. In mixed precision it is gathered in the lower one;
gradients are always summed in float32.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.integrations import unset_hf_deepspeed_config

from ..messages import first_line
from ..modeling.model import RecurrentPreTrainedModel
from ..parallel import context_parallel
from ..parallel.context import ContextParallel
from .arguments import TrainArguments

LOWER_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def create_accelerator(args: TrainArguments, **options) -> Accelerator:
    """Accelerate's engine for this process, in the form that the arguments or `accelerate launch` ask for.

    Args:
        options: others of `Accelerator`'s.

    Raises:
        ValueError: FSDP of another version than 2, or settings of the launcher's that would not be honoured.
        RuntimeError: the launcher's port is taken.
        ImportError: DeepSpeed is asked for and not installed.
    """
    group = {}
    if args.timeout_minutes is not None:
        group["timeout"] = timedelta(minutes=args.timeout_minutes)
    fsdp_plugin = deepspeed_plugin = None
    if _launched_with("DEEPSPEED"):
        if args.fsdp:
            raise ValueError("--fsdp: `accelerate launch --use_deepspeed` shards the weights already; leave one out")
        deepspeed_plugin = DeepSpeedPlugin(zero3_init_flag=False, zero3_save_16bit_model=True)
        if not torch.accelerator.is_available():
            group["backend"] = "gloo"
    elif args.fsdp or _launched_with("FSDP"):
        fsdp_plugin = create_fsdp_plugin()
    launched = _launched_with("FSDP")
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        cpu=args.cpu,
        fsdp_plugin=fsdp_plugin,
        deepspeed_plugin=deepspeed_plugin,
        kwargs_handlers=[InitProcessGroupKwargs(**group)] if group else None,
        **options,
    )
    if deepspeed_plugin is not None:
        # Transformers would make a model in shards for ZeRO-3. Made whole and cut afterwards, it starts from the same
        # weights as without DeepSpeed, and its parameters have the shapes by which they are grouped.
        unset_hf_deepspeed_config()
    if fsdp_plugin is not None and not launched:
        del os.environ["ACCELERATE_USE_FSDP"]  # Accelerate has set it, and it would ask the next run for FSDP
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"accelerate's gradient_accumulation_steps must be 1, got {accelerator.gradient_accumulation_steps}: "
            "the run has --gradient-accumulation-steps or --total-batch-size instead"
        )
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:  # the model that is saved would have the wrapper's names
        raise ValueError(f"accelerate's dynamo_backend must be no, got {backend.value.lower()}: --compile compiles")
    if fsdp_plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        _shard_on_cpu(accelerator, fsdp_plugin)
    return accelerator


def _launched_with(engine: str) -> bool:
    """Whether `accelerate launch` (or its configuration) has asked for "FSDP" or "DEEPSPEED"."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def create_fsdp_plugin() -> FullyShardedDataParallelPlugin:
    """FSDP2 with the model's block as the unit and sharded state dicts; the rest, such as offloading and resharding, is
    what `accelerate launch` was told.

    Raises:
        ValueError: see `create_accelerator`.
    """
    if _launched_with("FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError("accelerate launch --use_fsdp needs --fsdp_version 2: version 1 is not supported")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",  # `_no_split_modules`
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,  # every process makes the same model, from the same seed or files
    )
    if plugin.activation_checkpointing:
        raise ValueError(
            "accelerate's fsdp_activation_checkpointing must be false: --gradient-checkpointing does it, and repeats "
            "dropout as it was"
        )
    return plugin


def _shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Accelerate takes an FSDP plugin on accelerators only, though what it then calls works over gloo as well: this
    sets what it sets in its state there. The mesh is named, or torch would look for a GPU."""
    state = accelerator.state
    state.fsdp_plugin = plugin
    state.parallelism_config = ParallelismConfig(dp_shard_size=accelerator.num_processes)
    state.device_mesh = torch.distributed.init_device_mesh(
        "cpu", (accelerator.num_processes,), mesh_dim_names=("dp_shard_cp",)
    )
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def split_context(accelerator: Accelerator, model: PreTrainedModel, args: TrainArguments) -> ContextParallel | None:
    """Let `model` take its rows for parts of longer ones, of which the next --context-parallel processes, from a
    multiple of that number on, have one each; None without.

    Raises:
        ValueError: DeepSpeed, or a model whose context cannot be split.
    """
    if args.context_parallel == 1:
        return None
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(f"--context-parallel must be 1 under DeepSpeed, got {args.context_parallel}")
    if not isinstance(model, RecurrentPreTrainedModel):
        raise ValueError(f"--context-parallel must be 1 for a {type(model).__name__}, got {args.context_parallel}")
    timeout = None if args.timeout_minutes is None else timedelta(minutes=args.timeout_minutes)
    group, _ = torch.distributed.new_subgroups(args.context_parallel, timeout=timeout)
    return context_parallel(model, group)


def compile_model(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """torch.compile in place: of the model, or under FSDP2, whose gathering stands between them, of each block."""
    for module in model.base_model.layers if accelerator.is_fsdp2 else [model]:
        module.compile()


def prepare(
    accelerator: Accelerator, model: PreTrainedModel, optimizer: torch.optim.Optimizer, args: TrainArguments, rows: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`accelerator.prepare`, after what differs between the engines.

    Args:
        rows: of one process in one pass, which DeepSpeed wants to know.

    Raises:
        ValueError: what cannot be had together.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # Passes are counted by the loop, so that to DeepSpeed each step is one; it clips by itself.
        accelerator.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": args.max_grad_norm,
        }
    if accelerator.is_fsdp2:
        if args.bptt_carry_gradients and model.config.learned_initial_state:
            # Each call of a block sends the gradients that it has, and only calls with a text's start have those.
            raise ValueError("--fsdp: --bptt-carry-gradients needs learned_initial_state=False, got True")
        _set_precision(accelerator, model)
        # What a block returns beside its output are states, which nothing changes in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    return accelerator.prepare(model, optimizer)


def _set_precision(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Mixed precision as without FSDP2, by autocast; blocks are gathered in the lower precision, or autocast would keep
    a copy of every one. Inputs are left as they are: residual streams and states are in float32."""
    dtype = LOWER_PRECISION.get(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=None if model.base_model.float32_weights else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    if dtype is not None:
        model.forward = torch.autocast(accelerator.device.type, dtype)(model.forward)


@contextlib.contextmanager
def accumulating(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """The backward passes inside leave their gradients with this process; one after them sends the sum. Under FSDP2
    they are whole until then."""
    accelerator.sync_gradients = False  # by which Accelerate tells DeepSpeed not to step
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        accelerator.sync_gradients = True


def waits_for_every_gradient(model: nn.Module) -> bool:
    """Whether a parameter without a gradient would stop a backward pass: DDP's."""
    return isinstance(model, DistributedDataParallel)


def clip_gradients(accelerator: Accelerator, model: nn.Module, max_norm: float) -> Tensor | float | None:
    """Clip the gradients of all processes together, unless `max_norm` is 0; their norm before that. DeepSpeed has
    clipped already, and does not always know the norm: None then."""
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def whole_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """The weights of all processes, in the main one, on the CPU where they were sharded; every process must call it.
    Tied ones are one tensor again, as `save_pretrained` expects them."""
    weights = accelerator.get_state_dict(model)
    for name, source in accelerator.unwrap_model(model).all_tied_weights_keys.items():
        if name in weights:
            weights[name] = weights[source]
    return weights


def widest(device: torch.device) -> torch.dtype:
    """In which long sums are taken: float64, which Apple's GPUs lack."""
    return torch.float32 if device.type == "mps" else torch.float64


def local_part(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter: all of it, or its shard."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return getattr(parameter, "ds_tensor", parameter)  # ZeRO-3's


@contextlib.contextmanager
def naming_lost_processes(args: TrainArguments) -> Iterator[None]:
    """Turns what gloo and NCCL raise into one line that says why: another process has ended, or hangs.

    Raises:
        ConnectionError: in place of it.
    """
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        cause = error  # what was being saved or loaded at that moment may have been blamed in between
        while cause is not None and not _comes_from_group(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        minutes = "" if args.timeout_minutes is None else f" for {args.timeout_minutes:g} minutes"
        raise ConnectionError(
            f"another process of this run has ended, or has not answered{minutes}: {first_line(cause)}"
        ) from error


def _comes_from_group(error: BaseException) -> bool:
    if "EADDRINUSE" in str(error):  # it says itself which port is taken
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
