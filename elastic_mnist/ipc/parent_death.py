"""A worker's tie to the agent that started it.

Invariant: a worker does not outlive its agent. Without the tie, SIGKILL of an agent leaves its
workers training on, and writing snapshots beside those of their successors.
Called once, first of all in a worker; imports nothing heavy, so that the tie also holds during the
imports.

Run as a program, `python lifeline.py PID PROGRAM ARGUMENT...`, it ties another one to the process PID that starts it;
on Linux, where the tie lasts when the program takes over.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_POLL_SECONDS: Final = 0.5


def set_parent_death_signal(agent_pid: int | None = None) -> None:
    """Have this process killed when its parent dies, however that comes about.

    On Linux the kernel does it; elsewhere a thread asks twice a second.

    Args:
        agent_pid: the agent's process id, if known; where it is gone already, this process ends here.
    """
    parent = os.getppid()
    if agent_pid is not None and parent != agent_pid and not _exists(agent_pid):
        os.kill(os.getpid(), signal.SIGKILL)  # orphaned before it got here
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
            if os.getppid() != parent:  # it died between the two calls
                os.kill(os.getpid(), signal.SIGKILL)
            return
    threading.Thread(target=_poll, args=(parent,), name="lifeline", daemon=True).start()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process has the number now, or a wrapper changed the user
        return True
    return True


def _poll(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    starter, *command = sys.argv[1:]
    set_parent_death_signal(int(starter))
    try:
        os.execv(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(f"{command[0]} does not start ({error.strerror})")
