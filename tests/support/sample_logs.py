"""Runs with generations and their logs, written by the real sample log from the real sampler, for the audit's tests."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_mnist.telemetry.sample_log import SampleLog
from elastic_mnist.training.sampler import Position, StepSampler

NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SEED = 23, 8, 3, 4
STEPS_PER_EPOCH = 3  # of 8, 8 and 7 samples, each in 3 micro-batches
RUN_ID = "0123456789ab"

Line = dict[str, Any]


@dataclass(frozen=True)
class Generation:
    """One generation: the step at which it began, and how many steps were finished when it ended."""

    world_size: int
    first_step: int
    end_step: int


# A generation dies at step 4 of which 2 were saved; the next ones have other world sizes.
GENERATIONS = (Generation(3, 0, 4), Generation(1, 2, 4), Generation(2, 4, 6))


class LoggedRun:
    """The sample logs and the event log of a run of 2 epochs, in a directory of its own."""

    def __init__(
        self, root: Path, generations: Iterable[Generation] = GENERATIONS, *, is_finished: bool = True
    ) -> None:
        self.directory = root / "ledger"
        self.event_log = root / "events.jsonl"
        self.run_id = RUN_ID
        root.mkdir(exist_ok=True)
        for number, generation in enumerate(generations):
            self.add(number, generation)
        if is_finished:
            self.log("run.finished", generation=number, step=generation.end_step)

    def add(self, number: int, generation: Generation) -> None:
        """Log what one generation's ranks would."""
        self.log(
            "run.started",
            generation=number,
            world_size=generation.world_size,
            step=generation.first_step,
            num_train_samples=NUM_SAMPLES,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=MICRO_BATCH,
        )
        if number > 0 or generation.first_step > 0:
            self.log("run.resumed", generation=number, step=generation.first_step)
        for rank in range(generation.world_size):
            sample_log = SampleLog(self.directory, rank=rank, run_id=self.run_id, generation=number)
            position = Position(
                epoch=generation.first_step // STEPS_PER_EPOCH,
                samples_in_epoch=generation.first_step % STEPS_PER_EPOCH * GLOBAL_BATCH,
                step=generation.first_step,
            )
            while position.step < generation.end_step:
                for step in StepSampler(
                    NUM_SAMPLES,
                    seed=SEED,
                    epoch=position.epoch,
                    start=position.samples_in_epoch,
                    global_batch_size=GLOBAL_BATCH,
                    micro_batch_size=MICRO_BATCH,
                    rank=rank,
                    world_size=generation.world_size,
                ):
                    if position.step < generation.end_step:
                        batches = {batch.index: batch.samples.tolist() for batch in step.micro_batches}
                        sample_log.append(epoch=step.epoch, step=position.step, micro_batches=batches)
                        position = position.after(step, NUM_SAMPLES)

    def log(self, event: str, **keys: Any) -> None:  # noqa: ANN401 - the values of a JSON object
        """Append to the event log."""
        with self.event_log.open("a") as log:
            log.write(json.dumps({"event": event, "run_id": self.run_id, **keys}) + "\n")

    def path(self, rank: int) -> Path:
        """Return where a rank's sample log is."""
        return self.directory / f"rank-{rank:05d}.jsonl"

    def lines(self, rank: int) -> list[Line]:
        """Return a rank's sample log."""
        return [json.loads(line) for line in self.path(rank).read_text().splitlines()]

    def line(self, rank: int, generation: int, step: int) -> Line:
        """Return a rank's first line of a step."""
        return next(at for at in self.lines(rank) if (at["generation"], at["step"]) == (generation, step))

    def change(self, rank: int, generation: int, step: int, change: Callable[[Line], list[Line]]) -> None:
        """Replace a rank's first line of a step by what `change` returns."""
        lines = self.lines(rank)
        index = lines.index(self.line(rank, generation, step))
        lines[index : index + 1] = change(lines[index])
        self.path(rank).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def tear(self, number: int, generation: Generation) -> None:
        """Cut the last line of rank 0 in two, as a lost machine would, before the next generation resumes."""
        self.path(0).write_bytes(self.path(0).read_bytes()[:-25])
        self.add(number, generation)
