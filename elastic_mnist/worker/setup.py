"""Builds the trainer of a generation from the settings and the state that it resumes from.

Imports of a restart are on the critical path of every recovery: what only some jobs need is imported where they need
it.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_mnist.errors import UsageError
from elastic_mnist.snapshots.resume import Start
from elastic_mnist.snapshots.state import State, position_of
from elastic_mnist.telemetry.sample_log import SampleLog
from elastic_mnist.training import model
from elastic_mnist.training.allreduce import AllReduceGradient
from elastic_mnist.training.evaluation import evaluate
from elastic_mnist.training.gradients import ExactGradient, GradientSync, Objective
from elastic_mnist.training.pool import MicroBatchPool
from elastic_mnist.training.trainer import Checkpointer, Progress, Trainer
from elastic_mnist.worker.context import WorkerContext
from elastic_mnist.worker.heartbeat import heartbeat_writer
from elastic_mnist.worker.process_group import peer_errors

# The second moment decays within some 20 steps instead of torch's 1,000: a job of 5 epochs has 590 in all. Worth about
# 0.0015 of test accuracy at the defaults.
_ADAM_BETAS: Final = (0.9, 0.95)


def build_trainer(context: WorkerContext, start: Start, state: State | None, checkpointer: Checkpointer) -> Trainer:
    """Build the trainer, in the `state` that `start` brings. Every rank must call this.

    Raises:
        UsageError: the state does not fit the network or the optimizer.
    """
    settings, world, dataset = context.settings, context.world, context.dataset
    network = model.build(settings.seed)
    if state is not None:
        with _state_errors(start, "model"):
            network.load_state_dict(state["model"])
    network.to(context.device)
    # First, because it imports for seconds, and `wrap` is a collective: to import there would look like waiting.
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr, betas=_ADAM_BETAS)
    wrapped = world.wrap(network)
    if state is not None:
        with _state_errors(start, "optimizer"):
            # Another program's file brings no hyperparameters.
            hyperparameters = {"param_groups": optimizer.state_dict()["param_groups"]}
            optimizer.load_state_dict({**hyperparameters, **state["optimizer"]})

    pool = MicroBatchPool(context.num_threads)
    record = start.record
    trainer = Trainer(
        settings=settings,
        num_samples=len(dataset.train_labels),
        global_batch_size=record.contract["global_batch_size"],
        micro_batch_size=record.contract["micro_batch_size"],
        rank=world.rank,
        world_size=world.size,
        model=network,
        optimizer=optimizer,
        gradient=_build_gradient(context, start, network, wrapped, pool),
        evaluate=partial(
            evaluate,
            network,
            dataset.test_images,
            dataset.test_labels,
            device=context.device,
            precision=settings.precision,
            pool=pool,
            all_reduce=world.all_reduce,
            rank=world.rank,
            world_size=world.size,
            on_progress=heartbeat_writer.progress,
        ),
        checkpointer=checkpointer,
        sample_log=None
        if settings.sample_log is None
        else SampleLog(settings.sample_log, rank=world.rank, run_id=record.run_id, generation=record.generation),
    )
    if state is not None:
        trainer.position = position_of(state)
        with _state_errors(start, "progress"):
            trainer.progress = Progress(**state["progress"])
        if start.source == "file":
            trainer.progress.productive_seconds = 0.0  # another run's
        else:
            trainer.saved = start.saved
    return trainer


@contextlib.contextmanager
def _state_errors(start: Start, field: str) -> Iterator[None]:
    """Raise `UsageError` for a field of a snapshot that is of another network or program."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{start.path}: its field {field} does not fit: {reason}; resume from another snapshot"
        ) from error


def _build_gradient(
    context: WorkerContext,
    start: Start,
    network: model.ConvNet,
    wrapped: DistributedDataParallel,
    pool: MicroBatchPool,
) -> GradientSync:
    """Build what `--gradient_sync` names."""
    settings, world, requests = context.settings, context.world, context.requests

    def is_stopping() -> bool:
        return requests.received is not None

    objective = Objective(
        model=network,
        images=context.dataset.train_images,
        labels=context.dataset.train_labels,
        seed=settings.seed,
        device=context.device,
        precision=settings.precision,
        on_progress=heartbeat_writer.progress,
    )
    if settings.gradient_sync == "allreduce":
        torch.set_num_threads(pool.num_threads)  # its micro-batches are computed one after the other
        return AllReduceGradient(
            replace(objective, model=wrapped),
            world.all_reduce,
            peer_errors,
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
