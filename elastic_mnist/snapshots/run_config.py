"""Which settings a job's result hangs on, and whether a job may go on under the ones it is given.

Invariant: the contract is fixed at the job's first start and recorded beside its snapshots. The global
batch size and the micro-batch size are resolved then, from the world and the device of that moment.
"""

import hashlib
import json
from typing import Any, Final

from elastic_mnist.settings import Settings

RunConfig = dict[str, Any]

_MICRO_BATCH_SIZES: Final = {"cpu": 64, "cuda": 512}


def asked(settings: Settings, dataset: dict[str, Any]) -> RunConfig:
    """Return what the settings ask for; the sizes still as they were asked, None where they were not."""
    contract: RunConfig = {
        "batch_size": settings.batch_size,
        "global_batch_size": settings.global_batch_size,
        "micro_batch_size": settings.micro_batch_size,
        "lr": settings.lr,
        "lr_schedule": settings.lr_schedule,
        "seed": settings.seed,
        "precision": settings.precision,
        "gradient_sync": settings.gradient_sync,
        "dataset": dataset["name"],
        "train_samples": dataset["num_samples"],
        "data_sha256": dataset["sha256"],
    }
    if settings.lr_schedule == "cosine":  # the schedule ends with the job, so its length is part of it
        contract["epochs"] = settings.epochs
    return contract


def in_step(settings: Settings, device_type: str) -> dict[str, Any]:
    """Return what all nodes must be started with alike, beside the contract: it decides on the collectives."""
    return {
        "epochs": settings.epochs,
        "test_samples": settings.test_samples,
        "device": device_type,
        "on_nonfinite": settings.on_nonfinite,
    }


def resolve(contract: RunConfig, *, world_size: int, device_type: str) -> RunConfig:
    """Return the contract of a job that starts now: the sizes as numbers."""
    return {
        **contract,
        "global_batch_size": contract["global_batch_size"] or contract["batch_size"] * world_size,
        "micro_batch_size": contract["micro_batch_size"] or _MICRO_BATCH_SIZES[device_type],
    }


def differences(recorded: RunConfig, wanted: RunConfig) -> list[str]:
    """Return what `wanted`, as asked, changes of a recorded contract, one text a field.

    A size that was not asked for is the recorded one. A global batch size that was asked for makes the
    batch size per process moot.
    """
    changed = []
    for name in sorted({*recorded, *wanted}):
        if name == "batch_size" and wanted["global_batch_size"] is not None:
            continue
        if name in ("global_batch_size", "micro_batch_size") and wanted[name] is None:
            continue
        if recorded.get(name) != wanted.get(name):
            changed.append(f"{name} was {_short(recorded.get(name))} and is now {_short(wanted.get(name))}")
    return changed


def accept(recorded: RunConfig, wanted: RunConfig, *, world_size: int) -> RunConfig:
    """Return the recorded contract with all that `wanted` changes of it."""
    contract = {name: recorded.get(name) if value is None else value for name, value in wanted.items()}
    if wanted["global_batch_size"] is None and recorded["batch_size"] != wanted["batch_size"]:
        contract["global_batch_size"] = wanted["batch_size"] * world_size
    return contract


def fingerprint(contract: RunConfig) -> str:
    """Digest a contract."""
    return hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"{text[:12]}..."  # noqa: PLR2004 - a digest's first digits tell enough
