"""Random programs of cache operations, by hypothesis: after each step the cache stands for exactly its rows' texts."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from families import FIRST, causal_lm
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hf_recurrent import RecurrentCache, StaticRecurrentCache

# More of them, for each family: HF_RECURRENT_PROGRAMS=1000 python -m pytest tests/modeling/test_cache_programs.py
PROGRAMS = int(os.environ.get("HF_RECURRENT_PROGRAMS", "6"))
ROWS = 4
PROBE = 7  # the token after which logits are compared


class CacheProgram(RuleBasedStateMachine):
    """`columns` mirrors the cache: one list per column fed, with each row's token, or None where it is padding."""

    model: torch.nn.Module  # set by the test
    cache_class: type[RecurrentCache]

    def __init__(self):
        super().__init__()
        self.cache = self.cache_class(self.model.config)
        self.rows = 2
        self.columns: list[list[int | None]] = []
        self.calls: list[int] = []  # the lengths of those recorded
        self.window, self.recording = None, False
        self.shelf: list[tuple] = []

    def fed(self, length: int) -> None:
        if self.recording:
            self.calls.append(length if self.window is None else min(length, self.window))
            while self.window is not None and sum(self.calls[1:]) >= self.window:
                del self.calls[0]

    def take_rows(self, rows: list[int]) -> None:
        self.columns = [[column[row] for row in rows] for column in self.columns]
        self.rows = len(rows)

    @rule(data=st.data(), length=st.integers(1, 6), padded=st.booleans())
    def feed(self, data, length, padded):
        token = st.integers(1, self.model.config.vocab_size - 1)

        def table(element):
            row = st.lists(element, min_size=self.rows, max_size=self.rows)
            return data.draw(st.lists(row, min_size=length, max_size=length))

        columns = table(token)
        real = table(st.booleans() if padded else st.just(True))
        mask = torch.tensor(real).T if padded else None
        for tokens, bits in zip(columns, real, strict=True):
            self.columns.append([token if bit else None for token, bit in zip(tokens, bits, strict=True)])
        self.model(torch.tensor(columns).T, attention_mask=mask, past_key_values=self.cache)
        self.fed(length)

    @precondition(lambda self: self.columns)
    @rule(steps=st.integers(1, 3))
    def decode(self, steps):
        """Greedily, one token at a time, as `generate` does."""
        for _ in range(steps):
            logits = self.model(torch.full((self.rows, 1), PROBE), past_key_values=self.cache.clone()).logits
            tokens = logits[:, -1, 1:].argmax(-1) + 1
            self.model(tokens[:, None], past_key_values=self.cache)
            self.columns.append(tokens.tolist())
            self.fed(1)

    @rule(window=st.none() | st.integers(1, 8))
    def record(self, window):
        self.cache.activate_past_recording(window)
        self.recording, self.window = True, window

    @precondition(lambda self: self.recording)
    @rule(data=st.data())
    def crop(self, data):
        removed = data.draw(st.integers(0, sum(self.calls)))
        self.cache.crop(-removed)
        self.columns = self.columns[: len(self.columns) - removed]
        self.calls = []

    @rule()
    def crop_too_far(self):
        with pytest.raises(ValueError if self.recording else RuntimeError, match="cannot take back"):
            self.cache.crop(-sum(self.calls) - 1)

    @rule()
    def put_aside(self):
        kept = self.cache.clone(), self.rows, list(self.columns), list(self.calls), self.window, self.recording
        self.shelf = [*self.shelf[-2:], kept]

    @precondition(lambda self: self.shelf)
    @rule(data=st.data())
    def take_up(self, data):
        cache, self.rows, columns, calls, self.window, self.recording = data.draw(st.sampled_from(self.shelf))
        self.cache, self.columns, self.calls = cache.clone(), list(columns), list(calls)

    @rule()
    def through_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(Path(folder) / "state.safetensors")
            self.cache = self.cache_class.load(Path(folder) / "state.safetensors", self.model.config)
        self.recording, self.calls = False, []

    @precondition(lambda self: self.columns)
    @rule(data=st.data(), how=st.sampled_from(["reorder_cache", "batch_select_indices", "rows"]))
    def choose(self, data, how):
        rows = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=ROWS))
        if how == "rows":
            self.cache = self.cache[rows]
        else:
            getattr(self.cache, how)(torch.tensor(rows))
        self.take_rows(rows)

    @precondition(lambda self: self.columns and self.rows <= ROWS // 2)
    @rule()
    def repeat(self):
        self.cache.batch_repeat_interleave(2)
        self.take_rows([row for row in range(self.rows) for _ in range(2)])

    @rule(rows=st.integers(1, ROWS))
    def reset(self, rows):
        self.cache.reset()
        self.columns, self.rows, self.calls = [], rows, []

    @invariant()
    def stands_for_its_texts(self):
        assert self.cache.get_seq_length() == len(self.columns)
        got = self.model(torch.full((self.rows, 1), PROBE), past_key_values=self.cache.clone()).logits[:, -1]
        for row in range(self.rows):
            text = [column[row] for column in self.columns if column[row] is not None]
            want = self.model(torch.tensor([[*text, PROBE]]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(got[row], want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("cache_class", [RecurrentCache, StaticRecurrentCache])
@pytest.mark.parametrize("name", FIRST)
def test_programs(name, cache_class):
    config_class, options = FIRST[name]
    model = causal_lm(config_class(**options, learned_initial_state=cache_class is StaticRecurrentCache))
    program = type("Program", (CacheProgram,), {"model": model, "cache_class": cache_class})
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    with torch.no_grad():
        run_state_machine_as_test(
            program,
            settings=settings(
                max_examples=PROGRAMS,
                stateful_step_count=12,
                deadline=None,
                suppress_health_check=checks,
                database=None,
            ),
        )
