"""Snapshots in an S3 bucket, through s3fs.

Invariant: a write is one PUT of the whole object, from memory; and nothing is read as absence but the server's own
word that there is no such key.

s3fs brings configuration, credentials and the thread of its event loop. Requests go through its `call_s3`, because
its file operations take a missing bucket for a missing file and remember listings. They are repeated here alone:
s3fs repeats what botocore repeats, and 5 times 5 attempts of 5 s are no answer.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final, TypeVar

import fsspec
import s3fs  # noqa: F401 - fsspec would import it late; where it is missing, that is to be told at once
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from elastic_mnist.errors import StoreError
from elastic_mnist.snapshots.storage import s3_errors
from elastic_mnist.snapshots.storage.fsspec_storage import FsspecStorage
from elastic_mnist.telemetry.events import log

CONNECT_SECONDS: Final = 5.0

READ_SECONDS: Final = 10.0
"""How long the server may be silent."""

REQUEST_SECONDS: Final = 60.0
"""How long one attempt may take in all, also where bytes trickle: 14.4 MB at 2 Mbit/s."""

RETRY_SECONDS: Final = 15.0
"""An attempt that fails later than this is the last one."""

MARK: Final = "elastic-mnist-put"
"""The metadata by which a conditional write is known to its writer."""

Value = TypeVar("Value")


class S3Storage(FsspecStorage):
    """Objects under `s3://bucket/prefix`. The bucket is the user's, and is never made."""

    def __init__(self, location: str, named: str = "--snapshot_path") -> None:
        super().__init__(location, named)
        self._has_conditions = True
        self._is_proven = False
        self._unanswered: dict[str, tuple[bytes, str]] = {}

    @property
    def has_conditional_put(self) -> bool:
        """True until the server has shown that it has no conditional PUT, or does not heed it."""
        return self._has_conditions

    def create(self) -> None:
        """Check that the bucket is there and can be listed; objects need no directory."""
        with self._access("use it"):
            self._page(MaxKeys=1)

    def names(self) -> list[str]:
        """List the objects by requests of one's own, past all that s3fs remembers."""
        with self._access("list it"):
            prefix = self._key("")
            found = [item["Key"][len(prefix) :] for page in self._pages() for item in page.get("Contents", ())]
            return [name for name in found if name]  # an object of the prefix's own name is some tool's "folder"

    def get(self, name: str) -> bytes:
        """Fetch an object, in one request."""
        with self._access(f"read {name}", may_be_missing=True):
            filesystem, root = self._open()
            data: bytes = self._persistently(lambda: filesystem.cat_file(f"{root}/{name}", timeout=REQUEST_SECONDS))
            return data

    def put(self, name: str, data: bytes) -> None:
        """Send an object in one request, whatever its size."""
        with self._access(f"write {name}"):
            self._request("put_object", Key=self._key(name), Body=data)

    def etag(self, name: str) -> str | None:
        """Return the ETag."""
        with self._access(f"read {name}"):
            found = self._head(name)
            return None if found is None else str(found["ETag"])

    def put_if_match(self, name: str, data: bytes, etag: str | None) -> str:
        """Send an object under the condition that it is still at that ETag, or not there.

        A refusal may be this writer's own work: an answer is lost, and somebody below sends the request again, aiohttp
        for one, without a word. So each write carries a mark, by which it is known; bytes would not do, since two
        writers may send the same ones.
        """
        if not self._has_conditions:
            return self._compare_and_put(name, data, etag)
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        digest = hashlib.sha256(data).digest()
        known, mark = self._unanswered.get(name, (b"", ""))
        if known != digest:
            mark = uuid.uuid4().hex
        self._unanswered[name] = digest, mark
        with self._access(f"write {name}"):
            try:
                answer = self._request("put_object", Key=self._key(name), Body=data, Metadata={MARK: mark}, **condition)
            except Exception as error:
                if s3_errors.status_of(error) == HTTPStatus.NOT_IMPLEMENTED:
                    self._do_without_conditions("the server has no conditional PUT")
                    return self._compare_and_put(name, data, etag)
                if not s3_errors.is_conflict(error):
                    raise
                found = self._head(name)
                if found is None or found["Metadata"].get(MARK) != mark:
                    raise self._conflict(name) from error
                answer = found
            del self._unanswered[name]
            if not self._is_proven:
                answer = self._put_unheeded(name, data) or answer
            return str(answer["ETag"])

    def _put_unheeded(self, name: str, data: bytes) -> dict[str, Any] | None:
        """Write an object again that is there, under the condition that it is not: a server may not heed conditions.

        Returns its answer where it does not; None where it refused, or nothing was learned.
        """
        try:
            answer = self._call("put_object", Key=self._key(name), Body=data, IfNoneMatch="*")
        except Exception as error:  # noqa: BLE001 - the write itself is done
            self._is_proven = s3_errors.is_conflict(error)
            return None
        self._do_without_conditions("the server does not heed the conditions of a PUT")
        return answer

    def _do_without_conditions(self, reason: str) -> None:
        self._has_conditions, self._is_proven = False, True
        log.warning("store.not_fenced", path=self.location, reason=reason)

    def delete(self, name: str) -> None:
        """Remove an object."""
        with self._access(f"remove {name}"):
            self._request("delete_object", Key=self._key(name))

    def rename(self, name: str, new_name: str) -> None:
        """Copy within the store, then remove."""
        with self._access(f"rename {name}", may_be_missing=True):
            source = {"Bucket": self._place()[0], "Key": self._key(name)}
            self._request("copy_object", Key=self._key(new_name), CopySource=source)
            self._request("delete_object", Key=self._key(name))

    def _head(self, name: str) -> dict[str, Any] | None:
        """Return what the server knows of an object, None where it is missing."""
        try:
            return self._request("head_object", Key=self._key(name))
        except FileNotFoundError:
            self._page(MaxKeys=1)  # that answer has no body: it may be the bucket that is missing
            return None

    def _compare_and_put(self, name: str, data: bytes, etag: str | None) -> str:
        """Do what can be done without conditions."""
        if self.etag(name) != etag:
            raise self._conflict(name)
        with self._access(f"write {name}"):
            return str(self._request("put_object", Key=self._key(name), Body=data)["ETag"])

    def _options(self) -> dict[str, Any]:
        """Return options for an instance of one's own; what the user has configured goes before our bounds."""
        asked = {**fsspec.config.conf.get("s3", {}), **fsspec.config.conf.get("s3a", {})}
        once = {"total_max_attempts": 1}
        bounds = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": once}
        return {
            **super()._options(),
            "skip_instance_cache": True,
            "max_concurrency": 1,  # or s3fs asks for the size before it reads
            "config_kwargs": {**bounds, **asked.get("config_kwargs", {})},
        }

    def _open(self) -> tuple[Any, str]:
        filesystem, root = super()._open()
        if not root:
            raise StoreError(f"{self._named}: names no bucket; say s3://BUCKET/PREFIX")
        filesystem.retries = 1
        return filesystem, root

    def _place(self) -> tuple[str, str]:
        """Return bucket and prefix."""
        filesystem, root = self._open()
        bucket, prefix, _ = filesystem.split_path(root)
        return bucket, prefix

    def _key(self, name: str) -> str:
        """Return an object's key in the bucket; of no name, what all of them begin with."""
        prefix = self._place()[1]
        return f"{prefix}/{name}" if prefix else name

    def _pages(self) -> Iterator[dict[str, Any]]:
        page = self._page()
        yield page
        while page.get("IsTruncated"):
            page = self._page(ContinuationToken=page["NextContinuationToken"])
            yield page

    def _page(self, **options: Any) -> dict[str, Any]:  # noqa: ANN401 - what the request takes
        """Ask for a part of the listing."""
        page = self._request("list_objects_v2", Prefix=self._key(""), Delimiter="/", **options)
        if "Name" not in page:  # a web server may answer anything with 200
            raise StoreError(f"{self._named}: {self._endpoint()} does not answer like S3; check AWS_ENDPOINT_URL")
        return page

    def _request(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401 - what the request takes
        """Make a request that does no harm when it is repeated."""
        return self._persistently(lambda: self._call(method, **parameters))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401 - what the request takes
        """Make a request, once."""
        filesystem, bucket = self._open()[0], self._place()[0]
        answer: dict[str, Any] = filesystem.call_s3(method, Bucket=bucket, timeout=REQUEST_SECONDS, **parameters)
        return answer

    def _persistently(self, call: Callable[[], Value]) -> Value:
        """Call, again while the error may pass; then raise it."""
        return Retrying(
            retry=retry_if_exception(s3_errors.is_transient),
            stop=stop_after_delay(RETRY_SECONDS),
            wait=wait_random_exponential(multiplier=0.2, max=3),
            reraise=True,
        )(call)

    def _endpoint(self) -> str:
        return str(self._open()[0].s3.meta.endpoint_url)

    def _is_absence(self, error: Exception) -> bool:
        return s3_errors.is_missing(error)

    def _explain(self, error: Exception) -> tuple[str, str]:
        try:
            endpoint = self._endpoint()
        except Exception:  # noqa: BLE001 - where not even a client can be made, the error says why
            return super()._explain(error)
        return s3_errors.explain(error, endpoint)
