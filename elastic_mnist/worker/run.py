"""One life of a worker, from its settings to the end of the job: agree where to go on from, train, tell.

Every rank walks through `run` in step; what only rank 0 says or writes is marked so.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from elastic_mnist.errors import AlreadyReported, ReportedByRank0, Stopped, StoreError, UsageError, print_message
from elastic_mnist.ipc import heartbeat
from elastic_mnist.ipc.environment import WorkerEnvironment
from elastic_mnist.ipc.heartbeat import COMPUTING, FINISHING
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots import memory, resume
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.progress import ProgressFile
from elastic_mnist.snapshots.resume import Start
from elastic_mnist.snapshots.resume_sources import Candidate
from elastic_mnist.snapshots.run_config import StartRequest, requested
from elastic_mnist.snapshots.state import State, pack
from elastic_mnist.snapshots.writer import Write, with_retries
from elastic_mnist.telemetry import events
from elastic_mnist.telemetry.events import log
from elastic_mnist.training import determinism, model
from elastic_mnist.training.trainer import Training, train
from elastic_mnist.worker.heartbeat import heartbeat_writer
from elastic_mnist.worker.setup import Job, build, num_threads
from elastic_mnist.worker.stop_requests import StopRequests


def run(settings: Settings, place: WorkerEnvironment, requests: StopRequests, at_end: ExitStack) -> None:
    """Train until the job is finished. Every rank must call this.

    Args:
        settings: of the job.
        place: of this process.
        requests: to stop, which this process receives.
        at_end: gets what is to be done when this raises, after it has been told.

    Raises:
        UsageError: the user must put something right.
        TrainingError: the training cannot go on.
        Stopped: the job was asked to stop; what is finished is saved.
        PeerLost: another rank is gone.
    """
    job = Job(settings, place, requests)
    at_end.callback(job.writer.close)  # what is being written is good
    start = agree_on_start(job)
    identify(job, start)
    if start.finished is not None:
        tell_nothing_to_do(job, start)
    else:
        state = start.state()
        warn_of_changed_bits(job, state)
        training, network = build(job, start, state)
        tell_start(job, start, training)
        start, state = replace(start, data=None), None  # twice the size of the model and its moments
        requests.begin(give_up)
        try:
            with heartbeat_writer.phase(COMPUTING):
                train(training)
        except Stopped:
            tell_stop(job, training)
            job.world.part()  # nobody leaves before rank 0 has saved
            raise
        if job.world.rank == 0:
            with heartbeat_writer.phase(FINISHING):
                tell_end(job, start, training, network)
    with heartbeat_writer.phase(FINISHING):
        job.world.part()  # nobody leaves before rank 0 has saved and told
        if job.memory is not None:
            job.memory.release()
        job.world.leave()


def refuse(place: WorkerEnvironment, reason: str) -> None:
    """Tell people, and this process's agent, why starting its workers again is of no use; one line an agent."""
    if heartbeat.refuse(place.pulse_path):
        print_message(f"error: {reason}")


def identify(job: Job, start: Start) -> None:
    """Let events and signs of life say whose they are."""
    events.identify(run_id=start.record.run_id, generation=start.record.generation)
    heartbeat_writer.run_id, heartbeat_writer.generation = start.record.run_id, start.record.generation
    heartbeat_writer.rank, heartbeat_writer.world_size = job.world.rank, job.world.size
    heartbeat_writer.tell = lambda reason, stack: log.error(
        "worker.hung", reason=reason, step=heartbeat_writer.step, stack=stack
    )


def give_up(reason: str) -> None:
    """Tell that this process ends without having stopped in order."""
    log.error("run.failed", reason=reason, step=heartbeat_writer.step)
    heartbeat_writer.end()


def tell_stop(job: Job, training: Training) -> None:
    """Tell on rank 0 that the job was stopped, and where it will go on."""
    reason = job.requests.received or "a signal at another rank"
    if heartbeat_writer.num_nodes_waiting:  # for which torchrun stops the workers, with SIGTERM, and starts them anew
        reason += ", while a node waits to join"
    log.info(
        "run.stopped",
        reason=reason,
        **vars(training.position),
        path=job.tier.path(training.position.step),
    )


def agree_on_start(job: Job) -> Start:
    """Gather the nodes' memory snapshots, let rank 0 decide, and give all ranks its decision and the state."""
    request = StartRequest(
        settings=job.settings,
        config=requested(job.settings, job.dataset_facts),
        world_size=job.world.size,
        device_type=job.device.type,
    )
    held = None
    if job.place.memory_path is not None and job.place.local_rank == 0:
        held = memory.read(job.place.memory_path)
    own = None if held is None else Candidate(rank=job.world.rank, record=held.record, position=held.position)
    candidates = job.world.gather(own)
    if job.world.rank == 0:
        start = decide(job, request, [candidate for candidate in candidates if candidate])
        job.world.broadcast(start.for_broadcast())
    else:
        decision: Start | ReportedByRank0 = job.world.broadcast(None)
        if isinstance(decision, ReportedByRank0):
            raise decision
        start = decision
    resume.check_same_settings(start, request.must_match)
    if start.state_rank is not None:
        data = start.data
        if held is not None and start.source == "memory" and start.state_rank == job.world.rank:
            data = pack(held.state)
        start = replace(start, data=job.world.broadcast_bytes(data, source=start.state_rank))
    if job.world.rank > 0 and job.place.local_rank == 0:
        warn_of_unshared_snapshots(job, start)
    return start


def decide(job: Job, request: StartRequest, candidates: Sequence[Candidate]) -> Start:
    """Decide on rank 0; an error is logged and printed here, and raised at all ranks."""
    try:
        return resume.decide(
            job.storage,
            job.tier,
            request,
            holder=LeaseHolder.of(job.place),
            progress_path=job.mark_path,
            candidates=candidates,
        )
    except UsageError as error:
        if not job.place.is_first_attempt:
            log.error("run.failed", reason=str(error))
        refuse(job.place, str(error))  # before the others know: when they end, this process is ended too
        job.world.broadcast(ReportedByRank0(str(error)))
        raise AlreadyReported from error


def warn_of_unshared_snapshots(job: Job, start: Start) -> None:
    """Say on a node that does not see the run's snapshots what that means."""
    try:
        seen = run_record.read(job.storage)
    except StoreError:
        seen = None
    if seen is None or seen.run_id != start.record.run_id:
        log.warning(
            "world.snapshots_not_shared",
            path=job.storage.location,
            reason="this node does not see the run's snapshots; if all other nodes are lost at once, so are they",
        )


def warn_of_changed_bits(job: Job, state: State | None) -> None:
    """Say once where the bits may differ from here on: another environment than rank 0's, or than the snapshot's."""
    here = determinism.of(job.device)
    at_rank_0 = job.world.broadcast(here)
    if here != at_rank_0:
        log.warning("world.mixed", changed=determinism.changes(at_rank_0, here))
    elif state is not None and job.world.rank == 0 and state["versions"] and here != state["versions"]:
        log.warning("run.environment_changed", changed=determinism.changes(state["versions"], here))


def tell_start(job: Job, start: Start, training: Training) -> None:
    """Tell how this generation begins, and where it goes on from."""
    log.info(
        "run.started",
        source=start.source,
        **vars(training.position),
        snapshot_path=job.storage.location,
        argv=sys.argv[1:],
        settings=job.settings.as_plain(),
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        device=str(job.device),
        num_threads=num_threads(job),
        num_train_samples=training.num_samples,
        has_memory_tier=job.memory is not None,
        versions=determinism.of(job.device),
    )
    if start.source != "fresh" or start.record.generation > 0:
        log.info(
            "run.resumed",
            source=start.source,
            path=start.path,
            **vars(training.position),
            num_lost_steps=start.num_lost_steps,
        )


def tell_end(job: Job, start: Start, training: Training, network: model.ConvNet) -> None:
    """Tell on rank 0 that the job is finished, and note in the run's record that it has been told."""
    wall_seconds = max(0.0, time.time() - start.record.started_at)  # a clock may have been set back
    log.info(
        "run.finished",
        step=training.position.step,
        epoch=training.position.epoch,
        test_accuracy=training.progress.test_accuracy,
        weights_sha256=model.weights_sha256(network.state_dict()),
        num_restarts=start.record.generation,
        num_lost_steps=start.record.num_lost_steps,
        wall_seconds=round(wall_seconds, 3),
        goodput=round(min(1.0, training.progress.productive_seconds / max(wall_seconds, 1e-9)), 4),
    )
    assert start.lease is not None
    path = job.storage.path(run_record.NAME)
    try:
        with_retries(Write(step=training.position.step, path=path, run=start.lease.finish))
    except StoreError as error:  # all is saved; started again, the job ends as finished once more
        log.warning("snapshot.store_unreachable", reason=str(error))
    ProgressFile.remove(job.mark_path)


def tell_nothing_to_do(job: Job, start: Start) -> None:
    """Tell that the job was finished before. That stands in the log already, so every file is left as it is."""
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
        hint=f"--epochs {job.settings.epochs} are done; ask for more to go on",
    )
