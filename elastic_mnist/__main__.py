"""A worker's outermost layer: from the command line to the exit status.

    torchrun --max_restarts=3 --nnodes=1:2 -m elastic_mnist [OPTIONS]

Each way to end is told here, once: 0 finished, 2 something for the user to put right, 143 stopped on request, 1 a
failure.
"""

import contextlib
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Final, NoReturn, TextIO

from elastic_mnist.errors import (
    EXIT_FAILURE,
    EXIT_STOPPED,
    EXIT_USAGE,
    AlreadyReported,
    Fenced,
    PeerLost,
    ReportedByRank0,
    Stopped,
    TrainingError,
    UsageError,
    print_message,
)
from elastic_mnist.ipc import heartbeat
from elastic_mnist.ipc.environment import MEMORY, PULSE, WorkerEnvironment
from elastic_mnist.ipc.parent_death import set_parent_death_signal
from elastic_mnist.settings import Settings, parse
from elastic_mnist.worker.heartbeat import heartbeat_writer
from elastic_mnist.worker.malloc import tune_malloc
from elastic_mnist.worker.stop_requests import StopRequests

_GRACE_SECONDS: Final = 1.0
"""An agent that sees the process that failed ends this one within that time. If this one ended by itself in the same
second, torchrun's report would name either as the root cause."""

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: "Sequence[str] | None" = None) -> None:
    """Run one worker; returns when the job is finished, else ends the process with its exit status."""
    tune_malloc()
    requests = StopRequests(_has_memory_that_is_filled, _tell_agent_of_stop)
    try:
        settings, place = parse(sys.argv[1:] if arguments is None else arguments), WorkerEnvironment.from_environment()
    except UsageError as error:
        print_message(f"error: {error}")
        raise SystemExit(EXIT_USAGE) from None
    if place.endpoint is not None:
        set_parent_death_signal(place.agent_pid)
    heartbeat_writer.start(place.pulse_path, local_rank=place.local_rank, hang_timeout=settings.hang_timeout)
    with contextlib.ExitStack() as at_end:
        status = _train(settings, place, requests, at_end)
    if status:
        _end(status)


def _train(settings: Settings, place: WorkerEnvironment, requests: StopRequests, at_end: contextlib.ExitStack) -> int:
    """Train, and tell of what keeps it from its end; return the exit status."""
    from elastic_mnist.telemetry import events  # noqa: PLC0415 - a wrong option is told before anything heavy is imported

    events.configure(
        settings.event_log_path, rank=place.rank, world_size=place.world_size, log_format=settings.log_format
    )
    from elastic_mnist.worker import run, start  # noqa: PLC0415 - the same

    status = EXIT_FAILURE
    try:
        run.run(settings, place, requests, at_end)
    except AlreadyReported:
        return EXIT_USAGE
    except UsageError as error:
        # Before a launch's first step, the one line is enough: the log may be another job's.
        is_mistake = place.is_first_attempt and heartbeat_writer.step < 0
        is_known = is_mistake or isinstance(error, ReportedByRank0)
        events.log.log(logging.DEBUG if is_known else logging.ERROR, "run.failed", reason=str(error))
        start.refuse(place, str(error))
        return EXIT_USAGE
    except Stopped:
        heartbeat.stopped(place.pulse_path, by_others=requests.is_by_others)
        if requests.received is None:
            time.sleep(_GRACE_SECONDS)
        return EXIT_STOPPED
    except Fenced as error:
        events.log.warning("run.fenced", reason=str(error), step=events.at_step())
    except PeerLost as error:
        events.log.warning("peer.lost", reason=str(error))
        time.sleep(_GRACE_SECONDS)
    except TrainingError as error:
        events.log.error("run.failed", reason=str(error), step=events.at_step())
        _leave_error_file(error)
    except Exception as error:  # noqa: BLE001 - the last resort: told, and never swallowed
        events.log.exception("run.failed", reason=f"{type(error).__name__}: {error}", step=events.at_step())
        _leave_error_file(error)
    else:
        status = 0
    return status


def _has_memory_that_is_filled() -> bool:
    """Whether the node's memory tier holds a state, which may be ahead of the durable tier, and ends with the agent."""
    path = os.environ.get(MEMORY)
    try:
        return path is not None and os.stat(path).st_size > 0  # noqa: PTH116 - a Path would read the link
    except OSError:
        return False


def _tell_agent_of_stop(by_others: bool) -> None:
    """Let the agent know that this worker stops before it has anything to save."""
    heartbeat.stopped(os.environ.get(PULSE), by_others=by_others)


def _leave_error_file(error: Exception) -> None:
    """Leave the root cause where torchrun looks for it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # noqa: PLC0415

        get_error_handler().record_exception(error)


def _end(status: int) -> NoReturn:
    """End the process at once.

    Ordinary interpreter exit would wait for threads in the middle of a micro-batch and for a process group whose peers
    are gone, and after a job's good end torch's threads abort it now and then.
    """
    heartbeat_writer.end()
    streams: list[TextIO | None] = [sys.stdout, sys.stderr]
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            if stream is not None:
                stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
    _end(0)
