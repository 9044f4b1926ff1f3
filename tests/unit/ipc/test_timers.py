"""How long a value has not changed, and a thread that looks again and again."""

import threading
import time

import pytest
from harness import eventually

from elastic_mnist.ipc.timers import PeriodicThread, StallTimer


def test_a_stall_counts_from_the_last_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that stays counts up, one that changes begins anew; looked at seldom, nothing is concluded."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stall, seen = StallTimer(), []
    for value, seconds in [(1, 0.0), (1, 1.0), (1, 1.5), (2, 1.0), (2, 1.0), (2, 60.0), (2, 1.0)]:
        now += seconds
        seen.append(stall.seconds(value))
    # After a minute without a look the machine may have been asleep: it begins anew.
    assert seen == [0.0, 1.0, 2.5, 0.0, 1.0, 0.0, 1.0]


def test_a_periodic_thread_calls_until_it_is_stopped() -> None:
    """It calls at once, again after each interval, and never once it is stopped."""
    times: list[float] = []
    thread = PeriodicThread("test", 0.01, lambda: times.append(time.monotonic()))
    thread.start()
    eventually(lambda: len(times) > 3)
    assert thread.stop(10)
    number = len(times)
    assert not thread.is_alive
    assert len(times) == number


def test_stopping_waits_for_a_call_no_longer_than_asked() -> None:
    """A call that does not return is left behind, and said to be."""
    may_end = threading.Event()
    thread = PeriodicThread("test", 0.0, lambda: may_end.wait(60))
    thread.start()
    assert not thread.stop(0.05)
    may_end.set()
    assert thread.stop(10)
