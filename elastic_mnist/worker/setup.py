"""What one life of a worker is made of: builds the parts of the training, and snapshots out of them.

Imports of a restart are on the critical path of every recovery: what only some jobs need is imported where they need
it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_mnist import data
from elastic_mnist.errors import UsageError
from elastic_mnist.ipc.environment import WorkerEnvironment
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.memory import MemoryTier
from elastic_mnist.snapshots.progress import ProgressFile
from elastic_mnist.snapshots.resume import Start
from elastic_mnist.snapshots.state import State, detached, position_of
from elastic_mnist.snapshots.storage import open_storage
from elastic_mnist.snapshots.writer import BackgroundWriter, Write
from elastic_mnist.telemetry import events
from elastic_mnist.telemetry.sample_log import SampleLog
from elastic_mnist.training import determinism, model
from elastic_mnist.training.allreduce import AllReduceGradient
from elastic_mnist.training.evaluation import Evaluation, evaluate
from elastic_mnist.training.gradients import ExactGradient, GradientSync, Objective
from elastic_mnist.training.pool import MicroBatchPool
from elastic_mnist.training.sampler import Step
from elastic_mnist.training.trainer import Progress, Training
from elastic_mnist.worker.heartbeat import heartbeat_writer
from elastic_mnist.worker.process_group import World, choose_device, guard
from elastic_mnist.worker.stop_requests import StopRequests

# The second moment forgets within some 20 steps instead of torch's 1,000: a job of 5 epochs has 590 in all. Worth about
# 0.0015 of test accuracy at the defaults.
_ADAM_BETAS: Final = (0.9, 0.95)


class Job:
    """What stays the same in one life of a worker."""

    def __init__(self, settings: Settings, place: WorkerEnvironment, requests: StopRequests) -> None:
        self.requests = requests
        self.settings = settings
        self.place = place
        self.device = choose_device(settings.device, place.local_rank)
        determinism.use_deterministic_kernels(self.device)
        self.dataset = data.load(
            settings.dataset,
            settings.data_dir,
            train_samples=settings.train_samples,
            test_samples=settings.test_samples,
            seed=settings.seed,
        )
        self.dataset_facts = {
            "name": self.dataset.name,
            "num_samples": len(self.dataset.train_labels),
            "sha256": self.dataset.sha256,
        }
        self.world = World(
            place, self.device, timeout=settings.hang_timeout, meeting_timeout=max(60.0, settings.hang_timeout)
        )
        if self.world.rank != place.rank:  # a longer-serving node decides and tells
            events.configure(
                settings.event_log_path,
                rank=self.world.rank,
                world_size=self.world.size,
                log_format=settings.log_format,
            )
        self.storage = open_storage(settings.snapshot_path)
        self.tier = DurableTier(self.storage, keep_last=settings.keep_last)
        self.writer = BackgroundWriter(max_failures=settings.max_snapshot_failures)
        self.memory: MemoryTier | None = None
        self.mark_path = settings.event_log_path.with_name(settings.event_log_path.name + ".progress")


def build(job: Job, start: Start, state: State | None) -> tuple[Training, model.ConvNet]:
    """Build the parts of the training, in the `state` that `start` brings."""
    settings, world = job.settings, job.world
    network = model.build(settings.seed)
    if state is not None:
        with fits(start, "model"):
            network.load_state_dict(state["model"])
    network.to(job.device)
    # First, because it imports for seconds, and `wrap` is a collective: to import there would look like waiting.
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr, betas=_ADAM_BETAS)
    wrapped = world.wrap(network)
    if state is not None:
        with fits(start, "optimizer"):
            # Another program's file brings no hyperparameters.
            hyperparameters = {"param_groups": optimizer.state_dict()["param_groups"]}
            optimizer.load_state_dict({**hyperparameters, **state["optimizer"]})

    pool = MicroBatchPool(num_threads(job))
    gradient = build_gradient(job, start, network, wrapped, pool)
    sizes = start.record.contract

    def finished_step(step: int) -> None:
        events.at_step(step)
        heartbeat_writer.finished(step)
        mark.set(step)
        job.writer.check()

    job.memory = open_memory(job, start)
    mark = open_mark(job, start)
    training = Training(
        settings=settings,
        num_samples=len(job.dataset.train_labels),
        global_batch_size=sizes["global_batch_size"],
        micro_batch_size=sizes["micro_batch_size"],
        rank=world.rank,
        world_size=world.size,
        optimizer=optimizer,
        gradient=gradient,
        evaluate=build_evaluation(job, network, pool),
        keep=lambda training: keep(job, start, training, network),
        save=lambda training: save(job, start, training, network),
        settle=job.writer.flush,
        note_samples=open_ledger(job, start),
        finished_step=finished_step,
    )
    if state is not None:
        training.position = position_of(state)
        with fits(start, "progress"):
            training.progress = Progress(**state["progress"])
        if start.source == "file":
            training.progress.productive_seconds = 0.0  # another run's
        else:
            training.saved = start.saved
    if state is not None and job.memory is not None:
        # From here on the memory is of this generation, also on a node that has just come.
        job.memory.put(state_of(job, start, training, network))
    training.finished_step(training.position.step)
    return training, network


@contextlib.contextmanager
def fits(start: Start, field: str) -> Iterator[None]:
    """Tell of a field of a snapshot that is of another network or program."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{start.path}: its field {field} does not fit: {reason}; resume from another snapshot"
        ) from error


def build_evaluation(job: Job, network: model.ConvNet, pool: MicroBatchPool) -> Callable[[], Evaluation]:
    """Return what evaluates the network on the test set; collective."""

    def evaluate_network() -> Evaluation:
        return evaluate(
            network,
            job.dataset.test_images,
            job.dataset.test_labels,
            device=job.device,
            precision=job.settings.precision,
            pool=pool,
            all_reduce=job.world.all_reduce,
            rank=job.world.rank,
            world_size=job.world.size,
        )

    return evaluate_network


def build_gradient(
    job: Job, start: Start, network: model.ConvNet, wrapped: DistributedDataParallel, pool: MicroBatchPool
) -> GradientSync:
    """Build what `--gradient_sync` names."""
    settings, world = job.settings, job.world

    def is_stopping() -> bool:
        return job.requests.received is not None

    objective = Objective(
        model=network,
        images=job.dataset.train_images,
        labels=job.dataset.train_labels,
        seed=settings.seed,
        device=job.device,
        precision=settings.precision,
    )
    if settings.gradient_sync == "allreduce":
        torch.set_num_threads(pool.num_threads)  # its micro-batches are computed one after the other
        return AllReduceGradient(
            replace(objective, model=wrapped),
            world.all_reduce,
            guard,
            world_size=world.size,
            is_stopping=is_stopping,
        )
    return ExactGradient(
        objective,
        pool,
        world.all_reduce,
        global_batch_size=start.record.contract["global_batch_size"],
        micro_batch_size=start.record.contract["micro_batch_size"],
        is_stopping=is_stopping,
    )


def num_threads(job: Job) -> int:
    """Return how many micro-batches this process computes at once."""
    if job.device.type != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return job.settings.threads or max(1, cores // job.place.local_world_size)


def open_memory(job: Job, start: Start) -> MemoryTier | None:
    """Return the node's memory tier for the worker that writes it; None for the others, and where there is none."""
    path = job.place.memory_path
    if job.place.local_rank != 0 or path is None or job.settings.memory_snapshot_every == 0:
        return None
    return MemoryTier(path, start.record)


def open_mark(job: Job, start: Start) -> ProgressFile:
    """Return what notes how far this generation came; rank 0's is written, the others' lead nowhere."""
    path = job.mark_path if job.world.rank == 0 else None
    return ProgressFile(path, start.record)


def keep(job: Job, start: Start, training: Training, network: model.ConvNet) -> None:
    """Keep the state in the node's memory tier, if it is time."""
    if job.memory is not None and training.position.step % job.settings.memory_snapshot_every == 0:
        job.memory.put(state_of(job, start, training, network))


def save(job: Job, start: Start, training: Training, network: model.ConvNet) -> None:
    """Begin to write a durable snapshot on rank 0: only a copy of the state is waited for."""
    if job.world.rank > 0:
        return
    state = detached(state_of(job, start, training, network))
    assert start.lease is not None
    check_lease = start.lease.check

    def write() -> None:
        job.tier.save_state(state, check_lease)

    step = training.position.step
    job.writer.submit(Write(step=step, path=job.tier.path(step), run=write))


def state_of(job: Job, start: Start, training: Training, network: model.ConvNet) -> State:
    """Return the state of the training as a snapshot holds it."""
    return {
        "model": network.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "epoch": training.position.epoch,
        "samples_in_epoch": training.position.samples_in_epoch,
        "step": training.position.step,
        "global_batch_size": training.global_batch_size,
        "micro_batch_size": training.micro_batch_size,
        "seed": job.settings.seed,
        "settings": job.settings.as_plain(),
        "contract": start.record.contract,
        "dataset": job.dataset_facts,
        "versions": determinism.of(job.device),
        "world_size": job.world.size,
        "run_id": start.record.run_id,
        "generation": start.record.generation,
        "started_at": start.record.started_at,
        "progress": vars(training.progress).copy(),
    }


def open_ledger(job: Job, start: Start) -> Callable[[Step, int], None]:
    """Return what notes the samples of a step, if that is asked for."""
    if job.settings.sample_log is None:
        return lambda _step, _index: None
    samples = SampleLog(
        job.settings.sample_log,
        rank=job.world.rank,
        run_id=start.record.run_id,
        generation=start.record.generation,
    )
    return lambda step, index: samples.append(
        epoch=step.epoch,
        step=index,
        micro_batches={micro_batch.index: micro_batch.samples.tolist() for micro_batch in step.micro_batches},
    )
