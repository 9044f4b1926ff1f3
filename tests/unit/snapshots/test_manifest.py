"""The manifest: it is read as it was written, and no changed bit of it goes unseen."""

import hashlib
import json
from dataclasses import replace

import pytest
from states import (
    EVALUATED_13,
    MANIFEST_5,
    STATE_13,
    manifest_13,
    manifest_of,
    small_state,
)

from elastic_mnist.errors import SnapshotError
from elastic_mnist.snapshots.manifest import Manifest
from elastic_mnist.snapshots.state import pack
from elastic_mnist.training.sampler import Position


def test_a_manifest_nested_beyond_reason_is_damaged() -> None:
    """JSON too deep for its parser is a damaged manifest like any other, not a crash of the job."""
    with pytest.raises(SnapshotError):
        Manifest.from_json(b"[" * 200_000, MANIFEST_5)


def test_no_flipped_bit_of_a_manifest_goes_unseen() -> None:
    """Each bit of a manifest in turn, flipped, makes it one that is not to be believed."""
    data = pack(small_state(5))
    whole = manifest_of(small_state(5), data).to_json()
    Manifest.from_json(whole, MANIFEST_5)
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            with pytest.raises(SnapshotError):
                Manifest.from_json(bytes(flipped), MANIFEST_5)


@pytest.mark.parametrize("accuracy", [None, 0.1 + 0.2, 1.0])
def test_a_manifest_is_read_as_it_was_written(accuracy: float | None) -> None:
    """Every field comes back, a missing accuracy and one of many digits too."""
    manifest = manifest_of(small_state(5), pack(small_state(5)), test_accuracy=accuracy)
    assert Manifest.from_json(manifest.to_json(), MANIFEST_5) == manifest


def test_a_manifest_is_read_with_the_one_that_it_replaces() -> None:
    """Every field of both comes back."""
    manifest = replace(manifest_13(EVALUATED_13), replaces=manifest_13(STATE_13))
    assert Manifest.from_json(manifest.to_json(), "step-00000013.json") == manifest


def test_no_flipped_bit_of_a_manifest_that_replaces_another_goes_unseen() -> None:
    """Each bit in turn, flipped, also of what is replaced, makes it one that is not to be believed."""
    whole = replace(manifest_13(EVALUATED_13), replaces=manifest_13(STATE_13)).to_json()
    Manifest.from_json(whole, "step-00000013.json")
    for place in range(len(whole)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            with pytest.raises(SnapshotError):
                Manifest.from_json(bytes(flipped), "step-00000013.json")


def test_a_manifest_that_replaces_none_is_that_of_older_programs() -> None:
    """Eleven facts and their digest, and no word of another: either program reads what the other has written."""
    manifest = manifest_of(small_state(5), pack(small_state(5)))
    names = (
        *("step", "epoch", "samples_in_epoch", "size_bytes", "sha256", "weights_sha256", "settings_fingerprint"),
        *("run_id", "generation", "created_at", "test_accuracy"),
    )
    facts = {name: getattr(manifest, name) for name in names}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    older = json.dumps({**facts, "manifest_sha256": digest}, indent=1).encode() + b"\n"
    assert Manifest.from_json(older, MANIFEST_5) == manifest
    assert manifest.to_json() == older


def test_a_manifest_knows_its_position() -> None:
    """Epoch, samples and step are those of the state: step 30 of epochs of 13 steps is 4 steps into the third."""
    manifest = manifest_of(small_state(30), pack(small_state(30)))
    assert manifest.position == Position(epoch=2, samples_in_epoch=32, step=30)
