"""Who may write at a place of snapshots: the generation that claimed it last, and no other.

A worker that was stopped, cut off or orphaned may wake up long after another generation has gone on. So each write is
preceded by a look at the run's record, and is itself conditional on what the writer has seen there (`Storage.put_if`):
what a newer generation has written is never overwritten.

A second job, under the same settings, is told that the place is in use, where it can be seen that the first one is
alive: on the same host. From another host it takes over, and the first one ends with that reason.
"""

from dataclasses import replace

from elastic_mnist.errors import Fenced, RecordError, StoreConflict, UsageError
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.manifest import Manifest
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.storage import Storage
from elastic_mnist.telemetry.events import log


def refuse_if_in_use(recorded: RunRecord, holder: LeaseHolder, where: str) -> None:
    """Raise `UsageError` where another launch is at work on a run."""
    if recorded.is_finished or recorded.holder.job_id == holder.job_id or not recorded.holder.is_alive:
        return
    raise UsageError(
        f"{where} is in use by another job, run {recorded.run_id}, process {recorded.holder.pid} on this host; "
        f"wait for its end, or choose another --snapshot_path"
    )


def is_late(manifest: Manifest, recorded: RunRecord | None) -> bool:
    """Whether a snapshot was saved by a generation that was over, beyond where the recorded one had gone on from.

    A store heeds the order of writes to one object, and the manifest is another one than the record.
    """
    return (
        recorded is not None
        and recorded.began_at is not None
        and manifest.run_id == recorded.run_id
        and manifest.generation < recorded.generation
        and manifest.step > recorded.began_at
    )


class Lease:
    """The claim of one generation on a place of snapshots.

    Args:
        storage: the place.
        record: the run, with this generation and its holder.
        seen: the version of the record that this generation has read and follows; None for no record.
    """

    def __init__(self, storage: Storage, record: RunRecord, seen: str | None) -> None:
        self._storage = storage
        self.record = record
        self._seen = seen
        self._is_taken = False

    def take(self) -> None:
        """Write the record; raises `Fenced` or `UsageError` where somebody else has written one meanwhile."""
        if not self._storage.outlives_process:
            log.warning(
                "store.not_durable",
                path=self._storage.location,
                reason="what is saved there ends with this process; name a directory or a URL of another kind",
            )
        elif not self._storage.has_conditional_put:
            log.warning(
                "store.not_fenced",
                path=self._storage.location,
                reason="this store cannot refuse a write that comes late; let one job at a time use it",
            )
        try:
            self._write(self._seen)
        except StoreConflict:
            self.check()

    def _write(self, version: str | None) -> None:
        self._seen = self._storage.put_if(run_record.NAME, self.record.to_json(), version)
        self._is_taken = True

    def check(self) -> None:
        """Make sure that the place is still this generation's.

        Raises:
            Fenced: a newer generation of this job has it; this one is over.
            UsageError: another job has it.
        """
        version = self._storage.version(run_record.NAME)
        if self._is_taken and version is not None and version == self._seen:
            return
        try:
            other = run_record.read(self._storage)
        except RecordError as error:
            if not self._is_taken:
                raise
            log.warning("run.record_damaged", reason=f"{error}; written anew by the generation that has the claim")
            other = None
        if other is not None and other != self.record:
            self._make_way(other)
        # It is gone, or of a generation before this one: a claim that could not be made while the store was away.
        self._write(version)

    def finish(self) -> None:
        """Note that the end of the run has been told."""
        self.check()
        self.record = replace(self.record, is_finished=True)
        self._write(self._seen)

    def _make_way(self, other: RunRecord) -> None:
        """Raise where `other` is not a generation that this one follows."""
        is_same_job = other.holder.job_id == self.record.holder.job_id
        if other.run_id == self.record.run_id and is_same_job:
            if other.generation < self.record.generation:
                return
            raise Fenced(f"{self._storage.location}: generation {other.generation} has taken over; this one is over")
        raise UsageError(
            f"{self._storage.location} was taken over by another job, run {other.run_id}, process "
            f"{other.holder.pid}; this one ends. Two jobs need two --snapshot_path"
        )
