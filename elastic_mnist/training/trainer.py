"""The training loop.

Invariant: `position` says what is finished, and the state that belongs to it (weights, moments, progress) is
changed together with it, between two steps. A snapshot is taken only there.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

import torch

from elastic_mnist.errors import Stopped, TrainingError
from elastic_mnist.ipc.heartbeat import SAVING
from elastic_mnist.settings import Settings
from elastic_mnist.telemetry.events import log
from elastic_mnist.training.evaluation import Evaluation
from elastic_mnist.training.gradients import GradientSync, StepResult
from elastic_mnist.training.sampler import Position, Step, StepSampler, num_steps_per_epoch
from elastic_mnist.worker.heartbeat import heartbeat_writer

_TELL_SECONDS: Final = 1.0

MAX_SKIPPED_STEPS: Final = 10
"""Bad luck may spoil a few batches; more than that is a job that has gone wrong."""

STOP_SECONDS: Final = 20.0
"""Whoever asks to stop kills after a while; torchrun after 30 s."""


@dataclass(kw_only=True)
class Progress:
    """What the job has to tell, beside its weights; part of every snapshot.

    Attributes:
        epoch_loss_sum: over the samples of the epoch so far.
        num_evaluated_epochs: epochs whose end has been evaluated and told.
        test_loss, test_accuracy: of the last evaluation.
        num_skipped_steps: whose gradient was not finite, over the whole job.
        num_skipped_samples: of the epoch so far, which have no part in its loss.
        productive_seconds: spent in steps and evaluations that count; what is lost is not in here.
    """

    epoch_loss_sum: float = 0.0
    num_evaluated_epochs: int = 0
    test_loss: float | None = None
    test_accuracy: float | None = None
    num_skipped_steps: int = 0
    num_skipped_samples: int = 0
    productive_seconds: float = 0.0


@dataclass(kw_only=True)
class Training:
    """All that the loop works on; `job` builds it.

    Attributes:
        num_samples: of the training set.
        position: what is finished.
        progress: what there is to tell of it.
        saved: what is finished in the newest durable snapshot; None before the first.
        gradient: fills `.grad` with a step's mean gradient, the same at all ranks.
        evaluate: evaluates the model on the test set; collective.
        keep: keeps the state as it stands in the memory tier.
        save: begins to write a durable snapshot of the state as it stands; does nothing but at rank 0.
        settle: waits until the durable snapshots are written, for some seconds or as long as it takes; raises
            `TrainingError` where the newest cannot be.
        note_samples: notes which samples this rank is about to use in a step.
        finished_step: is told after each step how many are finished.
    """

    settings: Settings
    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int
    optimizer: torch.optim.Optimizer
    gradient: GradientSync
    evaluate: Callable[[], Evaluation]
    keep: Callable[["Training"], None]
    save: Callable[["Training"], None]
    settle: Callable[[float | None], None]
    note_samples: Callable[[Step, int], None]
    finished_step: Callable[[int], None]
    position: Position = field(default_factory=Position)
    progress: Progress = field(default_factory=Progress)
    saved: Position | None = None


def train(training: Training) -> None:
    """Train from `training.position` to the end of the last epoch. Every rank must call this.

    Raises:
        Stopped: a rank was asked to stop; what is finished is saved.
        TrainingError: a gradient was not finite, or too many of them.
        PeerLost: another rank is gone.
    """
    settings = training.settings
    meter = Meter()
    while True:
        if training.progress.num_evaluated_epochs < training.position.epoch:
            finish_epoch(training, meter)
            training.keep(training)
            if is_save_due(training):
                save(training)
        if training.position.epoch >= settings.epochs:
            if training.saved != training.position:
                save(training)
            with heartbeat_writer.phase(SAVING):
                training.settle(None)
            return
        assert training.position.samples_in_epoch < training.num_samples  # or no step would ever come
        for step in remaining_steps(training):
            began = time.monotonic()
            set_learning_rate(training)
            training.note_samples(step, training.position.step)
            result = training.gradient(step, step_index=training.position.step)
            if result.num_bad:
                skip(training, step, result)
            else:
                training.optimizer.step()
                training.progress.epoch_loss_sum += result.loss_sum
            training.position = training.position.after(step, training.num_samples)
            training.progress.productive_seconds += time.monotonic() - began
            training.keep(training)
            training.finished_step(training.position.step)
            meter.tell(training, step, result.loss_sum / step.num_samples)
            if result.num_stopping:
                stop(training)
            is_inside_epoch = training.position.samples_in_epoch > 0  # at its end, the evaluation comes first
            if is_inside_epoch and is_save_due(training):
                save(training)


def skip(training: Training, step: Step, result: StepResult) -> None:
    """Go on without a step whose gradient is not finite, where that was asked for and has not happened too often.

    Nothing has to be undone: the gradient was found bad before it was used, so the state is that before the step.
    """
    progress, index = training.progress, training.position.step
    whose = f" of {result.num_bad} micro-batches" if training.settings.gradient_sync == "exact" else ""
    bad = f"step {index}: the gradient{whose} is not finite or too large"
    if training.settings.on_nonfinite == "stop":
        raise TrainingError(
            f"{bad}; nothing of it was saved. A smaller --lr may help, or --on_nonfinite rollback to go on without it"
        )
    if progress.num_skipped_steps >= MAX_SKIPPED_STEPS:
        raise TrainingError(f"{bad}, and {MAX_SKIPPED_STEPS} steps were skipped before; nothing of it was saved")
    progress.num_skipped_steps += 1
    progress.num_skipped_samples += step.num_samples
    if training.rank == 0:  # all know it
        log.warning(
            "step.skipped",
            step=index,
            epoch=training.position.epoch,
            num_bad=result.num_bad,
            num_skipped_steps=progress.num_skipped_steps,
        )


def stop(training: Training) -> NoReturn:
    """Save what is finished, and end: a rank was asked to stop."""
    if training.saved != training.position:
        save(training)
    with heartbeat_writer.phase(SAVING):
        training.settle(STOP_SECONDS)
    raise Stopped


def remaining_steps(training: Training) -> StepSampler:
    """Return the rest of the epoch that the position is in, as this rank sees it."""
    return StepSampler(
        training.num_samples,
        seed=training.settings.seed,
        epoch=training.position.epoch,
        start=training.position.samples_in_epoch,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        rank=training.rank,
        world_size=training.world_size,
    )


def is_due(count: int, saved_count: int, interval: int) -> bool:
    """Whether something that happens at each multiple of `interval`, never for 0, is due since `saved_count`."""
    return interval > 0 and count // interval > saved_count // interval


def is_save_due(training: Training) -> bool:
    """Whether a durable snapshot is due: at its time, or at once where a killed generation could not write it."""
    saved, settings = training.saved or Position(), training.settings
    return is_due(training.position.epoch, saved.epoch, settings.save_every) or is_due(
        training.position.step, saved.step, settings.save_every_steps
    )


def save(training: Training) -> None:
    """Take a durable snapshot of what is finished."""
    training.save(training)
    training.saved = training.position


def learning_rate(settings: Settings, step: int, num_steps: int) -> float:
    """Return the learning rate of a step: a pure function of its place among the job's steps."""
    if settings.lr_schedule == "constant":
        return settings.lr
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(step / num_steps, 1.0)))


def set_learning_rate(training: Training) -> None:
    """Give the optimizer the learning rate of the step that comes."""
    num_steps = training.settings.epochs * num_steps_per_epoch(training.num_samples, training.global_batch_size)
    for group in training.optimizer.param_groups:
        group["lr"] = learning_rate(training.settings, training.position.step, num_steps)


def finish_epoch(training: Training, meter: "Meter") -> None:
    """Evaluate, and tell of the epoch that has ended."""
    began = time.monotonic()
    evaluation = training.evaluate()
    progress = training.progress
    progress.productive_seconds += time.monotonic() - began
    progress.test_loss, progress.test_accuracy = evaluation.loss, evaluation.accuracy
    progress.num_evaluated_epochs = training.position.epoch
    if training.saved == training.position:
        training.saved = None  # at a stop, before it was evaluated: the job's last snapshot is to tell of that
    log.info(
        "epoch.finished",
        epoch=training.position.epoch,
        step=training.position.step,
        train_loss=progress.epoch_loss_sum / max(1, training.num_samples - progress.num_skipped_samples),
        test_loss=evaluation.loss,
        test_accuracy=evaluation.accuracy,
        num_test_samples=evaluation.num_samples,
        samples_per_second=meter.epoch_rate(),
    )
    progress.epoch_loss_sum, progress.num_skipped_samples = 0.0, 0
    meter.restart()


class Meter:
    """Tells of the progress about once a second."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a new epoch."""
        self._epoch_began = self._told = time.monotonic()
        self._epoch_samples = self._samples = 0

    def epoch_rate(self) -> float:
        """Return samples per second since the epoch, or this generation's part of it, began."""
        return round(self._epoch_samples / max(time.monotonic() - self._epoch_began, 1e-9), 1)

    def tell(self, training: Training, step: Step, loss: float) -> None:
        """Count a step, and tell of it if it is time."""
        self._epoch_samples += step.num_samples
        self._samples += step.num_samples
        elapsed = time.monotonic() - self._told
        if elapsed >= _TELL_SECONDS or training.position.step == 1:
            log.info(
                "train.progress",
                step=training.position.step,
                epoch=training.position.epoch,
                loss=loss,
                samples_per_second=round(self._samples / max(elapsed, 1e-9), 1),
            )
            self._told, self._samples = time.monotonic(), 0
