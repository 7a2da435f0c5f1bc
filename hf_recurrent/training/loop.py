"""The training loop: rows in, a folder with a model out."""

import contextlib
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from ..files import write_whole
from ..malloc import keep_freed_memory
from ..messages import counted
from ..modeling.model import IGNORED
from ..parallel import part
from . import checkpoints, costs, distributed
from .agreement import check_alike, check_shared
from .arguments import DataArguments, ModelArguments, TrainArguments, check_together, flag, to_yaml
from .bptt import backward_in_chunks
from .data_arguments import DEFAULT_VOCAB_SIZE
from .documents import Corpus
from .folder import ARGUMENTS, BAD_BATCHES, TRACKERS, RunFolder
from .health import health
from .input import build_rows, first_texts, prune_token_cache, save_places, summary
from .loss_policy import LossPolicy, Verdict
from .model import (
    brings_tokenizer,
    check_fit,
    check_folder,
    checkpoint_activations,
    create_model,
    load_model,
    planned_config,
)
from .optimizer import create_optimizer, learning_rate_ratio
from .prefetch import Prefetcher
from .progress import progress_bar
from .report import Baselines, baselines, perplexity, plot_loss, readable, table
from .signals import interrupts
from .sources import load_corpus
from .tokenizer import TokenizerSize, byte_tokenizer, load_tokenizer, train_bpe
from .trackers import check_trackers, finish_trackers, send, start_trackers
from .validation import ValidationRows, validation_rows

CHECKPOINT_FORMAT = 3
VALIDATED = ("validation_loss", "validation_perplexity", "validation_bits_per_byte")
BEGINNING = 32  # tokens of a bad batch's rows that are told
# What may differ between a checkpoint and the run that goes on from it. Everything else decides which run it is.
FREE = {
    "output_dir",
    "dry_run",
    "overwrite",
    "resume",
    "max_steps",
    "num_epochs",
    "max_minutes",
    "gradient_checkpointing",
}
FREE |= {"compile", "cpu", "log_steps", "eval_steps", "eval_rows", "save_steps", "keep_checkpoints"}
# How the rows of a step are shared out, which may differ; their number may not.
FREE |= {"batch_size", "gradient_accumulation_steps", "total_batch_size", "context_parallel"}
# What is watched, and what is done about it.
FREE |= {"on_bad_loss", "on_loss_spike", "loss_spike_threshold", "max_skipped_steps", "health_steps", "log_with"}
FREE |= {"token_cache", "token_cache_gb", "license", "language", "fsdp", "timeout_minutes"}


@dataclasses.dataclass
class State:
    """Where a run is. Saved with every checkpoint.

    Args:
        step: optimiser steps taken.
        rows: rows consumed of the endless shuffled order.
        seconds: time spent training, interruptions not counted.
        loss_sum, loss_steps: the losses since the latest line of metrics, and over how many steps.
        recent_losses, skipped, skipped_in_row: what `LossPolicy` remembers: the latest losses, and how many steps have
            been skipped in all and at last.
    """

    step: int = 0
    rows: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_steps: int = 0
    recent_losses: list[float] = dataclasses.field(default_factory=list)
    skipped: int = 0
    skipped_in_row: int = 0


class Interrupted(Exception):
    """A signal, by its number, has come where there is no step that it could end the run after."""

    @property
    def number(self) -> int:
        return self.args[0]


def train(model_args: ModelArguments, data_args: DataArguments, train_args: TrainArguments) -> dict:
    """Train a model and leave it in `train_args.output_dir`.

    Call it in every process. On SIGINT or SIGTERM the run stops after the current step, saves a checkpoint and the
    model, and returns. Resumed after its end, it does nothing again.

    Returns:
        `output_dir`, `step`, `interrupted` (the signal's number, 0 where there was none), `train_loss` (the latest
        logged), and, where there is validation text and
        the run was not interrupted, `validation_loss` (nats per token), `validation_perplexity` (infinite where a
        float overflows), `validation_bits_per_byte`, `unigram_bits_per_byte`, `gzip_bits_per_byte`.

    Raises:
        ValueError, OSError: arguments, data or a folder that cannot be used; nothing has been left half-written.
        FloatingPointError: the loss or the weights are no longer finite; no such weights are saved.
        ConnectionError: another process has ended, or hangs.
    """
    with distributed.naming_lost_processes(train_args):
        return Run(model_args, data_args, train_args).train()


class Run:
    """One training run: what `train` needs between its steps."""

    def __init__(self, model_args: ModelArguments, data_args: DataArguments, train_args: TrainArguments):
        self.args = train_args
        self.arguments = (model_args, data_args, train_args)
        check_together(*self.arguments)
        if train_args.output_dir is None:
            train_args.output_dir = f"runs/{model_args.model_type or 'mingru'}"
        self.folder = RunFolder(train_args.output_dir)
        try:
            self._prepare()
        except BaseException:
            self.folder.unlock()
            raise

    def _prepare(self) -> None:
        """All that comes before the first step. Only the main process locks the folder, for all of them."""
        model_args, data_args, train_args = self.arguments
        self.accelerator = distributed.create_accelerator(
            train_args,
            log_with=check_trackers(train_args.log_with) if train_args.log_with else None,
            project_dir=str(self.folder.path / TRACKERS),
        )
        if self.accelerator.mixed_precision != "no":  # `accelerate launch` may have told it, and train.yaml is to
            train_args.mixed_precision = self.accelerator.mixed_precision
        if self.accelerator.mixed_precision == "fp16" and self.accelerator.device.type == "cpu":
            raise ValueError("--mixed-precision fp16: Accelerate has it on accelerators only; on the CPU bf16 works")
        refusal = None
        try:
            if self.accelerator.is_main_process:
                self.folder.lock()  # first: what another run is doing there is not to be judged
            self.folder.check(overwrite=train_args.overwrite, resume=train_args.resume)
        except OSError as error:
            refusal = error  # which the other processes are to hear of, who would wait for this one
        self.rank, self.processes = self.accelerator.process_index, self.accelerator.num_processes
        # The processes that share a row are one replica of the model to all that deals out rows.
        self.replicas = train_args.replicas(self.processes)
        self.batch_size, self.passes = train_args.passes(self.replicas)
        self.replica, self.part = divmod(self.rank, train_args.context_parallel)
        self.state = State()
        self.checkpoint = checkpoint = self.folder.newest_checkpoint() if train_args.resume else None
        check_alike(self.arguments, checkpoint, refusal)  # by then every one has seen the folder as it was
        # A checkpoint has all weights, so that the model that the run began with need not be there any more. (Those of
        # older versions lack its configuration.)
        self.has_configuration = checkpoint is not None and (checkpoint / CONFIG_NAME).is_file()
        if not self.has_configuration:
            planned_config(*self.arguments)  # what it refuses is not to wait for the corpus
        saved = None if checkpoint is None else self._read_state(checkpoint)

        corpus = load_corpus(data_args, train_args.seed)
        self.tokenizer = self._tokenizer(corpus, checkpoint)
        self.rows = build_rows(
            corpus, self.tokenizer, data_args, train_args.seed, visible=self.rank == 0, checkpoint=checkpoint
        )
        # Which all of them know when every one has found its tokens in the cache.
        if len(set(gather_object([self.rows.digest]))) > 1:
            raise ValueError(
                "the corpus or its tokens are not the same in all processes: each machine needs the same files, or for "
                "the default corpus the same Python"
            )
        if self.accelerator.is_local_main_process and (removed := prune_token_cache(self.rows, data_args)):
            tqdm.write(removed)
        self.total_steps = self._total_steps()
        set_seed(train_args.seed)
        self.loss_options: dict[str, bool] = {}  # what else each call of the model is given
        model = self._model()
        self.validation = self._validation_rows(corpus, data_args.sequence_length, model.config.vocab_size)
        if self.processes > 1 and len(set(gather_object([self._digest(model)]))) > 1:
            raise ValueError("the validation text or the weights of --model are not the same in all processes")
        if saved is not None and saved["digest"] != self.rows.digest:
            raise ValueError(f"--resume: the corpus or its tokens have changed since {checkpoint} was written")
        set_seed(train_args.seed, device_specific=True)  # each process drops out its own units

        optimizer = create_optimizer(model, train_args, self.accelerator.device)
        self.flops_per_token = costs.flops_per_token(model)
        self.peak = self._peak()
        self.loss_policy = LossPolicy(train_args, self.accelerator, model, self.state)
        self.learning_rates = [group["lr"] for group in optimizer.param_groups]  # the highest, of each group
        self.parameters = model.num_parameters()
        self.context = distributed.split_context(self.accelerator, model, train_args)
        self.model, self.optimizer = distributed.prepare(
            self.accelerator, model, optimizer, train_args, self.batch_size
        )
        checkpoints.without_wrapper(self.accelerator)
        if checkpoint is not None:
            with checkpoints.reading(checkpoint):
                checkpoints.load(self.accelerator, self.model, self.optimizer, checkpoint, saved["processes"])
            if saved["processes"] != self.processes:  # each of them has its own randomness, and there are others now
                set_seed(train_args.seed + self.state.step, device_specific=True)
        self._print(self._summary(corpus))

    # ---- preparation

    def _print(self, text: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def _tokenizer(self, corpus: Corpus, checkpoint: Path | None) -> PreTrainedTokenizerBase:
        model_args, data_args, _ = self.arguments
        if checkpoint is not None:
            return load_tokenizer(str(checkpoint / "tokenizer"))
        if data_args.tokenizer == "bytes":
            return byte_tokenizer()
        if data_args.tokenizer != "bpe":
            return load_tokenizer(data_args.tokenizer)
        if model_args.model is not None:
            return load_tokenizer(model_args.model, "--model")
        vocab_size = data_args.vocab_size or DEFAULT_VOCAB_SIZE
        self._print(f"training a tokenizer of {vocab_size:,} tokens on {corpus.description}")
        return train_bpe(first_texts(corpus, visible=self.rank == 0), vocab_size)

    def _validation_rows(self, corpus: Corpus, sequence_length: int, vocab_size: int) -> ValidationRows | None:
        if corpus.validation is None:
            return None
        return validation_rows(corpus.validation, self.tokenizer, sequence_length, vocab_size)

    def _digest(self, model: PreTrainedModel) -> str:
        """Of what tokens to train on do not tell: validation rows, and weights that have been read."""
        digest = hashlib.sha256()
        if self.validation is not None:
            digest.update(self.validation.rows["labels"])
        if self.arguments[0].model is not None:
            for weight in model.state_dict().values():
                digest.update(weight.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @property
    def rows_per_step(self) -> int:
        return self.batch_size * self.passes * self.replicas

    @property
    def _bound_to_processes(self) -> bool:
        """Whether with the same settings only as many processes can go on."""
        return self.processes > 1 and (self.args.context_parallel > 1 or self.args.total_batch_size is None)

    def _total_steps(self) -> int | None:
        """Steps after which the run ends whatever the clock says; None where only the clock ends it."""
        args = self.args
        epochs = args.num_epochs
        if epochs is None and args.max_steps is None and args.max_minutes is None:
            epochs = 1
        if epochs is None:
            return args.max_steps
        steps = math.ceil(epochs * self.rows.per_epoch / self.rows_per_step)
        return steps if args.max_steps is None else min(steps, args.max_steps)

    def _model(self) -> PreTrainedModel:
        model_args, data_args, args = self.arguments
        tokenizer = TokenizerSize.of(self.tokenizer)
        if model_args.model is None:
            model = create_model(model_args, tokenizer)
        elif self.has_configuration:
            model = AutoModelForCausalLM.from_config(check_folder(str(self.checkpoint), "--resume:"))
            model.generation_config = GenerationConfig.from_pretrained(self.checkpoint)
        else:
            model = load_model(model_args.model)
        if model.dtype != torch.float64:
            model.float()  # in 16 bits, as it may have been saved, most of an optimiser's steps would be rounded away
        if model_args.model is not None:
            known = self.has_configuration or brings_tokenizer(model_args, data_args)  # its special tokens are accepted
            check_fit(TokenizerSize(tokenizer.size) if known else tokenizer, model.config)
        if args.gradient_checkpointing:
            self.loss_options = checkpoint_activations(model)
        elif self.accelerator.device.type == "cpu":  # the next step's tensors have the sizes of this one's
            keep_freed_memory()
        if args.compile:
            check_compiler(self.accelerator.device)
            distributed.compile_model(self.accelerator, model)
        return model

    def _summary(self, corpus: Corpus) -> str:
        sources = summary(corpus, self.rows)
        lines = [f"{'corpus' if number == 0 else '':<12}{source}" for number, source in enumerate(sources)]
        if self.validation is not None:
            lines[-1] += (
                f", {counted(self.validation.targets, 'token')} in {self.validation.documents:,} to validate on"
            )
        lines.append(f"tokenizer   {len(self.tokenizer):,} tokens")
        kind = self.accelerator.unwrap_model(self.model).config.model_type
        lines.append(f"model       {kind}, {self.parameters:,} parameters, on {self.accelerator.device.type}")
        if self.context is not None:
            lines.append(f"context     each row over {self.args.context_parallel} processes")
        groups = self.optimizer.param_groups
        way = "fused" if groups[0]["fused"] else "foreach"
        lines.append(f"optimiser   AdamW, {way}, {counted(len(groups), 'parameter group')}")
        return "\n".join(lines)

    # ---- the clock and the learning rate

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def _progress(self, step: int, seconds: float) -> float:
        """Share of the run that is done after `step` steps and `seconds`: the largest share of any budget."""
        shares = []
        if self.total_steps is not None:
            shares.append(step / self.total_steps)
        if self.args.max_minutes is not None:
            shares.append(seconds / (60 * self.args.max_minutes))
        return max(shares)

    def _set_learning_rate(self) -> None:
        args, step = self.args, self.state.step + 1
        progress = self._progress(step, self.state.seconds)
        if args.warmup_steps >= 1:
            warmup = step / args.warmup_steps
        else:
            warmup = progress / args.warmup_steps if args.warmup_steps > 0 else 1.0
        ratio = learning_rate_ratio(progress, warmup, args.min_learning_rate_ratio)
        for group, highest in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = highest * ratio

    def _agree(self, seconds: float, stop: int) -> tuple[float, int]:
        """The largest of all processes' values, so that they all stop after the same step."""
        if self.processes == 1:
            return seconds, stop
        values = torch.tensor([seconds, float(stop)], device=self.accelerator.device)
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
        return values[0].item(), int(values[1].item())

    # ---- one step

    def _batch(self, rows: dict[str, np.ndarray | torch.Tensor]) -> dict[str, torch.Tensor]:
        device = self.accelerator.device
        return {name: torch.as_tensor(value).to(device, non_blocking=True) for name, value in rows.items()}

    def _places(self, first: int) -> list[int]:
        """Where each pass of this process begins, in a step whose rows begin at `first`."""
        return [first + (number * self.replicas + self.replica) * self.batch_size for number in range(self.passes)]

    def _own_part(self, rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """This process's part of each row: all of it, unless several processes share one."""
        whole = {name: torch.from_numpy(value) for name, value in rows.items()}
        return whole if self.context is None else {name: part(x, self.context.group) for name, x in whole.items()}

    def _read(self, first: int) -> list[dict[str, torch.Tensor]]:
        """This process's rows of the step that begins at `first`, for each pass, as they go to the device."""
        pin = self.accelerator.device.type == "cuda"
        batches = []
        for place in self._places(first):
            rows = self._own_part(self.rows.take(place, self.batch_size))
            batches.append({name: rows[name].pin_memory() if pin else rows[name] for name in rows})
        return batches

    def _step(self) -> tuple[float | None, torch.Tensor | None]:
        """One optimiser step.

        Returns:
            The loss, in nats per target token over the whole step's rows, the same in all processes (None where the
            step has been skipped), and the norm of the gradient before clipping (None where DeepSpeed keeps it).

        Raises:
            FloatingPointError: the loss or the gradient is not finite, and that is not to be skipped.
        """
        passes, before = self.passes, time.perf_counter()
        batches = [self._batch(rows) for rows in self.input.next()]
        self.input_seconds += time.perf_counter() - before
        self.loss_policy.before_step()
        # Every token counts alike, in whichever pass or process it is.
        targets = sum((batch["labels"] != IGNORED).sum() for batch in batches)
        if self.processes > 1:
            targets = self.accelerator.reduce(targets, "sum")
        total = torch.zeros((), device=self.accelerator.device)
        for number, batch in enumerate(batches):
            # Under FSDP2 each pass sends its gradients, for then none of them is ever whole.
            synchronise = number == passes - 1 or self.accelerator.is_fsdp2
            if self.args.bptt_chunk is not None:
                chunk, carry_gradients = self.args.bptt_chunk, self.args.bptt_carry_gradients
                # A loss without logits keeps the gradient of the head's weights: once, not for every chunk of a row.
                options = {} if carry_gradients else self.loss_options
                total += backward_in_chunks(
                    self.accelerator, self.model, batch, targets, chunk, carry_gradients, synchronise, options
                )
                continue
            with contextlib.nullcontext() if synchronise else distributed.accumulating(self.accelerator, self.model):
                loss = self.model(**batch, num_items_in_batch=targets, use_cache=False, **self.loss_options).loss
                # Gradients are averaged over processes, and the sum is wanted.
                self.accelerator.backward(loss * self.processes)
            total += loss.detach()
        norm = distributed.clip_gradients(self.accelerator, self.model, self.args.max_grad_norm)
        verdict = self.loss_policy.judge(total, norm)
        if verdict.fault is not None:
            self._note_bad_batch(verdict, total, norm, batches)
        if verdict.action == "stop":
            if verdict.finite and self.state.step > 0:  # what has been learned is not lost
                self.loss_policy.undo()
                self.optimizer.zero_grad()
                self.save_checkpoint()
            raise self._diverged(verdict.fault, self.state.step + 1)
        if verdict.action == "update":
            self.optimizer.step()
        else:
            self.loss_policy.undo()
        self.optimizer.zero_grad()
        self.state.step += 1
        self.state.rows += self.rows_per_step
        self.rows.release(self.state.rows)
        self._measure_health(batches[0])
        return (verdict.loss if verdict.action == "update" else None), norm

    def _note_bad_batch(
        self, verdict: Verdict, loss: torch.Tensor, norm: torch.Tensor | None, batches: list[dict]
    ) -> None:
        """Add what identifies the step's rows to `bad_batches.jsonl`."""
        rows = []
        if self.part == 0:  # the process with the first part names the row
            for place, batch in zip(self._places(self.state.rows), batches, strict=True):
                for row, ids in zip(self.rows.identify(place, self.batch_size), batch["input_ids"], strict=True):
                    rows.append(row | {"begins": self.tokenizer.decode(ids[:BEGINNING])})
        mine = {"rank": self.rank, "loss": number(loss), "rows": rows}
        line = {"step": self.state.step + 1, "fault": verdict.fault, "action": verdict.action}
        line |= {
            "loss": number(verdict.loss),
            "grad_norm": None if norm is None else number(norm),
            "processes": gather_object([mine]),
        }
        if self.accelerator.is_main_process:
            self.folder.log(line, BAD_BATCHES)
        if verdict.action == "skip":
            self._print(f"step {line['step']}: {verdict.fault}: skipped, its rows are named in {BAD_BATCHES}")

    def _measure_health(self, batch: dict[str, torch.Tensor]) -> None:
        if self.args.health_steps and self.state.step % self.args.health_steps == 0:
            # A part of a row is as good as a row; in all processes a part of the same length.
            shortest = self.arguments[1].sequence_length // self.args.context_parallel
            batch = {name: values[:, :shortest] for name, values in batch.items()}
            with contextlib.nullcontext() if self.context is None else self.context.suspended():
                self._log(health(self.model, batch, lambda values: self.accelerator.reduce(values, "sum")))

    def _peak(self) -> float:
        """FLOP/s that the devices of all processes reach in products of matrices of this run's precision."""
        device, precision = self.accelerator.device, self.accelerator.mixed_precision
        rate = costs.matrix_rate(device.type, costs.PRECISIONS.get(precision, torch.float32))
        return self.accelerator.reduce(torch.tensor(rate, device=device), "sum").item()

    # ---- validation

    def evaluate(
        self, rows: np.ndarray, description: str | None = None, interrupted: Callable[[], int] | None = None
    ) -> float:
        """The loss over some validation rows, in nats per target token. Context does not reach beyond the row.

        Args:
            description: of the progress bar; none without.
            interrupted: gives the number of a signal that has come, or 0; None where that waits for the step's end.

        Raises:
            Interrupted: one has come, to any process.
        """
        mine = rows[self.replica :: self.replicas]
        device = self.accelerator.device
        total = torch.zeros(2, dtype=distributed.widest(device), device=device)
        one = torch.ones((), device=device)
        self.model.eval()
        # Sharded weights are gathered in every call, so that all processes must make as many.
        starts = range(0, math.ceil(len(rows) / self.replicas), self.batch_size)
        with torch.no_grad():
            for start in progress_bar(
                starts, description, delay=2, leave=False, disable=description is None or self.rank != 0
            ):
                if interrupted is not None and (number := self._agree(0.0, interrupted())[1]):
                    raise Interrupted(number)
                chosen = mine[start : start + self.batch_size]
                counts = len(chosen) > 0  # else this process has had its share
                chosen = chosen if counts else rows[:1]
                batch = self._batch(self._own_part({n: value[chosen] for n, value in self.validation.rows.items()}))
                loss = self.model(**batch, num_items_in_batch=one, use_cache=False, **self.loss_options).loss
                total[0] += counts * loss
                total[1] += counts * (batch["labels"] != IGNORED).sum()
        self.model.train()
        nats, targets = self.accelerator.reduce(total, "sum").tolist()
        return nats / targets

    def _validate(self, *, everything: bool = False, interrupted: Callable[[], int] | None = None) -> dict | None:
        if self.validation is None:
            return None
        count = len(self.validation.rows["labels"])
        if everything:
            rows = np.arange(count)
        else:
            rows = np.linspace(0, count - 1, min(count, self.args.eval_rows)).round().astype(np.int64)
        loss = self.evaluate(rows, "validating" if everything else None, interrupted)
        bytes_per_token = self.validation.text_bytes / self.validation.targets
        found = (loss, perplexity(loss), loss / (math.log(2) * bytes_per_token))
        result = dict(zip(VALIDATED, found, strict=True))
        if not math.isfinite(loss):
            self._print(f"warning: the validation loss is {loss} at step {self.state.step}")
        self._log(result | {"validation_rows": len(rows), "elapsed": round(self.state.seconds, 3)})
        return result

    def _final_validation(self) -> dict | None:
        """What an earlier call has found at the end of the run; None where it did not come so far."""
        found = None
        if self.validation is not None and self.accelerator.is_main_process:
            rows = len(self.validation.rows["labels"])
            for line in self.folder.metrics():
                whole = (line["step"], line.get("validation_rows")) == (self.state.step, rows)
                if whole and "validation_loss" in line and "validation_bits_per_byte" in line:
                    found = {name: line[name] for name in VALIDATED if name in line}
                    # Which a line lacks where it is no finite number.
                    found.setdefault("validation_perplexity", perplexity(line["validation_loss"]))
        return broadcast_object_list([found])[0]

    def _log(self, values: dict) -> None:
        """Add a line to the metrics, without what is not finite, which JSON lacks."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if self.accelerator.is_main_process:
            self.folder.log({"step": self.state.step} | values)
        if self.args.log_with:
            send(self.accelerator, values, self.state.step)

    # ---- saving

    def _read_state(self, checkpoint: Path) -> dict:
        """What `state.json` holds, once the checkpoint is known to belong to this run."""
        with checkpoints.reading(checkpoint):
            saved = dict(json.loads((checkpoint / "state.json").read_text(encoding="utf-8")))
            then = dict(yaml.safe_load((checkpoint / ARGUMENTS).read_text(encoding="utf-8")))
        if saved.get("format") != CHECKPOINT_FORMAT:
            raise ValueError(f"--resume: {checkpoint} has format {saved.get('format')}, expected {CHECKPOINT_FORMAT}")
        with checkpoints.reading(checkpoint):
            if missing := {"versions", "processes", "rows_per_step", "state", "digest"} - saved.keys():
                raise ValueError(f"its state.json lacks {min(missing)}")
            if not isinstance(saved["versions"], dict):
                raise ValueError(f"its state.json has versions {saved['versions']!r:.60}")
            self.state = checkpoints.restored(State, saved["state"])
            if min(self.state.step, self.state.rows) < 0:
                raise ValueError(f"its state.json has step {self.state.step} and rows {self.state.rows}")
        now = yaml.safe_load(to_yaml(*self.arguments))
        for settings in (then, now):
            if settings.get("mixed_precision") == "no":  # spelled out, which is the same as not given
                del settings["mixed_precision"]
        differing = [name for name in {**then, **now} if name not in FREE and then.get(name) != now.get(name)]
        if differing:
            name = differing[0]
            raise ValueError(
                f"--resume: {checkpoint} was written with {flag(name)} {then.get(name)}, now it is {now.get(name)}; "
                f"`hf-recurrent train {self.folder.path / ARGUMENTS} --resume` goes on with the same settings"
            )
        unit = "processes" if self.args.context_parallel == 1 else "groups of processes"
        if saved["rows_per_step"] != self.rows_per_step:
            raise ValueError(
                f"--resume: {checkpoint} was written with {saved['rows_per_step']} rows per optimiser step "
                f"(batch size x passes x {unit}), now they are {self.rows_per_step}: "
                f"--total-batch-size {saved['rows_per_step']} keeps them whatever the processes"
            )
        checkpoints.compare_versions(saved["versions"], checkpoint)
        return saved

    def save_checkpoint(self) -> None:
        """Save what a run needs to go on as if it had not stopped. It is there as a whole or not at all."""
        step, main, wait = self.state.step, self.accelerator.is_main_process, self.accelerator.wait_for_everyone
        if broadcast_object_list([self.folder.checkpoint(step).exists()])[0]:
            return
        self._check_weights()
        with self.folder.new_checkpoint(step, self.args.keep_checkpoints, main=main, wait=wait) as temporary:
            checkpoints.save(self.accelerator, temporary)
            if main:
                self.tokenizer.save_pretrained(temporary / "tokenizer")
                model = self.accelerator.unwrap_model(self.model)
                for configuration in (model.config, model.generation_config):
                    configuration.save_pretrained(temporary)
                save_places(self.rows, temporary)
                (temporary / ARGUMENTS).write_text(to_yaml(*self.arguments), encoding="utf-8")
                saved = {
                    "format": CHECKPOINT_FORMAT,
                    "versions": checkpoints.versions(),
                    "processes": self.processes,
                    "rows_per_step": self.rows_per_step,
                    "state": dataclasses.asdict(self.state),
                    "digest": self.rows.digest,
                }
                (temporary / "state.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")

    def save_model(self) -> None:
        """Put the model and its tokenizer into the output folder, as `from_pretrained` reads them."""
        self._check_weights()
        state_dict = distributed.whole_weights(self.accelerator, self.model)
        if self.accelerator.is_main_process:
            model = self.accelerator.unwrap_model(self.model)
            with self.folder.publish() as temporary:
                model.save_pretrained(temporary, state_dict=state_dict)
                self.tokenizer.save_pretrained(temporary)
            self.folder.kept()
        self.accelerator.wait_for_everyone()

    # ---- the loop

    def train(self) -> dict:
        try:
            check_shared(self.accelerator, self.folder.path, self.args.timeout_minutes)
        except BaseException:
            self.folder.unlock()
            raise
        try:
            if self.accelerator.is_main_process:
                if self.checkpoint is not None:
                    self.folder.reopen(self.state.step)
                    if self._progress(self.state.step, self.state.seconds) < 1:  # else these trained nothing
                        write_whole(self.folder.path / ARGUMENTS, to_yaml(*self.arguments))
                else:
                    self.folder.open(to_yaml(*self.arguments))
            self.accelerator.wait_for_everyone()
            if self.args.log_with:
                settings = yaml.safe_load(to_yaml(*self.arguments))
                start_trackers(self.accelerator, self.folder.path, settings, self.state.step)
            return self._train()
        finally:
            try:
                finish_trackers(self.accelerator)
            finally:  # also where Ctrl-C does not wait for a server far away
                if self.accelerator.is_main_process:
                    self.folder.close()

    def _train(self) -> dict:
        self.model.train()
        with interrupts() as interrupted:
            if self.state.step == 0:
                self._validate()  # also compiles kernels before the clock starts
            begun = self.state.step
            stopped, final = self._loop(interrupted), None
            self.save_model()
            if self.state.step == begun:
                self._print(f"the run has come to its end, after step {begun}, before: there is nothing to train")
                final = self._final_validation()
            if not stopped and final is None:
                try:
                    final = self._validate(everything=True, interrupted=interrupted)
                except Interrupted as error:
                    stopped = error.number
                    self.save_checkpoint()
            result = {"output_dir": str(self.folder.path), "step": self.state.step, "interrupted": stopped}
            logged = [line["loss"] for line in self.folder.metrics() if "loss" in line]
            result["train_loss"] = logged[-1] if logged else None
            if stopped:
                self._print(
                    f"stopped after step {self.state.step}; the model is saved in {self.folder.path}\n"
                    f"go on with: hf-recurrent train {self.folder.path / ARGUMENTS} --resume"
                    + (f", in {self.processes} processes again" if self._bound_to_processes else "")
                )
            else:
                self._print(f"the model is saved in {self.folder.path}")
            return result | self._report(final)

    def _loop(self, interrupted: Callable[[], int]) -> int:
        """Train until a budget is used up; the number of the signal that ended it before that, else 0."""
        args, state = self.args, self.state
        self.seconds_before, self.started = state.seconds, time.perf_counter()
        stop = 0
        self.input_seconds = 0.0
        rate_step, rate_seconds = state.step, 0.0  # since the latest line of metrics, in steps alone
        self.rows.release(state.rows)
        self.input = Prefetcher(self._read, state.rows, self.rows_per_step)
        with self.input, self._bar() as bar:
            while not stop and self._progress(state.step, state.seconds) < 1:
                self._set_learning_rate()
                before = time.perf_counter()
                loss, norm = self._step()
                if loss is not None:
                    state.loss_sum += loss
                    state.loss_steps += 1
                rate_seconds += time.perf_counter() - before
                state.seconds, stop = self._agree(self._seconds(), interrupted())
                finished = self._progress(state.step, state.seconds) >= 1
                if state.step % args.log_steps == 0 or finished:
                    value = state.loss_sum / max(state.loss_steps, 1)
                    tokens = self.rows_per_step * self.arguments[1].sequence_length
                    rate = (state.step - rate_step) * tokens / rate_seconds
                    waiting = self.input_seconds / rate_seconds
                    self._log(
                        {
                            "tokens": state.step * tokens,
                            **({"loss": value} if state.loss_steps else {}),
                            "lr": self.optimizer.param_groups[0]["lr"],
                            # Under fp16 it can be infinite: the loss scaler skips such a step.
                            **({} if loss is None or norm is None else {"grad_norm": float(norm)}),
                            **({"skipped_steps": state.skipped} if state.skipped else {}),
                            "tokens_per_second": round(rate, 1),
                            "model_flops_per_second": round(rate * self.flops_per_token),
                            "peak_share": float(f"{rate * self.flops_per_token / self.peak:.4g}"),
                            "input_share": round(waiting, 4),
                            "peak_memory_bytes": costs.peak_memory(self.accelerator.device),
                            "elapsed": round(state.seconds, 3),
                        }
                    )
                    known = f"loss {value:.3f}" if state.loss_steps else "all of them skipped"
                    shown = f"step {state.step}, {known}, {rate:,.0f} tokens/s, {waiting:.1%} waiting for input"
                    bar.set_postfix_str(shown, refresh=False)
                    state.loss_sum, state.loss_steps = 0.0, 0
                    rate_step, rate_seconds, self.input_seconds = state.step, 0.0, 0.0
                bar.update(min(self._bar_position(), bar.total) - bar.n)
                if args.eval_steps and state.step % args.eval_steps == 0 and not finished:
                    self._show(self._validate())
                if stop or (args.save_steps and (finished or state.step % args.save_steps == 0)):
                    self.save_checkpoint()
        return stop

    def _check_weights(self) -> None:
        """Raise rather than let a model that has broken down take the place of one that was saved before."""
        tensors = [distributed.local_part(parameter) for parameter in self.model.parameters()]
        tensors += self.model.buffers()  # running statistics
        # Offloaded weights are not on the device.
        finite = [tensor.isfinite().all().to(self.accelerator.device) for tensor in tensors]
        broken = (~torch.stack(finite)).sum()
        if self.accelerator.reduce(broken, "sum").item():
            raise self._diverged("the weights are no longer finite", self.state.step)

    def _diverged(self, what: str, step: int) -> FloatingPointError:
        return FloatingPointError(
            f"{what} at step {step}: try a --learning-rate smaller than {self.args.learning_rate}"
        )

    def _bar(self) -> tqdm:
        """A bar over whichever budget is expected to run out first: a run with a time limit counts seconds."""
        by_time = self.args.max_minutes is not None
        return progress_bar(
            total=60 * self.args.max_minutes if by_time else self.total_steps,
            initial=min(self._bar_position(), 60 * self.args.max_minutes) if by_time else self.state.step,
            bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
            disable=not self.accelerator.is_main_process,
        )

    def _bar_position(self) -> float:
        return self.state.seconds if self.args.max_minutes is not None else self.state.step

    def _show(self, result: dict | None) -> None:
        if result is not None:
            self._print(
                f"step {self.state.step}: validation loss {result['validation_loss']:.3f}, "
                f"about {result['validation_bits_per_byte']:.3f} bits per byte"
            )

    def _report(self, result: dict | None) -> dict:
        """Draw the loss curve, print the table.

        Args:
            result: of the validation on everything; None where there is none.
        """
        references: Baselines | None = None
        if self.validation is not None:
            references = baselines(self.validation, self.rows.target_counts(len(self.validation.target_counts)))
        if not self.accelerator.is_main_process:
            return result or {}
        config = self.accelerator.unwrap_model(self.model).config
        name = f"{config.model_type}, {self.parameters:,} parameters"
        with self.folder.publish() as temporary:
            plot_loss(self.folder.metrics(), references, name, temporary / "loss.png")
        if result is None:
            return {}
        result["unigram_bits_per_byte"], result["gzip_bits_per_byte"] = references.unigram, references.gzip
        size = f"{counted(self.validation.text_bytes, 'byte')} in {counted(self.validation.documents, 'document')}"
        self._print(
            f"\nvalidation ({size}): loss {result['validation_loss']:.3f} nats per token, "
            f"perplexity {readable(result['validation_perplexity'])}\n"
            + table(
                [
                    ("", "bits per byte"),
                    (name, f"{result['validation_bits_per_byte']:.3f}"),
                    ("unigram over the same tokens", f"{references.unigram:.3f}"),
                    ("gzip -9", f"{references.gzip:.3f}"),
                ]
            )
            + f"\nmetrics in {self.folder.path / 'metrics.jsonl'}, curve in {self.folder.path / 'loss.png'}"
        )
        return result


def number(value: torch.Tensor | float | None) -> float | str | None:
    """As JSON has it: what is not finite as text."""
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else str(value)


def check_compiler(device: torch.device) -> None:
    """Make sure that torch.compile works here, before any training.

    Raises:
        ValueError: it does not; the message gives torch's reason.
    """
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:  # inductor wraps whatever its compiler raised
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"--compile: torch.compile does not work here: {reason}") from error
