"""One generation of a worker: agree on where to resume, train, log the end.

Every rank makes the same collective calls in the same order; what rank 0 alone logs or writes is marked so.
"""

import sys
import time
from contextlib import ExitStack
from dataclasses import replace

from elastic_mnist.errors import Stopped
from elastic_mnist.ipc.environment import WorkerEnvironment
from elastic_mnist.ipc.heartbeat import COMPUTING, FINISHING
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots.resume import Start
from elastic_mnist.telemetry import events
from elastic_mnist.telemetry.events import log
from elastic_mnist.training import determinism, model
from elastic_mnist.training.trainer import Trainer
from elastic_mnist.worker.checkpointer import TieredCheckpointer
from elastic_mnist.worker.context import WorkerContext
from elastic_mnist.worker.heartbeat import heartbeat_writer
from elastic_mnist.worker.setup import build_trainer
from elastic_mnist.worker.start import agree_on_start, warn_of_changed_bits
from elastic_mnist.worker.stop_requests import StopRequests


def run(settings: Settings, env: WorkerEnvironment, requests: StopRequests, at_end: ExitStack) -> None:
    """Train until the job is finished. Every rank must call this.

    Args:
        settings: of the job.
        env: of this process.
        requests: to stop, which this process receives.
        at_end: gets what is to be done after an error has been logged.

    Raises:
        UsageError: the user must put something right.
        TrainingError: the training cannot go on.
        Stopped: the job was asked to stop; what is finished is saved.
        PeerLost: another rank is gone.
    """
    context = WorkerContext(settings, env, requests)
    start = agree_on_start(context)
    identify(context, start)
    if start.finished is not None:
        log_nothing_to_do(context, start)
        with heartbeat_writer.phase(FINISHING):
            context.world.exit_barrier()
    else:
        train(context, start, at_end)
    with heartbeat_writer.phase(FINISHING):
        context.world.leave()


def train(context: WorkerContext, start: Start, at_end: ExitStack) -> None:
    """Train from the state that `start` brings to the end of the job. Every rank must call this."""
    checkpointer = TieredCheckpointer(context, start)
    at_end.callback(checkpointer.close)  # what is being written is good
    state = start.state()
    warn_of_changed_bits(context, state)
    trainer = build_trainer(context, start, state, checkpointer)
    checkpointer.begin(trainer)
    log_start(context, start, trainer, has_memory_tier=checkpointer.has_memory)
    start, state = replace(start, data=None), None  # twice the size of the model and its moments
    context.requests.begin(give_up)
    try:
        with heartbeat_writer.phase(COMPUTING):
            trainer.run()
    except Stopped:
        log_stop(context, trainer)
        context.world.exit_barrier()  # rank 0 saves before another rank exits
        raise
    with heartbeat_writer.phase(FINISHING):
        if context.world.rank == 0:
            log_end(start, trainer)
            checkpointer.record_end(trainer.position.step)
        context.world.exit_barrier()  # rank 0 saves and logs before another rank exits
        checkpointer.release_memory()


def identify(context: WorkerContext, start: Start) -> None:
    """Put run, generation and rank into events and heartbeats."""
    events.identify(run_id=start.record.run_id, generation=start.record.generation)
    heartbeat_writer.run_id, heartbeat_writer.generation = start.record.run_id, start.record.generation
    heartbeat_writer.rank, heartbeat_writer.world_size = context.world.rank, context.world.size
    heartbeat_writer.log_hang = lambda reason, stack: log.error(
        "worker.hung", reason=reason, step=heartbeat_writer.step, stack=stack
    )


def give_up(reason: str) -> None:
    """Log that this process exits without having stopped cleanly."""
    log.error("run.failed", reason=reason, step=heartbeat_writer.step)
    heartbeat_writer.end()


def log_stop(context: WorkerContext, trainer: Trainer) -> None:
    """Log at rank 0 that the job was stopped, and where it will resume."""
    reason = context.requests.received or "a signal at another rank"
    if heartbeat_writer.num_nodes_waiting:  # for which torchrun stops the workers, with SIGTERM, and starts them anew
        reason += ", while a node waits to join"
    log.info(
        "run.stopped",
        reason=reason,
        **vars(trainer.position),
        path=context.tier.path(trainer.position.step),
    )


def log_start(context: WorkerContext, start: Start, trainer: Trainer, *, has_memory_tier: bool) -> None:
    """Log how this generation begins, and where it resumes from."""
    log.info(
        "run.started",
        source=start.source,
        **vars(trainer.position),
        snapshot_path=context.storage.location,
        argv=sys.argv[1:],
        settings=context.settings.as_plain(),
        global_batch_size=trainer.global_batch_size,
        micro_batch_size=trainer.micro_batch_size,
        device=str(context.device),
        num_threads=context.num_threads,
        num_train_samples=trainer.num_samples,
        has_memory_tier=has_memory_tier,
        versions=determinism.platform_fingerprint(context.device),
    )
    if start.source != "fresh" or start.record.generation > 0:
        log.info(
            "run.resumed",
            source=start.source,
            path=start.path,
            **vars(trainer.position),
            num_lost_steps=start.num_lost_steps,
        )


def log_end(start: Start, trainer: Trainer) -> None:
    """Log at rank 0 that the job is finished."""
    wall_seconds = max(0.0, time.time() - start.record.started_at)  # a clock may have been set back
    log.info(
        "run.finished",
        step=trainer.position.step,
        epoch=trainer.position.epoch,
        test_accuracy=trainer.progress.test_accuracy,
        weights_sha256=model.weights_sha256(trainer.model.state_dict()),
        num_restarts=start.record.generation,
        num_lost_steps=start.record.num_lost_steps,
        wall_seconds=round(wall_seconds, 3),
        goodput=round(min(1.0, trainer.progress.productive_seconds / max(wall_seconds, 1e-9)), 4),
    )


def log_nothing_to_do(context: WorkerContext, start: Start) -> None:
    """Print that the job was finished before. The log says so already, so no file is changed."""
    manifest = start.finished
    assert manifest is not None
    events.console_only()
    log.info(
        "run.nothing_to_do",
        epoch=manifest.epoch,
        step=manifest.step,
        path=start.path,
        test_accuracy=manifest.test_accuracy,
        weights_sha256=manifest.weights_sha256,
        hint=f"--epochs {context.settings.epochs} are done; ask for more to go on",
    )
