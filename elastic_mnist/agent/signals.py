"""Signals that come to the agent: held while it starts its workers, else raised as torchrun's own handlers do.

torchrun raises an exception wherever its main thread stands. In the middle of starting workers that is fatal for
them: the agent does not know of them yet, ends without asking them to stop, and they die with it, and with them what
is in the node's memory alone. So a signal waits there until the agent looks after its workers again; it passes it on
then. The workers begin with these signals blocked, and so do not die of one before they can wait for it (`signals`).

Which signals there are is for torchrun's `--signals_to_handle` to say. It arrives in a variable, set anew by each
launcher, through which torchrun is told in turn to leave these alone.
"""

import os
import signal
import threading
from typing import Final, NoReturn

from elastic_mnist.ipc.environment import STOP_SIGNALS

_VARIABLE: Final = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_DEFAULT: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

_HOLD_SECONDS: Final = 5.0
"""An agent whose start takes longer waits for something, perhaps for a node that is gone; it must not be deaf."""

_WAKE: Final = signal.SIGURG
"""Ends a sleep of the main thread; nobody else's business, and ignored where nobody waits for it."""


class AgentSignals:
    """Takes over from torchrun what the workers wait for as well, less what `nohup` had ignored.

    Construct it, and call it, in the main thread.
    """

    def __init__(self) -> None:
        self._is_holding = False
        self._held: int | None = None
        self._overdue: threading.Timer | None = None
        asked = {name.strip() for name in os.environ.get(_VARIABLE, _DEFAULT).split(",")}
        ignored = {number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN}
        ours = {number.name for number in STOP_SIGNALS}
        self._numbers = [
            number for number in STOP_SIGNALS if number.name in {*asked, "SIGUSR1"} and number.name not in ignored
        ]
        # torchrun complains of an empty list; SIGQUIT is on its own.
        os.environ[_VARIABLE] = ",".join(sorted(asked - ours - ignored)) or "SIGQUIT"
        self.heed()
        signal.signal(_WAKE, lambda *_: self.release())

    def hold(self) -> None:
        """Let signals wait from here on, for some seconds; processes that are started begin with them blocked."""
        self._is_holding = True
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        self._overdue = threading.Timer(_HOLD_SECONDS, signal.pthread_kill, (threading.get_ident(), _WAKE))
        self._overdue.daemon = True
        self._overdue.start()

    def release(self) -> None:
        """Let them through again; raises torchrun's `SignalException` where one has come meanwhile."""
        if self._overdue is not None:
            self._overdue.cancel()
        self._is_holding = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        number, self._held = self._held, None
        if number is not None:
            _raise(number)

    def forget(self) -> None:
        """Let them through again, and forget what has come meanwhile: the job is over."""
        self._held = None
        self.release()

    def ignore(self) -> None:
        """Be deaf from here on: the end has begun, and a second request must not end that."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def heed(self) -> None:
        """Be deaf no longer."""
        for number in self._numbers:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        """Called in the main thread, whichever thread the signal came to."""
        if not self._is_holding:
            _raise(number)
        self._held = self._held or number


def _raise(number: int) -> NoReturn:
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415 - only at the end

    name = signal.Signals(number)
    raise SignalException(f"Process {os.getpid()} got signal: {name}", sigval=name)
