"""Every option of the trainer, once.

One frozen dataclass holds the options; the command line, its help and its checks are made from the
fields. Nothing here imports torch: a wrong option is told within a fraction of a second, by the
torchrun agent as well as by a worker.
"""

import argparse
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from elastic_mnist.errors import SettingsError

DATASETS: Final = ("mnist", "fashion_mnist", "synthetic")

Scope = Literal["run", "world", "node"]
"""Where an option must have one value: all through a run, at all ranks of a generation, or nowhere but at its node."""


def _option(
    default: Any,  # noqa: ANN401 - an option's default may be of any of the options' types
    text: str,
    *,
    group: str,
    scope: Scope,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    shown_default: str | None = None,
) -> Any:  # noqa: ANN401 - what `dataclasses.field` returns is typed by the annotation beside it
    metadata = {
        "text": text,
        "group": group,
        "scope": scope,
        "at_least": at_least,
        "at_most": at_most,
        "above": above,
        "choices": choices,
        "shown_default": shown_default,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one job, checked. Raises `SettingsError` for a value that cannot work."""

    epochs: int = _option(5, "passes over the training set", group="training", scope="world", at_least=1)
    batch_size: int = _option(
        512,
        "samples per process and step at the job's first start; times the world size of that moment it "
        "becomes the global batch size, which then stays fixed when the world changes",
        group="training",
        scope="run",
        at_least=1,
    )
    global_batch_size: int | None = _option(
        None,
        "samples per step over all processes; overrides --batch_size",
        group="training",
        scope="run",
        at_least=1,
        shown_default="--batch_size x world size",
    )
    micro_batch_size: int | None = _option(
        None,
        "samples in the unit of gradient work; fixed for the job's life",
        group="training",
        scope="run",
        at_least=1,
        at_most=1_000_000,
        shown_default="64 on a CPU, 512 on CUDA",
    )
    lr: float = _option(1e-3, "Adam's learning rate", group="training", scope="run", above=0)
    lr_schedule: str = _option(
        "constant",
        "learning rate over the steps; cosine falls to zero at the end of --epochs",
        group="training",
        scope="run",
        choices=("constant", "cosine"),
    )
    seed: int = _option(
        0,
        "seeds the initial weights, the order of samples and dropout",
        group="training",
        scope="run",
        at_least=0,
        at_most=2**62,
    )

    save_every: int = _option(
        1,
        "epochs between durable snapshots; 0: only at the end of the job",
        group="snapshots",
        scope="node",
        at_least=0,
    )
    save_every_steps: int = _option(
        0, "steps between durable snapshots, beside --save_every; 0: off", group="snapshots", scope="node", at_least=0
    )
    keep_last: int = _option(3, "durable snapshots kept", group="snapshots", scope="node", at_least=1)
    max_snapshot_failures: int = _option(
        3,
        "durable snapshots in a row that may fail, each after several tries, before the training stops; the last "
        "one of the job must not fail",
        group="snapshots",
        scope="node",
        at_least=0,
    )
    memory_snapshot_every: int = _option(
        1,
        "steps between copies of the state into memory that outlives a worker; 0: off",
        group="snapshots",
        scope="node",
        at_least=0,
    )
    snapshot_path: str = _option(
        "snapshots",
        "directory or fsspec URL (s3://..., memory://...) of the durable snapshots; the job resumes from the newest "
        "valid one there",
        group="snapshots",
        scope="node",
    )
    resume_from: str | None = _option(
        None,
        "start from this snapshot file, own or another program's, or from the newest in this directory or URL, where "
        "--snapshot_path holds none",
        group="snapshots",
        scope="node",
        shown_default="a fresh start",
    )
    accept_changes: bool = _option(
        False,
        "go on although settings that change the result differ from those the snapshots were made under",
        group="snapshots",
        scope="node",
    )

    data_dir: Path = _option(
        Path("data"), "directory of the data set; fetched into it where missing", group="data", scope="node"
    )
    dataset: str = _option(
        "mnist",
        "synthetic draws digits from the seed and needs no download",
        group="data",
        scope="run",
        choices=DATASETS,
    )
    train_samples: int | None = _option(
        None, "use the first N training samples", group="data", scope="run", at_least=1, shown_default="all"
    )
    test_samples: int | None = _option(
        None, "use the first N test samples", group="data", scope="world", at_least=1, shown_default="all"
    )

    device: str = _option(
        "auto", "auto takes CUDA where there is one", group="compute", scope="node", choices=("auto", "cpu", "cuda")
    )
    precision: str = _option(
        "fp32",
        "of the forward and backward pass; weights stay fp32",
        group="compute",
        scope="run",
        choices=("fp32", "bf16"),
    )
    threads: int | None = _option(
        None,
        "micro-batches computed at once by a process on a CPU; changes no bit of the result under exact",
        group="compute",
        scope="node",
        at_least=1,
        at_most=1024,
        shown_default="cores / processes on the node",
    )
    gradient_sync: str = _option(
        "exact",
        "exact: the same bits at any world size; allreduce: DDP's own floating-point sum",
        group="compute",
        scope="run",
        choices=("exact", "allreduce"),
    )
    hang_timeout: float = _option(
        60.0,
        "seconds without progress, or without a sign of life, after which a worker counts as hung and is replaced",
        group="compute",
        scope="node",
        at_least=1,
        at_most=86_400,
    )

    on_nonfinite: str = _option(
        "stop",
        "what a loss or gradient that is not finite does: stop the job, or roll back to the state before the step and "
        "go on without its samples, a bounded number of times",
        group="compute",
        scope="world",
        choices=("stop", "rollback"),
    )

    event_log: Path | None = _option(
        None,
        "file of the events, one JSON object a line, appended across restarts",
        group="logging",
        scope="node",
        shown_default="events.jsonl in a local --snapshot_path, else in the working directory",
    )
    sample_log: Path | None = _option(
        None,
        "directory in which each rank notes the samples it uses, for `elastic-mnist audit`",
        group="logging",
        scope="node",
        shown_default="off",
    )
    log_format: str = _option(
        "auto",
        "of standard output; auto: console on a terminal, else json",
        group="logging",
        scope="node",
        choices=("auto", "console", "json"),
    )

    def __post_init__(self) -> None:
        """Check each value against its limits."""
        for option in fields(self):
            _check(option, getattr(self, option.name))
        for name in ("snapshot_path", "resume_from"):
            try:
                local_path(getattr(self, name) or "")
            except SettingsError as error:
                raise SettingsError(f"--{name} {error}") from None

    @property
    def event_log_path(self) -> Path:
        """The absolute path of the event log."""
        if self.event_log is not None:
            return self.event_log.absolute()
        return ((local_path(self.snapshot_path) or Path()) / "events.jsonl").absolute()

    def of_scope(self, *scopes: Scope) -> dict[str, Any]:
        """Return the settings of some scopes, as JSON-ready values."""
        chosen = {option.name for option in fields(self) if option.metadata["scope"] in scopes}
        return {key: value for key, value in self.as_plain().items() if key in chosen}

    def as_plain(self) -> dict[str, Any]:
        """Return the settings as JSON-ready values."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


def disagreements(here: Mapping[str, Any], there: Mapping[str, Any], where: str) -> str:
    """Return in which of the settings `here` those `there` differ, for people; empty where in none."""
    return "; ".join(
        f"{name} is {value} here and {there.get(name)} {where}"
        for name, value in here.items()
        if value != there.get(name)
    )


def local_path(location: str) -> Path | None:
    """Return the local path that `location` names, None where it is another store's URL.

    Raises:
        SettingsError: it is a chain of fsspec's file systems: a cache or an archive before a store, which hides what
            the store has.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*::", location):
        raise SettingsError(f"{location}: chained file systems (::) are not supported; name the store itself")
    location = re.sub(r"^(file|local)://", "", location)
    return None if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", location) else Path(location).expanduser()


def parse(arguments: Sequence[str]) -> Settings:
    """Read the command line, underscores or hyphens in the names.

    Raises:
        SettingsError: an option is unknown or its value cannot work.
        SystemExit: `--help` was asked for and printed.
    """
    namespace = _parser().parse_args([_with_underscores(argument) for argument in arguments])
    return Settings(**vars(namespace))


class _Parser(argparse.ArgumentParser):
    """A parser that raises one line, where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        match = re.match(r"unrecognized arguments: (\S+)", message)
        if match:
            name = match[1].partition("=")[0]
            known = [f"--{option.name}" for option in fields(Settings)]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "--help lists the options"
            raise SettingsError(f"{name}: no such option; {hint}")
        raise SettingsError(message.removeprefix("argument "))


def _with_underscores(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _value_type(option: Field[Any]) -> type:
    """The plain type behind the annotation: `int` for `int | None`."""
    annotation = typing.get_type_hints(Settings)[option.name]
    if isinstance(annotation, types.UnionType):
        annotation = next(member for member in annotation.__args__ if member is not type(None))
    return typing.cast("type", annotation)


def _reader(option: Field[Any]) -> typing.Callable[[str], Any]:
    kind = _value_type(option)

    def read(text: str) -> Any:  # noqa: ANN401 - one of the options' types
        if not text and kind not in (int, float):  # Path("") would be the working directory
            raise argparse.ArgumentTypeError("must not be empty")
        try:
            return kind(text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}.get(kind, kind.__name__)
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None

    return read


def _parser() -> _Parser:
    parser = _Parser(
        prog="torchrun [...] -m elastic_mnist",
        description="Train a ConvNet on MNIST. Kill it, stop it, resize it: it goes on where it was.",
        epilog="Exit status: 0 finished, or nothing left to do; 2 a usage, settings, data or store error; "
        "143 stopped by SIGTERM, SIGINT, SIGHUP or SIGUSR1, with what was finished saved; else a failure.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
    )
    groups: dict[str, Any] = {}
    for option in fields(Settings):
        group = option.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        text, flag = option.metadata["text"], f"--{option.name}"
        if _value_type(option) is bool:
            groups[group].add_argument(flag, action="store_true", help=text)
            continue
        assert option.default is not MISSING
        default = option.metadata["shown_default"] or option.default
        groups[group].add_argument(
            flag,
            type=_reader(option),
            choices=option.metadata["choices"],
            default=option.default,
            metavar=None if option.metadata["choices"] else _value_type(option).__name__.upper(),
            help=f"{text} (default: {default})".replace("%", "%%"),
        )
    return parser


def _check(option: Field[Any], value: Any) -> None:  # noqa: ANN401 - one of the options' types
    if value is None:
        return
    name, limits = f"--{option.name} {value}", option.metadata
    if limits["choices"] and value not in limits["choices"]:
        raise SettingsError(f"{name}: must be one of {', '.join(limits['choices'])}")
    # Written so that a NaN fails too.
    if limits["at_least"] is not None and not value >= limits["at_least"]:
        raise SettingsError(f"{name}: must be at least {limits['at_least']}")
    if limits["at_most"] is not None and not value <= limits["at_most"]:
        raise SettingsError(f"{name}: must be at most {limits['at_most']}")
    if limits["above"] is not None and not limits["above"] < value < float("inf"):
        raise SettingsError(f"{name}: must be a finite number above {limits['above']}")
    if value == "":
        raise SettingsError(f"{name}: must not be empty")
