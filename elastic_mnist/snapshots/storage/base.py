"""What every store promises: named objects in one place, each of them whole.

Invariant: `put` is atomic. Whoever reads an object gets the old bytes or the new ones, whole, also after a
kill or a loss of power in the middle of it.

An object that is not there is `FileNotFoundError`. Any other error of access is a `StoreError`: it must
never be read as "there is no snapshot".
"""

import contextlib
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator

from elastic_mnist.errors import StoreConflict, StoreError


class Storage(ABC):
    """Named objects in one place. Threads may share one; so may a process and its forks.

    Args:
        location: the directory or URL, as people know it.
        named: what names it to the user, an option for instance; stands in every error.
    """

    def __init__(self, location: str, named: str) -> None:
        self.location = location
        self._named = f"{named} {location}"

    @property
    def has_conditional_put(self) -> bool:
        """Whether `put_if_match` is atomic as far as is known: false says that two writers at once may both succeed."""
        return False

    @property
    def outlives_process(self) -> bool:
        """Whether what is written here is there when this process is not."""
        return True

    @property
    def can_read_back(self) -> bool:
        """Whether reading an object proves what is kept; false where this machine's own cache would answer."""
        return True

    @abstractmethod
    def create(self) -> None:
        """Make the place if it is missing, and remove what interrupted writes have left."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all objects, read past any cache; empty where the place is missing."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return an object's bytes."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write an object, atomically."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is fine."""

    @abstractmethod
    def rename(self, name: str, new_name: str) -> None:
        """Give an object another name; not atomic everywhere, so never part of a commit."""

    def etag(self, name: str) -> str | None:
        """Return a token of what an object holds now, read past any cache; None where it is missing.

        Other bytes have another token. Beyond that it means nothing; `put_if_match` takes it.
        """
        try:
            return hashlib.sha256(self.get(name)).hexdigest()
        except FileNotFoundError:
            return None

    def put_if_match(self, name: str, data: bytes, etag: str | None) -> str:
        """Write an object where it is still at `etag`, None for not there; return its new etag.

        Atomic where `has_conditional_put`, among writers who all use `put_if_match` for this object.

        Raises:
            StoreConflict: it is at another etag, or gone; nothing was written.
            StoreError: no access. The object may have been written all the same, if its answer was lost.
        """
        if self.etag(name) != etag:
            raise self._conflict(name)
        self.put(name, data)
        return hashlib.sha256(data).hexdigest()

    def path(self, name: str) -> str:
        """Return where an object is, for people and for `--resume_from`."""
        return f"{self.location.rstrip('/')}/{name}"

    def _conflict(self, name: str) -> StoreConflict:
        return StoreConflict(
            f"{self._named}: {name} is no longer what this process last saw: another one writes there too; "
            f"let one job at a time use it, or choose another"
        )

    @contextlib.contextmanager
    def _access(self, doing: str, *, may_be_missing: bool = False) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # a backend may raise anything of its own; all of it means "no access"
            if may_be_missing and self._is_absence(error):
                raise
            reason, way_out = self._explain(error)
            raise StoreError(re.sub(r"\s+", " ", f"{self._named}: cannot {doing}: {reason}; {way_out}")) from error

    def _is_absence(self, error: Exception) -> bool:
        """Whether an error says that there is no such object."""
        return isinstance(error, FileNotFoundError)

    def _explain(self, error: Exception) -> tuple[str, str]:
        """Return the cause of an error and the way out, for people."""
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return reason, "make it accessible or choose another"
