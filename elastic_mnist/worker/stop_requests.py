"""Requests to stop: SIGTERM, SIGINT (Ctrl-C), SIGHUP (the terminal is closed) and SIGUSR1 (some schedulers' notice).

A signal that was ignored when the process began, as `nohup` has it, stays ignored.

Invariant: nothing is done in a signal handler. The signals are blocked, from the process's first moment because the
agent blocks them while it starts a worker, and one thread waits for them. So a signal is noticed at once while the
thread that trains is in a collective, and never ends the process in the middle of a write. It sets a flag: the ranks
agree on a step with the gradient's all-reduce (`training.gradients`), save and exit together. Before the first step,
where there is nothing to save yet, the process exits at once; a state in the node's memory is first resumed and saved.

A process that cannot stop so, because a peer does not answer, exits by itself before the launcher would kill it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final

from elastic_mnist.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_STOPPED
from elastic_mnist.ipc.environment import STOP_SIGNALS

_GRACE_SECONDS: Final = 25.0
"""torchrun kills 30 s after its SIGTERM."""

_SECOND_INTERRUPT_SECONDS: Final = 3.0
"""Of one Ctrl-C, a worker gets two signals: the terminal's and the launcher's."""


class StopRequests:
    """The signals that this process has received. Construct it before any other thread is started.

    Attributes:
        received: name of the first one; None before.
        is_by_others: whether any of them came from elsewhere than the launcher, which also stops its workers in order
            to restart them.

    Args:
        has_something_to_save: whether there is a state to save before the training begins.
        on_idle_stop: called with `is_by_others` before the process exits with nothing to save.
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
        self._first_interrupt_at: float | None = None
        self._launcher = os.getppid()
        self._lock = threading.Lock()
        self._signals = {number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        threading.Thread(target=self._wait, name="signals", daemon=True).start()

    def begin(self, give_up: Callable[[str], None]) -> None:
        """Record that the training begins: from here on there is something to save.

        Args:
            give_up: is given the reason before the process exits without having saved.
        """
        with self._lock:
            self._give_up = give_up
            self._is_training = True

    def _wait(self) -> None:
        while True:
            info = signal.sigwaitinfo(self._signals)
            number = info.si_signo
            with self._lock:
                self.is_by_others |= info.si_pid != self._launcher
                is_idle = not self._is_training and not self._has_something_to_save()
                if number == signal.SIGINT and self._is_second_interrupt():
                    os._exit(EXIT_INTERRUPTED)
                if is_idle:
                    self._on_idle_stop(self.is_by_others)
                    os._exit(EXIT_STOPPED)
                if self.received is None:
                    self.received = signal.Signals(number).name
                    threading.Thread(target=self._exit_after_grace, name="grace", daemon=True).start()

    def _is_second_interrupt(self) -> bool:
        """Whether Ctrl-C was pressed again."""
        now = time.monotonic()
        if self._first_interrupt_at is None:
            self._first_interrupt_at = now
        return now - self._first_interrupt_at > _SECOND_INTERRUPT_SECONDS

    def _exit_after_grace(self) -> None:
        """End the process if it has not exited by then."""
        time.sleep(_GRACE_SECONDS)
        try:
            self._give_up(f"{self.received}: not stopped within {_GRACE_SECONDS:.0f} s")
        finally:
            os._exit(EXIT_FAILURE)
