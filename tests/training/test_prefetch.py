import threading
import time

import pytest

from hf_recurrent.training.prefetch import DEPTH, Prefetcher


def test_values_come_in_order_and_are_made_ahead():
    made = []

    def make(first):
        made.append(first)
        return first * 10

    with Prefetcher(make, 6, 4) as ahead:
        assert [ahead.next() for _ in range(5)] == [60, 100, 140, 180, 220]
        while len(made) < 5 + DEPTH:
            time.sleep(0.001)
        time.sleep(0.02)
        assert made == list(range(6, 6 + 4 * (5 + DEPTH + 1), 4))[: len(made)] and len(made) <= 5 + DEPTH + 1
    assert not any(thread.name == "input" for thread in threading.enumerate())


def test_an_error_is_raised_in_its_place():
    def make(first):
        if first == 2:
            raise OSError("out of luck")
        return first

    with Prefetcher(make, 0, 1) as ahead:
        assert [ahead.next(), ahead.next()] == [0, 1]
        with pytest.raises(OSError, match="out of luck"):
            ahead.next()


def test_a_thread_that_does_not_come_back_is_left(monkeypatch):
    monkeypatch.setattr("hf_recurrent.training.prefetch.PATIENCE", 0.05)
    end = threading.Event()
    with Prefetcher(lambda first: end.wait(), 0, 1) as ahead:
        pass
    end.set()
    ahead._thread.join(5)
    assert not ahead._thread.is_alive()


def test_what_stops_while_a_value_is_being_made():
    begun = threading.Event()

    def make(first):
        begun.set()
        time.sleep(0.05)
        return first

    with pytest.raises(KeyboardInterrupt):
        with Prefetcher(make, 0, 1):
            begun.wait()
            raise KeyboardInterrupt
    assert not any(thread.name == "input" for thread in threading.enumerate())
