"""Requests to stop.

SIGTERM, SIGINT (Ctrl-C), SIGHUP (the terminal is gone) and SIGUSR1 (some schedulers' notice before they preempt). One
that was ignored when the process began, as `nohup` has it, stays ignored.

Invariant: nothing is done in a signal handler. The signals are blocked, and one thread waits for them; so they are
noticed at once also while the thread that trains sits in a collective, and the process never dies half-way through a
write. The agent has them blocked while it starts a worker, so they are from its first moment on. A signal is a flag:
the ranks agree on a step with the gradient's all-reduce (see `gradients`), save and end together. Only where there is
nothing to save yet, before the first step, the process ends right there; a later generation has what is in the node's
memory, and comes as far as to save it.

A process that cannot stop in order, because a peer does not answer, ends by itself before the launcher would kill it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from elastic_mnist.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_STOPPED
from elastic_mnist.ipc.environment import STOP_SIGNALS

_GRACE_SECONDS: Final = 25.0
"""torchrun kills 30 s after its SIGTERM."""

_IMPATIENCE_SECONDS: Final = 3.0


class StopRequests:
    """The signals that this process has received. Construct it before any other thread is started.

    `received` is the name of the first one; `is_by_others` says whether any of them came from elsewhere than the
    launcher, which stops its workers also in order to start them again.

    Args:
        has_something_to_save: whether there is, although the training has not begun.
        on_idle_stop: called before the process ends where there is not, with what `is_by_others` says.
    """

    def __init__(
        self,
        has_something_to_save: Callable[[], bool] = lambda: False,
        on_idle_stop: Callable[[bool], None] = lambda _by_others: None,
    ) -> None:
        self.received: str | None = None
        self.is_by_others = False
        self._has_something_to_save = has_something_to_save
        self._on_idle_stop = on_idle_stop
        self._give_up: Callable[[str], None] = lambda _reason: None
        self._is_training = False
        self._interrupted_at: float | None = None
        self._launcher = os.getppid()
        self._lock = threading.Lock()
        self._signals = {number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def begin(self, give_up: Callable[[str], None]) -> None:
        """Say that the training begins: from here on there is something to save.

        Args:
            give_up: is told why the process ends without having stopped in order.
        """
        with self._lock:
            self._give_up = give_up
            self._is_training = True

    def _wait(self) -> None:
        while True:
            number, sender = _await_one_of(self._signals)
            with self._lock:
                self.is_by_others |= sender not in (None, self._launcher)
                is_idle = not self._is_training and not self._has_something_to_save()
                if number == signal.SIGINT and self._is_impatient():
                    os._exit(EXIT_INTERRUPTED)
                if is_idle:
                    self._on_idle_stop(self.is_by_others)
                    os._exit(EXIT_STOPPED)
                if self.received is None:
                    self.received = signal.Signals(number).name
                    threading.Thread(target=self._end_in_time, name="grace", daemon=True).start()

    def _is_impatient(self) -> bool:
        """Whether somebody has pressed Ctrl-C again. Of one Ctrl-C, the launcher passes on a second signal."""
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
        return now - self._interrupted_at > _IMPATIENCE_SECONDS

    def _end_in_time(self) -> None:
        """End the process where it does not end by itself."""
        time.sleep(_GRACE_SECONDS)
        try:
            self._give_up(f"{self.received}: not stopped within {_GRACE_SECONDS:.0f} s")
        finally:
            os._exit(EXIT_FAILURE)


def _await_one_of(signals: set[signal.Signals]) -> tuple[int, int | None]:
    """Wait; return which it was, and the process that sent it, where the system says so."""
    if sys.platform == "darwin":
        return signal.sigwait(signals), None
    info = signal.sigwaitinfo(signals)
    return info.si_signo, info.si_pid
