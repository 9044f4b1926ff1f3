"""Which settings a run's result depends on, and whether a run may continue under the ones it is given.

Invariant: the run's configuration is fixed at its first start and recorded beside its snapshots. The global batch size
and the micro-batch size are resolved then, from the world and the device of that moment.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypedDict, cast

from elastic_mnist.errors import UsageError
from elastic_mnist.settings import Settings

_MICRO_BATCH_SIZES: Final = {"cpu": 64, "cuda": 512}

_SHOWN_CHARACTERS: Final = 20


class _Common(TypedDict):
    """The settings of the scope "run" whose values are used as they are given, and the facts of the data set."""

    batch_size: int
    lr: float
    lr_schedule: str
    seed: int
    precision: str
    gradient_sync: str
    dataset: str
    train_samples: int
    data_sha256: str


class _Optional(TypedDict, total=False):
    epochs: int
    """Of a cosine alone: the schedule ends with the job, so its length is part of it."""


class RequestedConfig(_Common, _Optional):
    """What the settings ask for; a size that was not asked for is None."""

    global_batch_size: int | None
    micro_batch_size: int | None


class RunConfig(_Common, _Optional):
    """What a run is made under."""

    global_batch_size: int
    micro_batch_size: int


def requested(settings: Settings, dataset: Mapping[str, Any]) -> RequestedConfig:
    """Return what the settings ask for; of the data set, its name, true number of samples and digest."""
    config = settings.of_scope("run") | {
        "dataset": dataset["name"],
        "train_samples": dataset["num_samples"],
        "data_sha256": dataset["sha256"],
    }
    if settings.lr_schedule == "cosine":
        config["epochs"] = settings.epochs
    return cast("RequestedConfig", config)


def resolve(config: RequestedConfig, *, world_size: int, device_type: str) -> RunConfig:
    """Return the configuration of a run that starts now: the sizes as numbers."""
    sizes = {
        "global_batch_size": config["global_batch_size"] or config["batch_size"] * world_size,
        "micro_batch_size": config["micro_batch_size"] or _MICRO_BATCH_SIZES[device_type],
    }
    return cast("RunConfig", {**config, **sizes})


@dataclass(frozen=True, kw_only=True)
class StartRequest:
    """What one rank of a generation was started with.

    Attributes:
        settings: its options.
        config: what they ask for, of this data set.
        world_size: number of ranks.
        device_type: of this rank.
    """

    settings: Settings
    config: RequestedConfig
    world_size: int
    device_type: str

    def new_config(self) -> RunConfig:
        """Return the configuration of a run that begins now."""
        return resolve(self.config, world_size=self.world_size, device_type=self.device_type)

    @property
    def must_match(self) -> dict[str, Any]:
        """What all ranks must be started with alike: it decides on the result or on the collectives."""
        return {**self.config, **self.settings.of_scope("world"), "device": self.device_type}


def agree(recorded: RunConfig, request: StartRequest, *, where: str) -> RunConfig:
    """Return the configuration to continue under; raises `UsageError` for a change that was not accepted."""
    changed = differences(recorded, request.config)
    if not changed:
        return recorded
    if not request.settings.accept_changes:
        raise UsageError(
            f"{where} was made under other settings: {'; '.join(changed)}; choose another --snapshot_path, "
            f"or go on under the new ones with --accept_changes"
        )
    return accept(recorded, request.config, world_size=request.world_size)


def differences(recorded: RunConfig, config: RequestedConfig) -> list[str]:
    """Return what a request changes of a recorded configuration, one text a field.

    A size that was not asked for is the recorded one. A global batch size that was asked for makes the
    batch size per process moot.
    """
    before, after = cast("dict[str, Any]", recorded), cast("dict[str, Any]", config)
    changed = []
    for name in sorted({*before, *after}):
        if name == "batch_size" and after["global_batch_size"] is not None:
            continue
        if name in ("global_batch_size", "micro_batch_size") and after[name] is None:
            continue
        if before.get(name) != after.get(name):
            changed.append(f"{name} was {_short(before.get(name))} and is now {_short(after.get(name))}")
    return changed


def accept(recorded: RunConfig, config: RequestedConfig, *, world_size: int) -> RunConfig:
    """Return the recorded configuration with all that a request changes of it."""
    accepted = {name: recorded.get(name) if value is None else value for name, value in config.items()}
    if config["global_batch_size"] is None and recorded["batch_size"] != config["batch_size"]:
        accepted["global_batch_size"] = config["batch_size"] * world_size
    return cast("RunConfig", accepted)


def fingerprint(config: RunConfig) -> str:
    """Return the SHA-256 of a configuration, in hex."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:12]}..."  # a digest's first digits tell enough
