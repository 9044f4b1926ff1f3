"""The manifest of a durable snapshot.

Invariant: no changed byte of it goes unnoticed; it is read only as it was written.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from elastic_mnist.errors import SnapshotError
from elastic_mnist.snapshots.plain import from_plain
from elastic_mnist.training.sampler import Position

MANIFEST_NAME: Final = re.compile(r"step-(\d{8,})\.json")

DATA_NAME: Final = re.compile(r"step-(\d{8,})\.pt")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The facts of a snapshot that are known without opening its data.

    Attributes:
        step, epoch, samples_in_epoch: what is finished; see `Position`.
        size_bytes, sha256: of the data file.
        weights_sha256: of the model's weights, as in the event `run.finished`.
        settings_fingerprint: of the settings that the result depends on.
        run_id, generation: that wrote it.
        created_at: seconds since the epoch of UTC.
        test_accuracy: of the last evaluation before it; None before the first.
        replaces: the one that was committed under the same name before; its data may still be there.
    """

    step: int
    epoch: int
    samples_in_epoch: int
    size_bytes: int
    sha256: str
    weights_sha256: str
    settings_fingerprint: str
    run_id: str
    generation: int
    created_at: float
    test_accuracy: float | None
    replaces: "Manifest | None" = None

    @property
    def position(self) -> Position:
        """What is finished."""
        return Position(epoch=self.epoch, samples_in_epoch=self.samples_in_epoch, step=self.step)

    @property
    def data_name(self) -> str:
        """The name of the data file."""
        return data_name(self.step)

    @property
    def name(self) -> str:
        """The name of the manifest itself."""
        return f"step-{self.step:08d}.json"

    def is_of_same_state(self, other: "Manifest") -> bool:
        """Whether this generation has written one state twice, since the answer to its first try was lost."""
        return self == replace(other, size_bytes=self.size_bytes, sha256=self.sha256, created_at=self.created_at)

    def to_json(self) -> bytes:
        """Serialise, with a digest of the content in `manifest_sha256`."""
        content = self._to_plain()
        return json.dumps({**content, "manifest_sha256": _digest_of(content)}, indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, name: str) -> "Manifest":
        """Read a manifest that lies under `name`; raises `SnapshotError` unless every byte is as written."""
        try:
            content = json.loads(data)
            digest = content.pop("manifest_sha256")
            manifest = from_plain(cls, content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SnapshotError(f"manifest not readable: {type(error).__name__}: {error}") from None
        # Byte for byte, so that no flipped bit can hide in white space or in a number's spelling.
        if digest != _digest_of(content) or manifest.to_json() != data:
            raise SnapshotError("manifest does not match its own SHA-256")
        if manifest.name != name:
            raise SnapshotError(f"manifest is that of step {manifest.step}")
        return manifest

    def _to_plain(self) -> dict[str, Any]:
        """Return JSON-ready values; what is replaced only where there is such a one."""
        content = asdict(self)
        if content["replaces"] is None:
            del content["replaces"]
        else:
            del content["replaces"]["replaces"]
        return content


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def data_name(step: int) -> str:
    """Return the name of a step's data file."""
    return f"step-{step:08d}.pt"
