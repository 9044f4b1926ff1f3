"""What can go wrong, told to the person who can put it right.

    ElasticMnistError
    ├── UsageError            the command, its options or its surroundings; exit status 2
    │   ├── SettingsError     an option has a value that cannot work
    │   ├── DataError         the data set is missing, damaged or foreign
    │   └── StoreError        the snapshot path cannot be read or written
    │       └── StoreConflict another writer was there first
    ├── SnapshotError         one snapshot is damaged or unfit; another may serve
    ├── TrainingError         the training itself cannot go on
    ├── Stopped               the job was asked to stop, and has; exit status 143
    ├── PeerLost              another rank is gone; the next generation goes on
    └── Fenced                the next generation is at work already

A ``UsageError`` is one line that names the value, the limit and the way out. It is printed as it
stands, without a traceback, and starting the same command again would end the same way.
"""

import contextlib
import sys
from typing import Final

EXIT_USAGE: Final = 2
"""Exit status for a usage, settings, data or store error."""

EXIT_FAILURE: Final = 1
"""Exit status for a failure; also of a rank whose peer is gone. torchrun starts the workers again."""

EXIT_STOPPED: Final = 128 + 15
"""Exit status of a job that was asked to stop, and has saved what was finished; what a shell says of SIGTERM."""

EXIT_INTERRUPTED: Final = 128 + 2
"""Exit status after a second Ctrl-C: nothing was saved."""


class ElasticMnistError(Exception):
    """The base of every error this package raises on purpose."""


class UsageError(ElasticMnistError):
    """Something only the user can put right; one line, exit status 2."""


class SettingsError(UsageError):
    """An option has a value that cannot work."""


class DataError(UsageError):
    """The data set is missing, damaged or not what it claims to be."""


class StoreError(UsageError):
    """The snapshot path cannot be read or written; never to be read as "there is no snapshot"."""


class StoreConflict(StoreError):  # noqa: N818 - another writer is no fault of this one
    """An object is no longer at the version that this process last saw: another one writes there too."""


class RecordError(StoreError):
    """The run's record can be read, and makes no sense."""


class AlreadyReported(UsageError):  # noqa: N818 - what is left of an error
    """A usage error that people have been told of; what is left is to end with its status."""


class ReportedByRank0(UsageError):  # noqa: N818 - the same
    """A usage error of rank 0, which has told the event log; people at this node's terminal have not been told."""


class SnapshotError(ElasticMnistError):
    """One snapshot is damaged, torn or unfit to resume from."""


class TrainingError(ElasticMnistError):
    """Training cannot go on with correct results."""


class Stopped(ElasticMnistError):  # noqa: N818 - what was asked for, and no error
    """The job was asked to stop; what is finished is saved."""


class PeerLost(ElasticMnistError):  # noqa: N818 - it is an event of the world, not a fault of this process
    """A collective failed because another rank is gone; this generation is over."""


class Fenced(ElasticMnistError):  # noqa: N818 - the same
    """A newer generation has taken over; what this one would write must not be written."""


def print_message(message: str) -> None:
    """Say something to the person at the terminal, if there still is one: one line at standard error."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # it was closed at the start, or since
        sys.stderr.write(f"elastic_mnist: {message}\n")
        sys.stderr.flush()
