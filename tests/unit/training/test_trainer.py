"""The training loop, with everything around it played: what it calls when, and what it leaves alone."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from elastic_mnist.errors import TrainingError
from elastic_mnist.settings import Settings
from elastic_mnist.training.evaluation import Evaluation
from elastic_mnist.training.gradients import StepResult
from elastic_mnist.training.sampler import Position, Step
from elastic_mnist.training.trainer import Progress, Trainer, learning_rate

if TYPE_CHECKING:
    from elastic_mnist.telemetry.sample_log import SampleLog

BOUNDED = settings(max_examples=150, deadline=None)
BATCH = 4
NUM_SAMPLES = 10  # epochs of 3 steps, of 4, 4 and 2 samples

Call = tuple[str, int]


class FakeCheckpointer:
    """Records what the trainer asks for, beside the number of steps finished at that time."""

    def __init__(self, calls: list[Call], step: int) -> None:
        self.calls = calls
        self.step = step
        self.at_record: Callable[[], None] = lambda: None

    def save_to_memory(self, trainer: Trainer) -> None:
        """Be asked for a copy."""
        self.step = trainer.position.step
        self.calls.append(("save_to_memory", self.step))

    def save(self, trainer: Trainer) -> None:
        """Be asked for a durable snapshot."""
        self.step = trainer.position.step
        self.calls.append(("save", self.step))

    def record_step(self, step: int) -> None:
        """Be given a finished step."""
        self.calls.append(("record", step))
        self.at_record()

    def flush(self, timeout: float | None = None) -> None:
        """Be asked to wait until the snapshots are written."""
        self.calls.append(("flush" if timeout is None else f"flush within {timeout:.0f} s", self.step))


class FakeSampleLog:
    """Records the steps whose samples are logged."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls

    def append(self, *, epoch: int, step: int, micro_batches: Mapping[int, Sequence[int]]) -> None:
        """Be given the samples of a step."""
        assert (epoch, list(micro_batches)) == (epoch, [0])
        self.calls.append(("log samples", step))


def trainer_of(
    calls: list[Call],
    options: Settings,
    *,
    position: Position = Position(),  # noqa: B008 - frozen
    num_evaluated_epochs: int | None = None,
    saved: Position | None = None,
    num_samples: int = NUM_SAMPLES,
    bad_step: int | None = None,
    at_gradient: Callable[[torch.optim.Optimizer], None] = lambda _: None,
) -> Trainer:
    """Return a trainer of one weight that records each call beside the number of steps finished at that time.

    Args:
        calls: where they are recorded.
        options: of the job.
        position: what is finished.
        num_evaluated_epochs: epochs that have been evaluated; None: all that are finished.
        saved: what is finished in the newest snapshot.
        num_samples: of the training set.
        bad_step: index of a step whose gradient has a bad micro-batch.
        at_gradient: is given the optimizer in each step.
    """
    weight = torch.nn.Parameter(torch.ones(1))

    def gradient(step: Step, *, step_index: int) -> StepResult:
        calls.append(("gradient", step_index))
        assert [micro_batch.index for micro_batch in step.micro_batches] == [0]
        at_gradient(trainer.optimizer)
        weight.grad = torch.ones(1)
        return StepResult(loss_sum=float(step.num_samples), num_bad=int(step_index == bad_step))

    def evaluate() -> Evaluation:
        calls.append(("evaluate", trainer.position.step))
        return Evaluation(loss=0.5, accuracy=0.75, num_samples=7)

    trainer = Trainer(
        settings=options,
        num_samples=num_samples,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        rank=0,
        world_size=1,
        model=torch.nn.ParameterList([weight]),
        optimizer=torch.optim.Adam([weight], lr=options.lr),
        gradient=gradient,
        evaluate=evaluate,
        checkpointer=FakeCheckpointer(calls, position.step),
        sample_log=cast("SampleLog", FakeSampleLog(calls)),
        position=position,
        progress=Progress(
            num_evaluated_epochs=position.epoch if num_evaluated_epochs is None else num_evaluated_epochs
        ),
        saved=saved,
    )
    return trainer


def checkpointer_of(trainer: Trainer) -> FakeCheckpointer:
    """Return a trainer's checkpointer."""
    assert isinstance(trainer.checkpointer, FakeCheckpointer)
    return trainer.checkpointer


def trained(options: Settings, **changes: Any) -> list[Call]:  # noqa: ANN401 - what `trainer_of` takes
    """Train to the end, and return the calls."""
    calls: list[Call] = []
    with capture_logs():
        trainer_of(calls, options, **changes).run()
    return calls


def of(name: str, calls: list[Call]) -> list[int]:
    """Return the numbers of the calls with a name."""
    return [number for called, number in calls if called == name]


def after(num_steps: int, num_samples: int) -> Position:
    """Return the position after a number of steps."""
    num_steps_per_epoch = math.ceil(num_samples / BATCH)
    epoch, steps = divmod(num_steps, num_steps_per_epoch)
    return Position(epoch=epoch, samples_in_epoch=steps * BATCH, step=num_steps)


@given(
    epochs=st.integers(1, 4),
    num_samples=st.integers(1, 20),
    save_every=st.integers(0, 5),
    save_every_steps=st.integers(0, 8),
    data=st.data(),
)
@BOUNDED
def test_snapshots_are_saved_at_the_steps_asked_for(
    epochs: int, num_samples: int, save_every: int, save_every_steps: int, data: st.DataObject
) -> None:
    """Each step due by either rhythm, and the last one, once and in order, also from any saved step onwards."""
    num_steps_per_epoch = math.ceil(num_samples / BATCH)
    num_steps = epochs * num_steps_per_epoch
    begin = data.draw(st.integers(0, num_steps))
    options = Settings(epochs=epochs, save_every=save_every, save_every_steps=save_every_steps)
    by_epoch = {e * num_steps_per_epoch for e in range(1, epochs + 1) if save_every and e % save_every == 0}
    by_step = {step for step in range(1, num_steps + 1) if save_every_steps and step % save_every_steps == 0}
    wanted = sorted(step for step in by_epoch | by_step | {num_steps} if step > begin)
    calls = trained(
        options, position=after(begin, num_samples), num_samples=num_samples, saved=after(begin, num_samples)
    )
    assert of("save", calls) == wanted


@given(epochs=st.integers(1, 3), num_samples=st.integers(1, 12), save_every_steps=st.integers(1, 4))
@BOUNDED
def test_a_snapshot_at_an_epochs_end_comes_after_its_evaluation(
    epochs: int, num_samples: int, save_every_steps: int
) -> None:
    """Between the step that ends an epoch and a snapshot of it, its evaluation is made."""
    calls = trained(Settings(epochs=epochs, save_every=1, save_every_steps=save_every_steps), num_samples=num_samples)
    num_steps_per_epoch = math.ceil(num_samples / BATCH)
    for epoch in range(1, epochs + 1):
        end = epoch * num_steps_per_epoch
        at = calls.index(("record", end))
        assert calls[at : at + 4] == [("record", end), ("evaluate", end), ("save_to_memory", end), ("save", end)]


def test_the_newest_snapshot_is_known() -> None:
    """`saved` is the position of each snapshot once it is taken."""
    seen: list[Position | None] = []
    trainer = trainer_of([], Settings(epochs=1, save_every=0, save_every_steps=2))
    checkpointer_of(trainer).at_record = lambda: seen.append(trainer.saved)
    with capture_logs():
        trainer.run()
    assert (seen, trainer.saved) == ([None, None, after(2, NUM_SAMPLES)], after(3, NUM_SAMPLES))


def test_a_state_that_is_already_finished_is_saved_once() -> None:
    """From a finished snapshot elsewhere nothing is computed, and one of this place is saved."""
    assert trained(Settings(epochs=2), position=after(6, NUM_SAMPLES)) == [("save", 6), ("flush", 6)]


def test_a_state_that_is_finished_and_saved_is_left_as_it_is() -> None:
    """With its last snapshot at this place there is nothing to compute and nothing to save."""
    end = after(6, NUM_SAMPLES)
    assert trained(Settings(epochs=2), position=end, saved=end) == [("flush", 6)]


def test_the_last_snapshot_is_waited_for() -> None:
    """The training ends once it is written, and waits for no other."""
    calls = trained(Settings(epochs=2, save_every_steps=1))
    assert calls[-2:] == [("save", 6), ("flush", 6)]
    assert of("flush", calls) == [6]


@pytest.mark.parametrize("begin", range(7))
def test_each_state_is_kept_in_memory_before_its_step_counts_as_finished(begin: int) -> None:
    """A step is kept, then finished; whoever is killed in between has lost nothing."""
    calls = trained(Settings(epochs=2), position=after(begin, NUM_SAMPLES))
    for step in range(begin + 1, 7):
        at = calls.index(("record", step))
        assert calls[at - 2 : at] == [("gradient", step - 1), ("save_to_memory", step)]


@given(save_every_steps=st.integers(1, 5), saved=st.integers(0, 11), kept=st.integers(0, 11))
@BOUNDED
def test_a_snapshot_that_a_killed_generation_could_not_write_is_made_up_for(
    save_every_steps: int, saved: int, kept: int
) -> None:
    """Resumed from memory beyond a step where one was due, the first step takes it, and the rhythm goes on."""
    saved = min(saved, kept)
    options = Settings(epochs=4, save_every=0, save_every_steps=save_every_steps)
    calls = trained(options, position=after(kept, NUM_SAMPLES), saved=after(saved, NUM_SAMPLES))
    multiples = {step for step in range(kept + 1, 13) if step % save_every_steps == 0}
    is_overdue = kept // save_every_steps > saved // save_every_steps
    assert of("save", calls) == sorted(multiples | {12} | ({kept + 1} if is_overdue else set()))


def test_samples_are_noted_before_their_gradient() -> None:
    """Each step is noted, computed and finished, in this order and under its own number."""
    calls = [call for call in trained(Settings(epochs=2)) if call[0] in ("log samples", "gradient", "record")]
    wanted = [("log samples", 0), ("gradient", 0), ("record", 1)]
    assert calls == [(name, number + step) for step in range(6) for name, number in wanted]


def test_each_epoch_is_evaluated_once_at_its_end() -> None:
    """Three epochs of three steps are evaluated after steps 3, 6 and 9."""
    assert of("evaluate", trained(Settings(epochs=3))) == [3, 6, 9]


def test_an_epochs_end_that_was_not_evaluated_is_evaluated_first() -> None:
    """Resumed exactly there, the evaluation comes before the next step, and once."""
    calls = trained(Settings(epochs=3), position=after(3, NUM_SAMPLES), num_evaluated_epochs=0)
    assert calls[0] == ("evaluate", 3)
    assert of("evaluate", calls) == [3, 6, 9]


def test_the_jobs_end_that_was_not_evaluated_is_evaluated() -> None:
    """Resumed after the last step, the last evaluation is made and saved, and nothing else."""
    calls = trained(Settings(epochs=1), position=after(3, NUM_SAMPLES), num_evaluated_epochs=0)
    assert calls == [("evaluate", 3), ("save_to_memory", 3), ("save", 3), ("flush", 3)]


def test_an_epochs_end_that_was_evaluated_is_not_evaluated_again() -> None:
    """Resumed exactly there, the next step comes first."""
    calls = trained(Settings(epochs=3), position=after(3, NUM_SAMPLES))
    assert calls[0] == ("log samples", 3)
    assert of("evaluate", calls) == [6, 9]


@pytest.mark.parametrize("begin", range(7))
def test_a_resumed_training_makes_the_rest_of_the_steps(begin: int) -> None:
    """From any step, those that follow are computed, each once and in order."""
    assert of("gradient", trained(Settings(epochs=2), position=after(begin, NUM_SAMPLES))) == list(range(begin, 6))


def test_an_epoch_is_told_with_its_losses() -> None:
    """The mean training loss of that epoch alone, and what the evaluation found."""
    with capture_logs() as events:
        trainer_of([], Settings(epochs=2)).run()
    told = [event for event in events if event["event"] == "epoch.finished"]
    assert [(event["epoch"], event["step"]) for event in told] == [(1, 3), (2, 6)]
    for event in told:
        assert (event["train_loss"], event["test_loss"], event["test_accuracy"]) == (1.0, 0.5, 0.75)
        assert event["num_test_samples"] == 7


@given(step=st.integers(0, 1000), num_steps=st.integers(1, 1000))
@BOUNDED
def test_a_constant_learning_rate_is_the_same_at_every_step(step: int, num_steps: int) -> None:
    """It is --lr."""
    assert learning_rate(Settings(lr=0.3), step, num_steps) == 0.3


def test_a_cosine_begins_at_the_learning_rate_and_ends_at_zero() -> None:
    """The first step has --lr, the middle half of it, and from the end on it is zero."""
    options = Settings(lr=0.3, lr_schedule="cosine")
    assert learning_rate(options, 0, 590) == 0.3
    assert learning_rate(options, 295, 590) == pytest.approx(0.15)
    assert [learning_rate(options, step, 590) for step in (590, 591, 5900)] == [0.0, 0.0, 0.0]


@given(num_steps=st.integers(2, 1000), data=st.data())
@BOUNDED
def test_a_cosine_falls(num_steps: int, data: st.DataObject) -> None:
    """No step has a higher learning rate than the one before."""
    options = Settings(lr=0.3, lr_schedule="cosine")
    step = data.draw(st.integers(0, num_steps - 1))
    assert learning_rate(options, step, num_steps) >= learning_rate(options, step + 1, num_steps) >= 0


@pytest.mark.parametrize("begin", [0, 4])
def test_the_optimizer_has_the_learning_rate_of_each_step(begin: int) -> None:
    """It hangs on the step's place among the 6 of the job alone, also after a resume."""
    rates: list[float] = []
    options = Settings(epochs=2, lr=0.3, lr_schedule="cosine")
    calls: list[Call] = []
    trainer = trainer_of(
        calls,
        options,
        position=after(begin, NUM_SAMPLES),
        at_gradient=lambda optimizer: rates.extend(group["lr"] for group in optimizer.param_groups),
    )
    with capture_logs():
        trainer.run()
    assert rates == [learning_rate(options, step, 6) for step in range(begin, 6)]
    assert all(one > other for one, other in pairwise(rates))


def test_a_bad_gradient_leaves_the_state_untouched() -> None:
    """Position, weights, moments and progress are those after the step before it; the error names the step."""
    calls: list[Call] = []
    trainer = trainer_of(calls, Settings(epochs=2, save_every_steps=1), bad_step=4)
    states: list[object] = []

    def state() -> object:
        (group,) = trainer.optimizer.param_groups
        moments = trainer.optimizer.state_dict()["state"]
        return copy.deepcopy((trainer.position, trainer.progress, group["params"][0].tolist(), str(moments)))

    checkpointer_of(trainer).at_record = lambda: states.append(state())
    with capture_logs(), pytest.raises(TrainingError, match=r"^step 4: the gradient of 1 micro-batches"):
        trainer.run()
    assert len(states) == 4
    assert trainer.position == after(4, NUM_SAMPLES)
    assert state() == states[-1] != states[-2]
    assert calls[-1] == ("gradient", 4)
    assert of("save", calls) == [1, 2, 3, 4]
