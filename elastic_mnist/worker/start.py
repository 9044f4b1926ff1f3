"""How the ranks of a generation agree on where to resume: rank 0 decides, and all get its decision and the state."""

from collections.abc import Sequence
from dataclasses import replace

from elastic_mnist.errors import AlreadyReported, ReportedByRank0, StoreError, UsageError, print_message
from elastic_mnist.ipc import heartbeat
from elastic_mnist.ipc.environment import WorkerEnvironment
from elastic_mnist.snapshots import memory, resume
from elastic_mnist.snapshots import record as run_record
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.resume import Start
from elastic_mnist.snapshots.resume_sources import Candidate
from elastic_mnist.snapshots.run_config import StartRequest, requested
from elastic_mnist.snapshots.state import State, pack
from elastic_mnist.telemetry.events import log
from elastic_mnist.training import determinism
from elastic_mnist.worker.context import WorkerContext


def agree_on_start(context: WorkerContext) -> Start:
    """Gather the nodes' memory snapshots, let rank 0 decide, and give all ranks its decision and the state."""
    request = StartRequest(
        settings=context.settings,
        config=requested(context.settings, context.dataset_facts),
        world_size=context.world.size,
        device_type=context.device.type,
    )
    held = None
    if context.env.memory_path is not None and context.env.local_rank == 0:
        held = memory.read(context.env.memory_path)
    own = None if held is None else Candidate(rank=context.world.rank, record=held.record, position=held.position)
    candidates = context.world.gather(own)
    if context.world.rank == 0:
        start = decide(context, request, [candidate for candidate in candidates if candidate])
        context.world.broadcast(start.for_broadcast())
    else:
        decision: Start | ReportedByRank0 = context.world.broadcast(None)
        if isinstance(decision, ReportedByRank0):
            raise decision
        start = decision
    resume.check_same_settings(start, request.must_match)
    if start.state_rank is not None:
        data = start.data
        if held is not None and start.source == "memory" and start.state_rank == context.world.rank:
            data = pack(held.state)
        start = replace(start, data=context.world.broadcast_bytes(data, source=start.state_rank))
    if context.world.rank > 0 and context.env.local_rank == 0:
        warn_of_unshared_snapshots(context, start)
    return start


def decide(context: WorkerContext, request: StartRequest, candidates: Sequence[Candidate]) -> Start:
    """Decide on rank 0; an error is logged and printed here, and raised at all ranks."""
    try:
        return resume.decide(
            context.storage,
            context.tier,
            request,
            holder=LeaseHolder.of(context.env),
            progress_path=context.progress_path,
            candidates=candidates,
        )
    except UsageError as error:
        if not context.env.is_first_attempt:
            log.error("run.failed", reason=str(error))
        refuse(context.env, str(error))  # before the others know: when they end, this process is ended too
        context.world.broadcast(ReportedByRank0(str(error)))
        raise AlreadyReported from error


def warn_of_unshared_snapshots(context: WorkerContext, start: Start) -> None:
    """Say on a node that does not see the run's snapshots what that means."""
    try:
        seen = run_record.read(context.storage)
    except StoreError:
        seen = None
    if seen is None or seen.run_id != start.record.run_id:
        log.warning(
            "world.snapshots_not_shared",
            path=context.storage.location,
            reason="this node does not see the run's snapshots; if all other nodes are lost at once, so are they",
        )


def warn_of_changed_bits(context: WorkerContext, state: State | None) -> None:
    """Say once where the bits may differ from here on: another environment than rank 0's, or than the snapshot's."""
    here = determinism.platform_fingerprint(context.device)
    at_rank_0 = context.world.broadcast(here)
    if here != at_rank_0:
        log.warning("world.mixed", changed=determinism.differences(at_rank_0, here))
    elif state is not None and context.world.rank == 0 and state["versions"] and here != state["versions"]:
        log.warning("run.environment_changed", changed=determinism.differences(state["versions"], here))


def refuse(env: WorkerEnvironment, reason: str) -> None:
    """Report to the agent that starting its workers again is useless, and print why; one line an agent."""
    if heartbeat.refuse(env.pulse_path):
        print_message(f"error: {reason}")
