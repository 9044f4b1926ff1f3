"""The training loop.

Invariant: `position` says what is finished, and the state that belongs to it (weights, moments, progress) changes
together with it, between two steps. A snapshot is taken only there.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol

import torch
from torch import nn

from elastic_mnist.errors import Stopped, TrainingError
from elastic_mnist.settings import Settings
from elastic_mnist.telemetry.events import log
from elastic_mnist.telemetry.sample_log import SampleLog
from elastic_mnist.training.evaluation import Evaluation
from elastic_mnist.training.gradients import GradientSync, StepResult
from elastic_mnist.training.meter import Meter
from elastic_mnist.training.sampler import Position, Step, StepSampler, num_steps_per_epoch

MAX_SKIPPED_STEPS: Final = 10
"""A few batches may be bad by chance; more than that is a job that has gone wrong."""

STOP_SECONDS: Final = 20.0
"""Schedulers kill some time after they ask to stop; torchrun after 30 s."""


@dataclass(kw_only=True)
class Progress:
    """What is reported of a job beside its weights; part of every snapshot.

    Attributes:
        epoch_loss_sum: over the samples of the epoch so far.
        num_evaluated_epochs: epochs whose end has been evaluated and logged.
        test_loss, test_accuracy: of the last evaluation.
        num_skipped_steps: whose gradient was not finite, over the whole job.
        num_skipped_samples: of the epoch so far, which have no part in its loss.
        productive_seconds: spent in steps and evaluations that count; not in lost ones.
    """

    epoch_loss_sum: float = 0.0
    num_evaluated_epochs: int = 0
    test_loss: float | None = None
    test_accuracy: float | None = None
    num_skipped_steps: int = 0
    num_skipped_samples: int = 0
    productive_seconds: float = 0.0


class Checkpointer(Protocol):
    """Saves the state of a trainer, as it stands between two steps."""

    def save_to_memory(self, trainer: "Trainer") -> None:
        """Copy the state to the node's memory tier, if this step is due there."""

    def save(self, trainer: "Trainer") -> None:
        """Begin to write a durable snapshot at rank 0; do nothing at the others."""

    def record_step(self, step: int) -> None:
        """Record that `step` steps are finished; raises an error of the durable tier that must stop the training."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the durable snapshots are written, some seconds at most or as long as it takes.

        Raises:
            TrainingError: the newest could not be written.
        """


@dataclass(kw_only=True)
class Trainer:
    """Trains one rank's share of a job.

    Attributes:
        num_samples: of the training set.
        model: the network; what else computes with it shares its parameters.
        gradient: fills `.grad` with a step's mean gradient, the same at all ranks.
        evaluate: evaluates the model on the test set; collective.
        sample_log: records which samples this rank uses, if that is wanted.
        position: what is finished.
        progress: what is reported of it.
        saved: what is finished in the newest durable snapshot; None before the first.
    """

    settings: Settings
    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    gradient: GradientSync
    evaluate: Callable[[], Evaluation]
    checkpointer: Checkpointer
    sample_log: SampleLog | None = None
    position: Position = field(default_factory=Position)
    progress: Progress = field(default_factory=Progress)
    saved: Position | None = None
    _meter: Meter = field(default_factory=Meter, init=False)

    def run(self) -> None:
        """Train from `position` to the end of the last epoch. Every rank must call this.

        Raises:
            Stopped: a rank was asked to stop; what is finished is saved.
            TrainingError: a gradient was not finite, or too many of them.
            PeerLost: another rank is gone.
        """
        self._meter.restart()
        while True:
            if self.progress.num_evaluated_epochs < self.position.epoch:
                self.finish_epoch()
                self.checkpointer.save_to_memory(self)
                if self.is_save_due():
                    self.save()
            if self.position.epoch >= self.settings.epochs:
                break
            assert self.position.samples_in_epoch < self.num_samples  # or no step would ever come
            for step in self.remaining_steps():
                result = self.step(step)
                if result.num_stopping:
                    self.stop()
                is_inside_epoch = self.position.samples_in_epoch > 0  # at its end, the evaluation comes first
                if is_inside_epoch and self.is_save_due():
                    self.save()
        if self.saved != self.position:
            self.save()
        self.checkpointer.flush()

    def step(self, step: Step) -> StepResult:
        """Make one step; a killed process loses nothing of it once this returns."""
        began = time.monotonic()
        self.begin_step()
        if self.sample_log is not None:
            self.sample_log.append(
                epoch=step.epoch,
                step=self.position.step,
                micro_batches={micro_batch.index: micro_batch.samples.tolist() for micro_batch in step.micro_batches},
            )
        result = self.gradient(step, step_index=self.position.step)
        if result.num_bad:
            self.skip(step, result)
        else:
            self.optimizer.step()
            self.progress.epoch_loss_sum += result.loss_sum
        self.position = self.position.after(step, self.num_samples)
        self.progress.productive_seconds += time.monotonic() - began
        self.checkpointer.save_to_memory(self)
        self.checkpointer.record_step(self.position.step)
        self._meter.count(self.position, num_samples=step.num_samples, loss=result.loss_sum / step.num_samples)
        return result

    def begin_step(self) -> None:
        """Set the learning rate of the step that comes. Fault injectors replace this and `finish_epoch`."""
        num_steps = self.settings.epochs * num_steps_per_epoch(self.num_samples, self.global_batch_size)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.position.step, num_steps)

    def skip(self, step: Step, result: StepResult) -> None:
        """Continue without a step whose gradient is not finite, if the options allow it; else raise `TrainingError`.

        Nothing has to be undone: the gradient was found bad before it was used.
        """
        progress, index = self.progress, self.position.step
        whose = f" of {result.num_bad} micro-batches" if self.settings.gradient_sync == "exact" else ""
        bad = f"step {index}: the gradient{whose} is not finite or too large"
        if self.settings.on_nonfinite == "stop":
            raise TrainingError(
                f"{bad}; nothing of it was saved. A smaller --lr may help, or --on_nonfinite rollback to go on "
                f"without it"
            )
        if progress.num_skipped_steps >= MAX_SKIPPED_STEPS:
            raise TrainingError(f"{bad}, and {MAX_SKIPPED_STEPS} steps were skipped before; nothing of it was saved")
        progress.num_skipped_steps += 1
        progress.num_skipped_samples += step.num_samples
        if self.rank == 0:  # the others know it too
            log.warning(
                "step.skipped",
                step=index,
                epoch=self.position.epoch,
                num_bad=result.num_bad,
                num_skipped_steps=progress.num_skipped_steps,
            )

    def finish_epoch(self) -> None:
        """Evaluate, and log the epoch that has ended."""
        began = time.monotonic()
        evaluation = self.evaluate()
        progress = self.progress
        progress.productive_seconds += time.monotonic() - began
        progress.test_loss, progress.test_accuracy = evaluation.loss, evaluation.accuracy
        progress.num_evaluated_epochs = self.position.epoch
        if self.saved == self.position:
            self.saved = None  # at a stop, before it was evaluated: the job's last snapshot has the accuracy in it
        log.info(
            "epoch.finished",
            epoch=self.position.epoch,
            step=self.position.step,
            train_loss=progress.epoch_loss_sum / max(1, self.num_samples - progress.num_skipped_samples),
            test_loss=evaluation.loss,
            test_accuracy=evaluation.accuracy,
            num_test_samples=evaluation.num_samples,
            samples_per_second=self._meter.epoch_rate(),
        )
        progress.epoch_loss_sum, progress.num_skipped_samples = 0.0, 0
        self._meter.restart()

    def save(self) -> None:
        """Begin a durable snapshot of what is finished."""
        self.checkpointer.save(self)
        self.saved = self.position

    def is_save_due(self) -> bool:
        """Whether a durable snapshot is due: at its time, or at once where a killed generation could not write it."""
        saved, settings = self.saved or Position(), self.settings
        return is_due(self.position.epoch, saved.epoch, settings.save_every) or is_due(
            self.position.step, saved.step, settings.save_every_steps
        )

    def stop(self) -> NoReturn:
        """Save what is finished, and raise `Stopped`: a rank was asked to stop."""
        if self.saved != self.position:
            self.save()
        self.checkpointer.flush(STOP_SECONDS)
        raise Stopped

    def remaining_steps(self) -> StepSampler:
        """Return the rest of the epoch that the position is in, as this rank sees it."""
        return StepSampler(
            self.num_samples,
            seed=self.settings.seed,
            epoch=self.position.epoch,
            start=self.position.samples_in_epoch,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )


def is_due(count: int, saved_count: int, interval: int) -> bool:
    """Whether something that happens at each multiple of `interval`, never for 0, is due since `saved_count`."""
    return interval > 0 and count // interval > saved_count // interval


def learning_rate(settings: Settings, step: int, num_steps: int) -> float:
    """Return the learning rate of a step: a pure function of its place among the job's steps."""
    if settings.lr_schedule == "constant":
        return settings.lr
    return settings.lr * 0.5 * (1 + math.cos(math.pi * min(step / num_steps, 1.0)))
