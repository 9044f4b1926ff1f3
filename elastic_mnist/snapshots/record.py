"""The record of a run: `run.json` beside its snapshots.

Rank 0 of each generation writes it anew before its first step, with the lease (see `lease`). It names the run, counts
its generations, holds its configuration and says which launch is at work.
"""

import json
import uuid
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from elastic_mnist.errors import RecordError
from elastic_mnist.snapshots.holder import LeaseHolder
from elastic_mnist.snapshots.plain import from_plain
from elastic_mnist.snapshots.run_config import RunConfig
from elastic_mnist.snapshots.storage import Storage

NAME: Final = "run.json"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, as its latest generation has recorded it.

    Attributes:
        run_id: the run's name, for all its generations.
        generation: counts the worker generations of the run, from 0.
        started_at: when its first generation began, in seconds since the epoch of UTC.
        num_lost_steps: steps that were made, lost and made again, over all generations.
        is_finished: whether the end of the run has been logged.
        contract: the settings that its result depends on.
        resumed_from: the snapshot elsewhere that it began from; None for a fresh start.
        holder: the launch that has the lease.
        reached: number of steps that the newest generation whose failure is known had finished then; None where that
            is not known, or the job got further since.
        num_stalled: generations in a row, of the same launch, that failed at the step where the one before had.
        began_at: number of steps that were finished when this generation began; None in the record of an older program.
    """

    run_id: str
    generation: int
    started_at: float
    num_lost_steps: int
    is_finished: bool
    contract: RunConfig
    resumed_from: str | None
    holder: LeaseHolder = LeaseHolder()
    reached: int | None = None
    num_stalled: int = 0
    began_at: int | None = None

    @classmethod
    def new(cls, contract: RunConfig, *, started_at: float, resumed_from: str | None = None) -> "RunRecord":
        """Return the record of a run that begins."""
        return cls(
            run_id=uuid.uuid4().hex[:12],
            generation=0,
            started_at=started_at,
            num_lost_steps=0,
            is_finished=False,
            contract=contract,
            resumed_from=resumed_from,
        )

    def next_generation(self, *, num_lost_steps: int, contract: RunConfig) -> "RunRecord":
        """Return the record as the generation after this one writes it."""
        return replace(
            self,
            generation=self.generation + 1,
            num_lost_steps=self.num_lost_steps + num_lost_steps,
            is_finished=False,
            contract=contract,
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the record as JSON-ready values."""
        return asdict(self)

    def to_json(self) -> bytes:
        """Return the record as the file holds it."""
        return json.dumps(self.to_plain(), indent=1).encode() + b"\n"

    @classmethod
    def from_plain(cls, content: dict[str, Any]) -> "RunRecord":
        """Build a record from what `to_plain` returned; raises `KeyError` or `TypeError` for anything else."""
        return from_plain(cls, content)


def read(storage: Storage) -> RunRecord | None:
    """Return the record at a place, None where there is none."""
    try:
        return RunRecord.from_plain(json.loads(storage.get(NAME)))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(
            f"{storage.path(NAME)}: damaged ({type(error).__name__}); move it away: it is made anew from the snapshots"
        ) from None
