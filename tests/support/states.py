"""Small whole snapshots, for the tests of what becomes of them."""

import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from elastic_mnist.settings import Settings
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.manifest import Manifest
from elastic_mnist.snapshots.run_config import RunConfig, fingerprint, requested, resolve
from elastic_mnist.snapshots.state import State, pack
from elastic_mnist.snapshots.storage import Storage
from elastic_mnist.training.model import weights_sha256

DATASET = {"name": "mnist", "num_samples": 100, "sha256": "5d" * 32}
RUN_ID = "0123456789ab"
STEPS_PER_EPOCH = 13

DATA_5, MANIFEST_5 = "step-00000005.pt", "step-00000005.json"
DATA_9, MANIFEST_9 = "step-00000009.pt", "step-00000009.json"


def small_state(step: int = 5, *, settings: Settings | None = None, **changes: object) -> State:
    """Return a state with every field, at a step of epochs of 13 steps of 8 samples, the last of 4."""
    settings = settings or Settings(batch_size=8)
    epoch, steps_in_epoch = divmod(step, STEPS_PER_EPOCH)
    contract = run_config(settings)
    state: State = {
        "model": {"weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) + step},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "epoch": epoch,
        "step": step,
        "samples_in_epoch": steps_in_epoch * 8,
        "global_batch_size": contract["global_batch_size"],
        "micro_batch_size": contract["micro_batch_size"],
        "seed": settings.seed,
        "settings": settings.as_plain(),
        "contract": contract,
        "dataset": dict(DATASET),
        "versions": {"torch": str(torch.__version__)},
        "world_size": 1,
        "run_id": RUN_ID,
        "generation": 0,
        "started_at": 1.0,
        "progress": {"loss": 0.5, "num_steps": step},
    }
    return changed(state, **changes)


def changed(state: State, **fields: object) -> State:
    """Return a state with other values in some fields, right or wrong."""
    return cast("State", {**state, **fields})


def run_config(settings: Settings | None = None) -> RunConfig:
    """Return the configuration of a run that starts with one process on a CPU."""
    return resolve(requested(settings or Settings(), DATASET), world_size=1, device_type="cpu")


def manifest_of(state: State, data: bytes, **changes: object) -> Manifest:
    """Return the manifest under which a state is committed."""
    fields: dict[str, Any] = {
        "step": state["step"],
        "epoch": state["epoch"],
        "samples_in_epoch": state["samples_in_epoch"],
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "weights_sha256": weights_sha256(state["model"]),
        "settings_fingerprint": fingerprint(state["contract"]),
        "run_id": state["run_id"],
        "generation": state["generation"],
        "created_at": 1_700_000_000.25,
        "test_accuracy": 0.5,
        **changes,
    }
    return Manifest(**fields)


def commit(storage: Storage, step: int, *, keep_last: int = 100, state: State | None = None) -> Manifest:
    """Save a small state as the durable tier does, and return its manifest."""
    state = state or small_state(step)
    data = pack(state)
    manifest = manifest_of(state, data)
    DurableTier(storage, keep_last=keep_last).save(data, manifest)
    return manifest


def newest_step(storage: Storage) -> int | None:
    """Return the step of the newest valid snapshot, after a check of its bytes."""
    newest = DurableTier(storage).newest_valid()
    if newest is None:
        return None
    assert newest.manifest is not None
    assert newest.data == pack(small_state(newest.manifest.step))
    return newest.manifest.step


STATE_13 = small_state(13)
EVALUATED_13 = small_state(13, progress={"loss": 0.5, "num_steps": 13, "test_accuracy": 0.9})


def manifest_13(state: State) -> Manifest:
    """Return the manifest of one of the states of step 13."""
    return manifest_of(state, pack(state), test_accuracy=state["progress"].get("test_accuracy"))


class Killed(BaseException):
    """Ends the code under test as a kill would: nothing catches it."""


@dataclass
class Fault:
    """What goes wrong at which operation.

    Attributes:
        at: the index of the operation, counted from 0 over those of the kinds in `of`; None: at all of them.
        of: names of operations.
        raises: what is raised there.
        is_done: whether the operation takes effect before it fails.
        num_fired: how often it has happened.
    """

    at: int | None
    raises: BaseException
    of: tuple[str, ...] = ("names", "get", "put", "etag", "put_if_match", "delete", "rename", "create")
    is_done: bool = False
    num_fired: int = 0
    seen: list[str] = field(default_factory=list)


class FaultyStorage(Storage):
    """A storage in which one operation fails, before or after it took effect."""

    def __init__(self, inner: Storage, fault: Fault) -> None:
        super().__init__(inner.location, "--snapshot_path")
        self._inner = inner
        self._fault = fault

    def _run(self, operation: str, *arguments: Any) -> Any:  # noqa: ANN401 - what the operation returns
        fault = self._fault
        call = getattr(self._inner, operation)
        if operation not in fault.of:
            return call(*arguments)
        fault.seen.append(operation)
        if fault.at is not None and fault.at != len(fault.seen) - 1:
            return call(*arguments)
        if fault.is_done:
            with contextlib.suppress(FileNotFoundError):
                call(*arguments)
        fault.num_fired += 1
        raise fault.raises

    def create(self) -> None:
        """Make the place, or fail."""
        self._run("create")

    def names(self) -> list[str]:
        """List the objects, or fail."""
        names: list[str] = self._run("names")
        return names

    def get(self, name: str) -> bytes:
        """Get an object, or fail."""
        data: bytes = self._run("get", name)
        return data

    def put(self, name: str, data: bytes) -> None:
        """Put an object, or fail."""
        self._run("put", name, data)

    def etag(self, name: str) -> str | None:
        """Look at an object, or fail."""
        etag: str | None = self._run("etag", name)
        return etag

    def put_if_match(self, name: str, data: bytes, etag: str | None) -> str:
        """Put an object on a condition, or fail."""
        new_etag: str = self._run("put_if_match", name, data, etag)
        return new_etag

    def delete(self, name: str) -> None:
        """Delete an object, or fail."""
        self._run("delete", name)

    def rename(self, name: str, new_name: str) -> None:
        """Rename an object, or fail."""
        self._run("rename", name, new_name)


class ForgetfulStorage(FaultyStorage):
    """A storage that takes one object without a word, and keeps it damaged or not at all.

    Args:
        inner: what keeps the others.
        forgotten: the name of that object.
        instead: the bytes that it keeps; None for none.
    """

    def __init__(self, inner: Storage, forgotten: str, instead: bytes | None) -> None:
        super().__init__(inner, Fault(at=-1, raises=AssertionError()))
        self._forgotten = forgotten
        self._instead = instead

    def put_if_match(self, name: str, data: bytes, etag: str | None) -> str:
        """Put an object on a condition, or something else in its place."""
        if name != self._forgotten:
            return super().put_if_match(name, data, etag)
        return "" if self._instead is None else super().put_if_match(name, self._instead, etag)
