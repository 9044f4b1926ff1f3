"""The snapshots of one generation: in the node's memory after each step, in the durable tier at the steps asked for.

Invariant: a state is copied before the next step changes it, and the training waits for no write but the last.
"""

from elastic_mnist.errors import StoreError
from elastic_mnist.ipc.heartbeat import SAVING
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.memory import MemoryTier
from elastic_mnist.snapshots.progress import ProgressFile
from elastic_mnist.snapshots.resume import Start
from elastic_mnist.snapshots.state import State, detached
from elastic_mnist.snapshots.writer import BackgroundWriter, Write, with_retries
from elastic_mnist.telemetry import events
from elastic_mnist.training import determinism
from elastic_mnist.training.trainer import Trainer
from elastic_mnist.worker.context import WorkerContext
from elastic_mnist.worker.heartbeat import heartbeat_writer


class TieredCheckpointer:
    """Saves the trainer's state to both tiers; see `trainer.Checkpointer`.

    Args:
        context: of this process; its local rank 0 writes the node's memory tier, rank 0 the durable one.
        start: where the generation begins; of rank 0 with the lease.
    """

    def __init__(self, context: WorkerContext, start: Start) -> None:
        self._context = context
        self._record = start.record
        self._is_resumed = start.source != "fresh"
        self._lease = start.lease
        self._versions = determinism.platform_fingerprint(context.device)
        self._settings = context.settings.as_plain()
        self._memory_interval = context.settings.memory_snapshot_every
        self._memory: MemoryTier | None = None
        if context.env.local_rank == 0 and context.env.memory_path is not None and self._memory_interval > 0:
            self._memory = MemoryTier(context.env.memory_path, start.record)
        self._writer = BackgroundWriter(max_failures=context.settings.max_snapshot_failures)
        self._progress_file = ProgressFile(context.progress_path if context.world.rank == 0 else None, start.record)

    @property
    def has_memory(self) -> bool:
        """Whether this process writes a memory tier."""
        return self._memory is not None

    def begin(self, trainer: Trainer) -> None:
        """Make the trainer's first position, and the state that it was resumed from, those of this generation.

        On a node that has just joined, the memory tier holds nothing of this run before.
        """
        if self._memory is not None and self._is_resumed:
            self._memory.put(self._state(trainer))
        self.record_step(trainer.position.step)

    def save_to_memory(self, trainer: Trainer) -> None:
        """Copy the state to the node's memory tier, if this step is due there."""
        if self._memory is not None and trainer.position.step % self._memory_interval == 0:
            self._memory.put(self._state(trainer))

    def save(self, trainer: Trainer) -> None:
        """Copy the state, and begin to write it as a durable snapshot; does nothing but at rank 0."""
        if self._context.world.rank > 0:
            return
        assert self._lease is not None
        state, check_lease = detached(self._state(trainer)), self._lease.check

        def write() -> None:
            self._context.tier.save_state(state, check_lease)

        step = trainer.position.step
        self._writer.submit(Write(step=step, path=self._context.tier.path(step), run=write))

    def record_step(self, step: int) -> None:
        """Record for the log, the agent and the next generation that `step` steps are finished.

        Raises:
            UsageError: too many snapshots in a row could not be written.
            Exception: what the writer met otherwise, such as `Fenced`.
        """
        events.at_step(step)
        heartbeat_writer.finished(step)
        self._progress_file.set(step)
        self._writer.check()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the durable snapshots are written; raises `TrainingError` where the newest cannot be."""
        with heartbeat_writer.phase(SAVING):
            self._writer.flush(timeout)

    def record_end(self, step: int) -> None:
        """Record at rank 0 that the run is finished, after `step` steps, and logged."""
        assert self._lease is not None
        path = self._context.storage.path(run_record.NAME)
        try:
            with_retries(Write(step=step, path=path, run=self._lease.finish))
        except StoreError as error:  # all is saved; started again, the job ends as finished once more
            events.log.warning("snapshot.store_unreachable", reason=str(error))
        ProgressFile.remove(self._context.progress_path)

    def release_memory(self) -> None:
        """Empty the memory tier: the run is finished."""
        if self._memory is not None:
            self._memory.release()

    def close(self) -> None:
        """Wait some seconds for a write that has begun, whatever becomes of it: the training has ended."""
        self._writer.close()

    def _state(self, trainer: Trainer) -> State:
        """Return the state of the training as a snapshot holds it; its tensors are the training's own."""
        return {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "epoch": trainer.position.epoch,
            "samples_in_epoch": trainer.position.samples_in_epoch,
            "step": trainer.position.step,
            "global_batch_size": trainer.global_batch_size,
            "micro_batch_size": trainer.micro_batch_size,
            "seed": self._context.settings.seed,
            "settings": self._settings,
            "contract": self._record.contract,
            "dataset": self._context.dataset_facts,
            "versions": self._versions,
            "world_size": trainer.world_size,
            "run_id": self._record.run_id,
            "generation": self._record.generation,
            "started_at": self._record.started_at,
            "progress": vars(trainer.progress).copy(),
        }
