"""One sequence over several processes: each holds a part of it, and between the parts only states travel.

    with context_parallel(model, group):
        loss = model(part(input_ids), labels=part(labels)).loss   # this rank's share
        loss.backward()
    sum_gradients(model, group)

What travels, and how often, is described in `hf_recurrent.scan.split`; docs/context_parallel.md counts the bytes.
"""

import contextlib
import inspect
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..modeling.configuration import RecurrentConfig
from ..modeling.model import IGNORED, RecurrentForCausalLM, RecurrentModel
from ..scan import split


class ContextParallel:
    """What `context_parallel` returns: the end of a `with` block, or `remove()`, makes the model whole again. `group`
    is that of the ranks that share a sequence."""

    def __init__(self, backbone: RecurrentModel, handles: list):
        self._backbone, self._handles = backbone, handles
        self.group = backbone.context_group

    def remove(self) -> None:
        self._backbone.context_group = None
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> "ContextParallel":
        return self

    def __exit__(self, *_) -> None:
        self.remove()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, each rank's inputs are texts of their own."""
        self._backbone.context_group = None
        try:
            yield
        finally:
            self._backbone.context_group = self.group


def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> ContextParallel:
    """Let `model` take its inputs for this rank's part of longer sequences, until the result's `remove()` or the end of
    its `with` block; the backward pass belongs inside.

    Rank r of the group holds the r-th part of each row, parts of any lengths from 1 on: `input_ids` (or
    `inputs_embeds`), `attention_mask`, `position_ids`, `seq_idx` and `labels` are those of the part, (B, its length).
    Outputs are what one process computes for these positions of the whole sequence. The loss is this rank's share:
    their sum over the ranks is the mean over all targets (or their sum over `num_items_in_batch`), and so are the
    gradients of the parameters (`sum_gradients`). Gradient checkpointing works; every rank must make the same calls.

    Args:
        model: a causal language model or a backbone of any family. DDP, say, over other groups, may wrap it afterwards.
        group: the default group when None.

    Raises:
        TypeError: another head, which would read only its own part.
        ValueError: a bidirectional model; batch norm, whose statistics would be the part's; a learned initial state;
            a model that is split already. At the model's call: caches, boundaries as `cu_seq_lens`, attentions.
    """
    group = dist.group.WORLD if group is None else group
    backbone = model.base_model if isinstance(model, RecurrentForCausalLM) else model
    if not isinstance(backbone, RecurrentModel):
        raise TypeError(f"context_parallel takes a causal language model or a backbone, got a {type(model).__name__}")
    check_split_config(backbone.config)
    if backbone.context_group is not None:
        raise ValueError("the model's context is split already")
    backbone.context_group = group
    handles = [backbone.register_forward_pre_hook(_without_cache, with_kwargs=True)]
    # Modules inside of what checkpointing calls again; the dropout may be of whole rows.
    for module in (module for layer in backbone.layers for module in (layer.mixer, layer.dropout)):
        handles.append(module.register_forward_pre_hook(lambda *_: split.enter(backbone.context_group)))
        handles.append(module.register_forward_hook(lambda *_: split.leave(), always_call=True))
    if backbone is not model:
        handles.append(model.register_forward_pre_hook(_share_loss, with_kwargs=True))
    return ContextParallel(backbone, handles)


def check_split_config(config: RecurrentConfig) -> None:
    """Raises ValueError for a model whose context cannot be split."""
    if getattr(config, "bidirectional", False):
        raise ValueError("context_parallel needs a causal model, got bidirectional=True")
    if getattr(config, "norm", None) == "batch":
        raise ValueError("context_parallel needs norms of single tokens, got norm='batch'")
    if config.learned_initial_state:
        raise ValueError("context_parallel needs learned_initial_state=False, got True")


def _by_name(module: nn.Module, args: tuple, kwargs: dict) -> dict:
    """All arguments of a call by their names, those that were given by position too."""
    named = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
    return {name: value for name, value in named.items() if name not in ("self", "kwargs")} | named.get("kwargs", {})


def _without_cache(backbone: RecurrentModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The configuration's default would make one."""
    kwargs = _by_name(backbone, args, kwargs)
    return (), kwargs | {"use_cache": kwargs.get("use_cache") or False}


def _share_loss(model: RecurrentForCausalLM, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The last token's target is the next rank's first label, and the mean is over all ranks' targets."""
    group = model.base_model.context_group
    if group is None:
        return args, kwargs
    kwargs = _by_name(model, args, kwargs)
    labels, ignored = kwargs.pop("labels", None), kwargs.get("ignore_index", IGNORED)
    if labels is not None:
        following = split.shift(labels[:, 0], -1, group)
        last = torch.full_like(labels[:, 0], ignored) if following is None else following
        kwargs["shift_labels"] = torch.cat([labels[:, 1:], last[:, None]], dim=1)
    targets = kwargs.get("shift_labels")
    if targets is not None and kwargs.get("num_items_in_batch") is None:
        count = (targets != ignored).sum()
        dist.all_reduce(count, group=group)
        kwargs["num_items_in_batch"] = count
    return (), kwargs


def part(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that every rank holds whole, cut along `dim` as evenly as it goes."""
    group = dist.group.WORLD if group is None else group
    return x.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def sum_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace the gradients of the parameters by their sums over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=dist.group.WORLD if group is None else group)
