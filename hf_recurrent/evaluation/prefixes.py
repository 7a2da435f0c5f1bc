"""What texts have in common at their beginnings: a tree, each part of which a model reads once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..modeling import RecurrentCache

MOST_PADDING = 8  # tokens by which segments may differ to be read together, or an eighth of the longest


@dataclass(eq=False, slots=True)
class Segment:
    """
    The tokens `tokens[start:end]`, to be read from the state after `parent`.

    Args:
        tokens: (at least end,) a sequence that passes through here.
        end: tokens from the sequences' beginning to this segment's end.
        parent: the segment before, None for the tree's root, which has no tokens.
        children: what comes after, read from the state after this one.
        unread: the children that have not been read yet.
        state: a cache, and the row of it that holds the state after this segment; None before it was read, once no
            child needs it, and for the root.
    """

    tokens: np.ndarray
    end: int
    parent: "Segment | None" = None
    children: list["Segment"] = field(default_factory=list)
    unread: int = 0
    state: tuple[RecurrentCache, int] | None = None

    @property
    def start(self) -> int:
        return self.parent.end

    @property
    def own_tokens(self) -> np.ndarray:
        return self.tokens[self.parent.end : self.end]

    def __len__(self) -> int:
        return self.end - self.parent.end


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens at the beginning in which `a` and `b` agree."""
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


def prefix_tree(sequences: Sequence[np.ndarray], least_saved: int) -> tuple[Segment, list[Segment]]:
    """
    Args:
        sequences: int32 arrays of token ids, none of them empty.
        least_saved: where k branches part after n common tokens, these are a segment of their own if reading them once
            instead of k times saves this many tokens; else each branch reads them itself. A call costs something too.

    Returns:
        The tree's root; and for each sequence a segment at or before whose end it ends: the parents of that segment and
        the segment itself hold its tokens.
    """
    root = Segment(np.zeros(0, np.int32), 0)
    path, ends = [root], [root] * len(sequences)
    # In lexicographical order a sequence shares most with its neighbours.
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    for index in sorted(range(len(sequences)), key=keys.__getitem__):
        sequence = sequences[index]
        common, before = common_length(path[-1].tokens, sequence), None
        while path[-1].end > common:
            before = path.pop()
        if path[-1].end < common:
            fork = Segment(sequence, common, children=[before])
            path[-1].children[-1] = fork
            path.append(fork)
        if len(sequence) > common:
            path.append(Segment(sequence, len(sequence)))
            path[-2].children.append(path[-1])
        ends[index] = path[-1]
    dropped = _drop_forks(root, least_saved)
    for index, segment in enumerate(ends):
        while segment in dropped:
            segment = segment.children[0]
        ends[index] = segment
    return root, ends


def _drop_forks(root: Segment, least_saved: int) -> set[Segment]:
    """Sets the parents, and takes out of the tree the forks that save too little, which are returned."""
    dropped, remaining = set(), [root]
    while remaining:
        segment = remaining.pop()
        kept, candidates = [], segment.children[::-1]
        while candidates:
            child = candidates.pop()
            saved = (len(child.children) - 1) * (child.end - segment.end)
            if child.children and saved < least_saved:
                dropped.add(child)
                candidates += child.children[::-1]
            else:
                child.parent = segment
                kept.append(child)
        segment.children, segment.unread = kept, len(kept)
        remaining += kept
    return dropped


def read_in_batches(root: Segment, read: Callable[[list[Segment]], None], batch_size: int) -> None:
    """
    Calls `read` with all segments below `root`, each once and after its parent, at most `batch_size` at a time and of
    similar lengths. Branches are followed to their ends before others are begun: states are needed for a few batches
    at a time, however many segments there are.
    """
    ready = sorted(root.children, key=len)
    while ready:
        window = sorted(ready[-4 * batch_size :], key=len, reverse=True)
        del ready[-4 * batch_size :]
        while window:
            longest, rows = len(window[0]), 1
            shortest = longest - max(MOST_PADDING, longest // 8)
            while rows < min(batch_size, len(window)) and len(window[rows]) >= shortest:
                rows += 1
            batch, window = window[:rows], window[rows:]
            read(batch)
            ready += [child for segment in batch for child in segment.children]
