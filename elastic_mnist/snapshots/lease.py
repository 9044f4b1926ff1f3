"""The lease on a place of snapshots: the generation that acquired it last may write there, and no other.

Invariant: what a newer generation has written is never overwritten. A worker that was stopped, cut off or orphaned may
wake up long after another generation has taken over, so each write follows a check of the run's record and is itself
conditional on what the writer has seen (`Storage.put_if_match`).

A second job under the same settings is refused where the first one can be seen to be alive: on the same host. From
another host it takes over, and the first one ends with that reason.
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


def is_stale(manifest: Manifest, recorded: RunRecord | None) -> bool:
    """Whether a generation saved a snapshot after it had lost the lease, beyond where the recorded one resumed.

    A store orders the writes to one object, and the manifest is another object than the record.
    """
    return (
        recorded is not None
        and recorded.began_at is not None
        and manifest.run_id == recorded.run_id
        and manifest.generation < recorded.generation
        and manifest.step > recorded.began_at
    )


class Lease:
    """The lease of one generation on a place of snapshots.

    Args:
        storage: the place.
        record: the run, with this generation and its holder.
        etag: of the record that this generation has read and follows; None for no record.
    """

    def __init__(self, storage: Storage, record: RunRecord, etag: str | None) -> None:
        self._storage = storage
        self.record = record
        self._etag = etag
        self._is_acquired = False

    def acquire(self) -> None:
        """Write the record; raises `Fenced` or `UsageError` where another one was written meanwhile."""
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
            self._write(self._etag)
        except StoreConflict:
            self.check()

    def _write(self, etag: str | None) -> None:
        self._etag = self._storage.put_if_match(run_record.NAME, self.record.to_json(), etag)
        self._is_acquired = True

    def check(self) -> None:
        """Make sure that the place is still this generation's.

        Raises:
            Fenced: a newer generation of this job has it; this one is over.
            UsageError: another job has it.
        """
        etag = self._storage.etag(run_record.NAME)
        if self._is_acquired and etag is not None and etag == self._etag:
            return
        try:
            other = run_record.read(self._storage)
        except RecordError as error:
            if not self._is_acquired:
                raise
            log.warning("run.record_damaged", reason=f"{error}; written anew by the generation that has the lease")
            other = None
        if other is not None and other != self.record:
            self._yield_to(other)
        # It is gone, or of a generation before this one: a lease that could not be acquired while the store was away.
        self._write(etag)

    def finish(self) -> None:
        """Record that the end of the run has been logged."""
        self.check()
        self.record = replace(self.record, is_finished=True)
        self._write(self._etag)

    def _yield_to(self, other: RunRecord) -> None:
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
