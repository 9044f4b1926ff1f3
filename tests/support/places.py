"""The surroundings of a small job, in which generations are started."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from states import DATASET, commit, small_state

from elastic_mnist.settings import Settings
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots import resume
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.progress import ProgressFile
from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.resume import Start
from elastic_mnist.snapshots.resume_sources import Candidate
from elastic_mnist.snapshots.run_config import StartRequest, requested
from elastic_mnist.snapshots.storage import LocalStorage, Storage

HOLDER = LeaseHolder(job_id="job", host="host", pid=1, pid_started=1)


class Place:
    """One job's surroundings: its snapshots and its mark, and a way to start a generation there."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "snapshots"
        self.progress_path = root / "events.jsonl.progress"
        self.storage = LocalStorage(self.directory)

    def decide(
        self,
        *,
        world_size: int = 1,
        device_type: str = "cpu",
        dataset: dict[str, Any] = DATASET,
        storage: Storage | None = None,
        holder: LeaseHolder = HOLDER,
        candidates: Sequence[Candidate] = (),
        **options: Any,  # noqa: ANN401 - the options of `Settings`
    ) -> Start:
        """Decide as rank 0 of a generation started with some options."""
        settings = Settings(**{"batch_size": 8, **options})
        storage = storage or self.storage
        return resume.decide(
            storage,
            DurableTier(storage, keep_last=settings.keep_last),
            StartRequest(
                settings=settings,
                config=requested(settings, dataset),
                world_size=world_size,
                device_type=device_type,
            ),
            holder=holder,
            progress_path=self.progress_path,
            candidates=candidates,
        )

    def commit(self, step: int, **changes: Any) -> None:  # noqa: ANN401 - what `small_state` takes
        """Commit a small snapshot, also where no generation has made the place yet."""
        self.storage.create()
        commit(self.storage, step, state=small_state(step, **changes))

    def record(self) -> RunRecord:
        """Return the record as it stands."""
        record = run_record.read(self.storage)
        assert record is not None
        return record

    def progress(self, start: Start, step: int) -> None:
        """Let the generation that `start` began finish some steps."""
        ProgressFile(self.progress_path, start.record).set(step)

    def stop(self, start: Start, step: int | None = None) -> None:
        """Let the generation that `start` began be stopped, after some steps or before its first."""
        progress = ProgressFile(self.progress_path, start.record)
        if step is not None:
            progress.set(step)
        progress.stop()

    def finish(self) -> None:
        """Note in the record, as the recorded generation does with its last word, that the run is finished."""
        self.storage.put(run_record.NAME, replace(self.record(), is_finished=True).to_json())

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Return all that a write to the snapshots would change."""
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in [self.directory, *self.directory.rglob("*")]
        }

    @classmethod
    def at_step(cls, root: Path, step: int) -> "Place":
        """Return a place with a run's record and its snapshot of a step."""
        place = cls(root)
        place.commit(step, run_id=place.decide().record.run_id)
        return place

    @classmethod
    def at_step_5(cls, root: Path) -> "Place":
        """Return a place with a run's record and its snapshot of step 5, in the middle of epoch 0."""
        return cls.at_step(root, 5)

    @classmethod
    def finished(cls, root: Path) -> "Place":
        """Return a place with a run of 2 epochs that is finished and told, and its snapshot of step 26."""
        place = cls.at_step(root, 26)
        place.finish()
        return place
