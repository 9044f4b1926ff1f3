"""Listing the snapshots at a place whose storage fails, or changes during the listing."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from states import Fault, FaultyStorage, commit
from structlog.testing import capture_logs

from elastic_mnist.errors import StoreError
from elastic_mnist.snapshots import listing
from elastic_mnist.snapshots.storage import LocalStorage, Storage


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with whole snapshots of steps 5, 13 and 30."""
    storage = LocalStorage(tmp_path / "place")
    storage.create()
    with capture_logs():
        for step in (5, 13, 30):
            commit(storage, step)
    return tmp_path / "place"


def listed(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> listing.Listing:
    """Return the listing of a storage."""
    monkeypatch.setattr(listing, "locate", lambda *_, **__: (storage, None))
    return listing.look("memory://", verify=True)


def test_one_that_cannot_be_accessed_is_not_called_damaged(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unreadable, with the reason; the others are judged all the same."""
    fault = Fault(at=1, of=("get",), raises=StoreError("403 Forbidden"))
    found = listed(FaultyStorage(LocalStorage(place), fault), monkeypatch)
    assert fault.num_fired == 1
    assert found.verdict == "unreadable"
    assert sorted(entry.verdict for entry in found.entries) == ["unreadable", "whole", "whole"]
    assert "403 Forbidden" in str([entry.reason for entry in found.entries])


def test_a_place_that_cannot_be_listed_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Denied access raises, and never counts as an empty place."""
    fault = Fault(at=0, of=("names",), raises=StoreError("403 Forbidden"))
    with pytest.raises(StoreError, match="403 Forbidden"):
        listed(FaultyStorage(LocalStorage(place), fault), monkeypatch)
    assert fault.num_fired == 1


def test_what_a_job_removes_meanwhile_is_left_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot pruned between the listing and its reading is neither there nor damaged."""

    class Pruned(FaultyStorage):
        def get(self, name: str) -> bytes:
            data = super().get(name)
            if name == "step-00000005.json":  # as `_prune` does, the manifest first
                (place / "step-00000005.json").unlink(missing_ok=True)
                (place / "step-00000005.pt").unlink(missing_ok=True)
            if name == "step-00000030.json":
                (place / "step-00000013.json").unlink(missing_ok=True)
            return data

    found = listed(Pruned(LocalStorage(place), Fault(at=-1, raises=AssertionError())), monkeypatch)
    assert not (place / "step-00000005.pt").exists()
    assert [(entry.step, entry.verdict) for entry in found.entries] == [(30, "whole")]


def test_memory_is_for_one_snapshot_at_a_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing a hundred snapshots takes the memory of one: each is released once it is judged."""
    kept: list[weakref.ref[torch.Tensor]] = []
    load = torch.load

    def noted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - what torch.load takes and returns
        gc.collect()
        assert all(reference() is None for reference in kept)
        content = load(*arguments, **options)
        kept.append(weakref.ref(content["model"]["weight"]))
        return content

    monkeypatch.setattr(torch, "load", noted)
    listing.look(str(place), verify=True)
    assert len(kept) == 3
