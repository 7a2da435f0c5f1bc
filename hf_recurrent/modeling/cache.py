"""RecurrentCache: what a recurrent model remembers, of a size that does not depend on how many tokens it has seen."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache


class RecurrentLayer:
    """The states of one layer, by name: tensors (B, ...), as its mixer returned them. Empty before the first token."""

    # What `Cache` and `generate` ask of every layer.
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self):
        self.states: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(state.shape)} {state.dtype}" for name, state in self.states.items())
        return f"{type(self).__name__}({shapes})"

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first token."""
        return next((len(state) for state in self.states.values()), -1)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())

    def reset(self) -> None:
        self.states = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.states = {name: state[indices.to(state.device)] for name, state in self.states.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.states = {name: state.repeat_interleave(repeats, dim=0) for name, state in self.states.items()}


class RecurrentCache(Cache):
    """
    The `past_key_values` of a recurrent model: one set of states per layer, and the number of tokens seen.

    Its bytes depend on the model and the batch, never on the number of tokens. The model only replaces states, it never
    writes into them: `copy.copy` of a layer's dict is a snapshot, and a call that fails leaves the cache as it was.

    Args:
        config: the model's configuration, for its number of layers.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=[RecurrentLayer() for _ in range(config.num_hidden_layers)])
        self.seen_tokens = 0

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.layers)} layers, batch size {self.batch_size}, "
            f"{self.seen_tokens} tokens seen, {self.nbytes} bytes)"
        )

    def advance(self, states: Sequence[dict[str, Tensor]], num_tokens: int) -> None:
        """Replaces the states of all layers by those `num_tokens` later."""
        for layer, new in zip(self.layers, states, strict=True):
            layer.states = new
        self.seen_tokens += num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes that all states take."""
        return sum(layer.nbytes for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far: as in every cache of Transformers, padding counts, though it changes no state."""
        return self.seen_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    def reset(self) -> None:
        """Forgets everything; the next call starts from the initial state."""
        super().reset()
        self.seen_tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Does nothing for 0 tokens, and raises for any other number: a recurrent state keeps no past to go back to."""
        if tokens_to_remove != 0:
            raise NotImplementedError(
                f"cannot remove {abs(tokens_to_remove)} tokens: a RecurrentCache keeps the state after the last token "
                "only. Copy it (copy.deepcopy) before feeding tokens that may have to be taken back."
            )

    def activate_past_recording(self) -> None:
        """Raises: what asks for it (assisted and prompt-lookup decoding) means to take tokens back, see `crop`."""
        raise NotImplementedError(
            "a RecurrentCache does not record past states, so its model can neither be assisted in decoding nor assist"
        )
