"""The command: from the options to the verdict."""

import json
import math
import random
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from elastic_mnist.chaos import checkers, history, injector, report
from elastic_mnist.chaos.history import Terms
from elastic_mnist.chaos.injector import JobPlan
from elastic_mnist.chaos.plan import KINDS, Fault, Shape, generate
from elastic_mnist.errors import EXIT_USAGE, UsageError
from elastic_mnist.settings import Settings, local_path
from elastic_mnist.settings import parse as parse_training

_STATUS: Final = {"valid": 0, "invalid": 1, "unknown": 3}

SMALL_JOB: Final = (
    *("--train_samples=4000", "--test_samples=300", "--epochs=2"),
    *("--global_batch_size=64", "--micro_batch_size=32"),
)
"""The training where none is asked for: 126 steps on real MNIST."""

_DEFAULTS: Final = ("--hang_timeout=10", "--save_every_steps=10")
_REFUSAL: Final = "elastic_mnist: error: "
_OURS: Final = ("snapshot_path", "event_log", "sample_log")
_ENDS: Final = (signal.SIGTERM, signal.SIGHUP)
_SPARE_SECONDS: Final = 60.0
_STILL_SECONDS: Final = 900.0
"""Of the undisturbed job nobody knows how long it takes, but that it makes a step now and then."""
_SLOWER: Final = 3.0
"""A job of several nodes on one machine shares its cores, and makes some steps again."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for; the numbers are checked here.

    Attributes:
        seed: of the plan.
        num_faults: in it.
        kinds: of them; keys of `KINDS`.
        num_processes: workers of a node.
        max_nodes: nodes at most; the job starts with one.
        patience: a factor of all bounds of time.
        directory: where the jobs run; None for a temporary one, which is kept where the verdict is not `valid`.
        json_path: where the report goes for machines; None for nowhere.
        training: options of the training.
    """

    seed: int
    num_faults: int = 5
    kinds: tuple[str, ...] = tuple(KINDS)
    num_processes: int = 2
    max_nodes: int = 2
    patience: float = 1.0
    directory: Path | None = None
    json_path: Path | None = None
    training: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check each value against its limits."""
        for kind in self.kinds:
            if kind not in KINDS:
                raise UsageError(f"--kinds {kind}: no such kind; choose from {','.join(KINDS)}")
        for name, value in (("faults", self.num_faults), ("nproc", self.num_processes), ("nodes", self.max_nodes)):
            if value < 1:
                raise UsageError(f"--{name} {value}: must be at least 1")
        if self.json_path is not None and not self.json_path.parent.is_dir():
            raise UsageError(f"--json {self.json_path}: its directory is missing; make it, or name another file")
        if not 0 < self.patience < float("inf"):
            raise UsageError(f"--patience {self.patience}: must be a finite number above 0")

    @property
    def command(self) -> str:
        """The command that does the same again."""
        options: list[object] = ["--seed", self.seed, "--faults", self.num_faults, "--kinds", ",".join(self.kinds)]
        options += ["--nproc", self.num_processes, "--nodes", self.max_nodes]
        options += ["--patience", f"{self.patience:g}"] if self.patience != 1 else []
        return shlex.join(map(str, ["elastic-mnist", "chaos", *options, "--", *(self.training or SMALL_JOB)]))


def a_seed() -> int:
    """Return a seed for a run that names none."""
    return random.SystemRandom().randrange(10**6)


def run(request: Request) -> int:
    """Run both jobs, print the verdicts, return the exit status."""
    options, settings = training_options(request)
    faults = generate(request.seed, request.kinds, request.num_faults, shape_of(request, settings))
    _say(f"seed {request.seed}, {len(faults)} faults; to do the same again:", request.command, "")
    _say(*report.plan_lines(faults), "")
    directory = _make_directory(request.directory)
    for number in _ENDS:  # as Ctrl-C does: no job outlives this process
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _end)
    is_temporary = request.directory is None
    try:
        status = _run_in(directory, request, options, settings, faults)
    except UsageError:
        if is_temporary:
            shutil.rmtree(directory)
        raise
    if is_temporary and status == 0:
        shutil.rmtree(directory)
    else:
        _say(f"logs and snapshots: {directory}")
    return status


def training_options(request: Request) -> tuple[list[str], Settings]:
    """Return the options of both jobs and what they mean.

    Raises:
        UsageError: they cannot work, or are of those that the jobs need for themselves.
    """
    rollback = ["--on_nonfinite=rollback"] if "nan" in request.kinds else []
    options = [*_DEFAULTS, *rollback, *(request.training or SMALL_JOB)]
    asked = parse_training(options)
    for name in _OURS:
        if getattr(asked, name) != Settings.__dataclass_fields__[name].default:
            raise UsageError(f"--{name} {getattr(asked, name)}: both jobs need one of their own; leave it out")
    if asked.gradient_sync != "exact" and {"grow", "shrink"} & {*request.kinds}:
        raise UsageError(
            f"--gradient_sync {asked.gradient_sync}: has other bits at another world size; use exact, or --kinds "
            f"without grow and shrink"
        )
    batch_size = asked.global_batch_size or asked.batch_size * request.num_processes
    options += [f"--global_batch_size={batch_size}", f"--data_dir={asked.data_dir.absolute()}", "--sample_log=ledger"]
    if asked.resume_from is not None and local_path(asked.resume_from) is not None:
        options.append(f"--resume_from={Path(asked.resume_from).expanduser().absolute()}")
    return options, parse_training(options)


def shape_of(request: Request, settings: Settings) -> Shape:
    """Return what a plan must know of the job."""
    from elastic_mnist.data import idx, synthetic  # noqa: PLC0415 - torch is not needed to refuse an option
    from elastic_mnist.training.sampler import num_steps_per_epoch  # noqa: PLC0415 - the same

    known = idx.KNOWN_SETS.get(settings.dataset)
    num_samples = settings.train_samples or (known.train_labels.shape[0] if known else synthetic.NUM_TRAIN)
    assert settings.global_batch_size is not None
    per_epoch = num_steps_per_epoch(num_samples, settings.global_batch_size)
    num_steps = settings.epochs * per_epoch
    intervals = [settings.save_every_steps, settings.save_every * per_epoch]
    return Shape(
        num_steps=num_steps,
        # When the second snapshot is due the first one is written, unless the disk is very slow.
        first_damage_step=2 * min((interval for interval in intervals if interval), default=num_steps),
        num_processes=request.num_processes,
        max_nodes=request.max_nodes,
    )


def _run_in(
    directory: Path, request: Request, options: Sequence[str], settings: Settings, faults: tuple[Fault, ...]
) -> int:
    began = time.monotonic()

    def tell(what: str) -> None:
        _say(f"{time.monotonic() - began:6.1f} s  {what}")

    def job(name: str, faults: Sequence[Fault], seconds: float) -> JobPlan:
        return JobPlan(
            directory=directory / name,
            options=options,
            num_processes=request.num_processes,
            max_nodes=request.max_nodes,
            faults=tuple(faults),
            seconds=seconds,
            still_seconds=request.patience * _STILL_SECONDS + settings.hang_timeout,
        )

    tell("the job, undisturbed")
    poisoned = [fault for fault in faults if KINDS[fault.kind].is_of_data]
    injector.run(job("calm", poisoned, math.inf), tell)
    failure = _failure(directory / "calm")
    if failure is not None:
        tell(f"unknown: the undisturbed job did not finish ({failure}), so there is nothing to compare with")
        return _STATUS["unknown"]
    calm_seconds = time.monotonic() - began
    terms = Terms(
        memory_every=settings.memory_snapshot_every,
        hang_timeout=settings.hang_timeout,
        patience=request.patience,
    )
    recovery_seconds = sum(terms.recover_seconds(fault) for fault in faults)
    seconds = recovery_seconds + request.patience * (_SLOWER * calm_seconds + _SPARE_SECONDS)
    terms = replace(terms, job_seconds=seconds)
    tell("the same job under faults")
    injector.run(job("disturbed", faults, seconds), tell)
    tell("over; what do the logs and files say?")
    return _judge(history.read(directory / "calm", directory / "disturbed", faults, terms), request)


def _judge(told: history.History, request: Request) -> int:
    outcomes = [checkers.judge_fault(told, index) for index in range(len(told.faults))]
    findings = [check(told) for check in checkers.CHECKERS]
    verdict = checkers.overall([*(outcome.verdict for outcome in outcomes), *(found.verdict for found in findings)])
    _say("", *report.outcome_lines(outcomes), "", *report.finding_lines(findings), "", verdict)
    if request.json_path is not None:
        plain: dict[str, Any] = report.plain(
            outcomes, findings, verdict=verdict, seed=request.seed, command=request.command
        )
        request.json_path.write_text(json.dumps(plain, indent=1) + "\n")
    return _STATUS[verdict]


def _make_directory(asked: Path | None) -> Path:
    if asked is None:
        return Path(tempfile.mkdtemp(prefix="elastic-mnist-chaos-")).resolve()
    try:
        asked.mkdir(parents=True, exist_ok=True)
        if any(asked.iterdir()):
            raise UsageError(f"--directory {asked}: is not empty; name another, or remove what is there")
    except OSError as error:
        raise UsageError(f"--directory {asked}: {error.strerror}; name another") from None
    return asked.resolve()


def _failure(directory: Path) -> str | None:
    """Return why the undisturbed job did not come to its end; raises `UsageError` where it was refused."""
    notes = history.read_notes(directory)
    status = [note["status"] for note in notes if note["note"] == "agent.ended"][-1]
    if status == EXIT_USAGE:
        output = max(directory.glob("output-*")).read_text(errors="replace")
        reasons = [line for line in output.splitlines() if line.startswith(_REFUSAL)]
        raise UsageError("".join([*output.splitlines(), *reasons][-1:]).removeprefix(_REFUSAL))
    overdue = [str(note["reason"]) for note in notes if note["note"] == "job.overdue"]
    return None if status == 0 else "".join(overdue) or f"status {status}"


def _end(number: int, _frame: object) -> NoReturn:
    for each in _ENDS:  # a second one must not end the end of the job
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)  # noqa: T201 - printing is what a tool does
