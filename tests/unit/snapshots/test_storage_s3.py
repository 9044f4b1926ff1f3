"""Snapshots in a bucket: the contract against a real S3 server process, and what a spoiled connection must not do.

The server is moto's; the client is s3fs, as in a job. Faults are made by a proxy between the two.
"""

import os
import signal
import subprocess
import sys
import threading
import urllib.error
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import structlog
from faulty_proxy import Fault, FaultyProxy, Kind, s3_error
from s3_server import PAGE_SIZE, S3Server
from states import commit, small_state

from elastic_mnist.errors import StoreConflict, StoreError
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.state import pack
from elastic_mnist.snapshots.storage import Storage, open_storage, s3

pytest.register_assert_rewrite("storage_contract")
from storage_contract import FencedContract  # noqa: E402 - after its asserts are to be rewritten

pytestmark = pytest.mark.s3

OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "create": lambda storage: storage.create(),
    "names": lambda storage: storage.names(),
    "get": lambda storage: storage.get("a.pt"),
    "etag": lambda storage: storage.etag("a.pt"),
    "put": lambda storage: storage.put("a.pt", b"new"),
    "put_if_match": lambda storage: storage.put_if_match("a.pt", b"new", '"0"'),
    "delete": lambda storage: storage.delete("a.pt"),
    "rename": lambda storage: storage.rename("a.pt", "b.pt"),
}


def refusals(storage: Storage) -> dict[str, str]:
    """Return the messages of the StoreErrors that the operations end with, each asserted to be one."""
    messages = {}
    for name, operation in OPERATIONS.items():
        with pytest.raises(StoreError) as caught:
            operation(storage)
        assert not isinstance(caught.value, StoreConflict)
        messages[name] = str(caught.value)
    return messages


def assert_say(messages: dict[str, str], location: str, *parts: str) -> None:
    """Assert that each message is one line that begins with option and place, and says what it should."""
    for name, message in messages.items():
        assert "\n" not in message, name
        assert message.startswith(f"--snapshot_path {location}: "), name
        assert all(part in message for part in parts), (name, message)


@pytest.fixture(scope="module")
def process() -> Iterator[S3Server]:
    """A server process for this file."""
    with S3Server() as server:
        yield server


@pytest.fixture
def server(process: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, in an environment by which a client finds it, and in which nothing of the user's is left."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", process.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return process


@pytest.fixture
def bucket(server: S3Server) -> str:
    """An empty bucket."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    server.request("PUT", name)
    return name


@pytest.fixture
def place(bucket: str) -> str:
    """A prefix in that bucket."""
    return f"s3://{bucket}/runs/one"


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, which a client that opens from here on goes through; stalls are soon noticed."""
    monkeypatch.setattr(s3, "READ_SECONDS", 0.5)
    with FaultyProxy(server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what fails for good be told soon."""
    monkeypatch.setattr(s3, "RETRY_SECONDS", 0.3)


class TestS3(FencedContract):
    """A bucket keeps the contract, fenced."""

    @pytest.fixture
    def location(self, place: str) -> str:
        """A prefix that no other test uses."""
        return place


@pytest.mark.parametrize("form", ["s3://{}", "s3://{}/", "s3://{}/run/", "s3a://{}/run", "s3://{}/a b/ü"])
def test_a_place_may_be_spelled_in_many_ways(form: str, bucket: str) -> None:
    """The bucket itself, a slash at the end, the other scheme, and odd characters serve."""
    storage = open_storage(form.format(bucket))
    storage.create()
    storage.put("a.pt", b"x")
    assert (storage.names(), storage.get("a.pt")) == (["a.pt"], b"x")


@pytest.mark.usefixtures("server")
def test_a_url_without_a_bucket_is_told() -> None:
    """There is nothing to ask for, and the way out is said."""
    assert {*refusals(open_storage("s3://")).values()} == {
        "--snapshot_path s3://: names no bucket; say s3://BUCKET/PREFIX"
    }


def test_another_place_in_the_bucket_is_another_place(bucket: str) -> None:
    """Neither a longer prefix, nor one below, nor one above is seen."""
    for place in ("run", "run2", "run/below"):
        open_storage(f"s3://{bucket}/{place}").put("a.pt", place.encode())
    assert open_storage(f"s3://{bucket}/run").names() == ["a.pt"]
    assert open_storage(f"s3://{bucket}/run").get("a.pt") == b"run"
    assert open_storage(f"s3://{bucket}").names() == []


def test_a_listing_of_many_pages_is_whole(place: str) -> None:
    """All objects are named where the server needs three answers for them."""
    storage, names = open_storage(place), [f"step-{step:08d}.pt" for step in range(2 * PAGE_SIZE + 1)]
    for name in names:
        storage.put(name, b"")
    assert sorted(storage.names()) == names


def test_what_another_program_wrote_is_seen_at_once(server: S3Server, bucket: str) -> None:
    """A listing, an object and a etag that were read before are read anew, past everything s3fs remembers."""
    storage = open_storage(f"s3://{bucket}/run")
    storage.put("a.pt", b"old")
    before = storage.names(), storage.get("a.pt"), storage.etag("a.pt")
    server.request("PUT", f"{bucket}/run/a.pt", b"new")
    server.request("PUT", f"{bucket}/run/b.pt", b"x")
    assert before[:2] == (["a.pt"], b"old")
    assert (sorted(storage.names()), storage.get("a.pt")) == (["a.pt", "b.pt"], b"new")
    assert storage.etag("a.pt") != before[2]


def test_a_snapshot_is_sent_and_fetched_in_one_request_each(proxy: FaultyProxy, place: str) -> None:
    """14.4 MB are one PUT and one GET: there are no parts that could be left half done."""
    storage, data = open_storage(place), os.urandom(14_400_000)
    storage.put("a.pt", data)
    assert storage.get("a.pt") == data
    path = place.removeprefix("s3:/")
    assert [request.partition("?")[0] for request in proxy.requests] == [f"PUT {path}/a.pt", f"GET {path}/a.pt"]


def test_a_missing_bucket_is_a_store_error(server: S3Server) -> None:
    """No operation reads it as an empty place or a missing object, or makes it; bucket, endpoint and cause are told."""
    messages = refusals(open_storage("s3://nowhere/run"))
    assert_say(messages, "s3://nowhere/run", server.endpoint, "NoSuchBucket", "make the bucket")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server.request("GET", "nowhere")


def test_wrong_credentials_are_a_store_error(server: S3Server, place: str) -> None:
    """A key that the server does not know is told by every operation, and never read as absence."""
    server.require_signatures(required=True)
    try:
        messages = refusals(open_storage(place))
    finally:
        server.require_signatures(required=False)
    assert_say(messages, place, server.endpoint, "403", "check ")
    del messages["etag"]  # an answer to HEAD has no body with the cause
    assert_say(messages, place, "InvalidAccessKeyId", "check AWS_ACCESS_KEY_ID")


def test_missing_credentials_are_a_store_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no key is to be found, what to set is said."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert_say(refusals(open_storage(place)), place, "credentials", "check AWS_ACCESS_KEY_ID")


def test_what_is_forbidden_is_told_at_once(proxy: FaultyProxy, place: str) -> None:
    """A 403 is a StoreError after one request: it will not pass."""
    fault = proxy.add(Fault(kind="answer", status=403, body=s3_error("AccessDenied"), times=1000))
    messages = refusals(open_storage(place))
    assert_say(messages, place, proxy.endpoint, "403", "check the AWS credentials")
    assert fault.num_fired == len(proxy.requests) == len(messages)


def test_a_bucket_of_another_region_is_told_with_its_region(proxy: FaultyProxy, place: str) -> None:
    """A server that sends elsewhere is a StoreError that says what to set."""
    body = s3_error("AuthorizationHeaderMalformed").replace(b"</Message>", b"</Message><Region>eu-west-1</Region>")
    fault = proxy.add(Fault(kind="answer", status=400, body=body, times=1000))
    messages = refusals(open_storage(place))
    del messages["etag"]  # an answer to HEAD has no body with the region
    assert_say(messages, place, "set AWS_DEFAULT_REGION to eu-west-1")
    assert fault.num_fired


def test_a_missing_page_is_not_a_missing_object(proxy: FaultyProxy, place: str) -> None:
    """Where a web server answers 404, that is no empty place and no missing object."""
    fault = proxy.add(Fault(kind="answer", status=404, body=b"<html><body>No</body></html>", times=1000))
    assert_say(refusals(open_storage(place)), place, proxy.endpoint, "404", "check AWS_ENDPOINT_URL")
    assert fault.num_fired


@pytest.mark.parametrize("page", [b"<html><body>Hello</body></html>", b"", b"Hello"])
@pytest.mark.usefixtures("impatience")
def test_a_page_is_not_an_empty_listing(page: bytes, proxy: FaultyProxy, place: str) -> None:
    """Where a web server answers 200, with whatever it has to say, that is no empty place."""
    fault = proxy.add(Fault(kind="answer", status=200, body=page, times=1000))
    with pytest.raises(StoreError, match="check AWS_ENDPOINT_URL"):
        open_storage(place).names()
    assert fault.num_fired


@pytest.mark.usefixtures("impatience")
def test_a_dead_endpoint_is_a_store_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing listens, the endpoint is named."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert_say(refusals(open_storage(place)), place, "http://127.0.0.1:9", "check AWS_ENDPOINT_URL")


PASSING = {
    "500": Fault(kind="answer", status=500, body=s3_error("InternalError")),
    "502": Fault(kind="answer", status=502, body=b"<html>Bad Gateway"),
    "503": Fault(kind="answer", status=503, body=s3_error("SlowDown")),
    "429": Fault(kind="answer", status=429, body=s3_error("TooManyRequests")),
    "409": Fault(kind="answer", status=409, body=s3_error("ConditionalRequestConflict")),
    "reset": Fault(kind="reset"),
    "stall": Fault(kind="stall"),
    "cut_request": Fault(kind="cut_request"),
    "cut_answer": Fault(kind="cut_answer"),
    "lose_answer": Fault(kind="lose_answer"),
}


@pytest.mark.parametrize("name", [name for name in PASSING if name != "409"])  # only conditional writes meet that
def test_what_passes_is_waited_for(name: str, proxy: FaultyProxy, place: str) -> None:
    """Each kind of request meets the fault once, and each operation does what it does undisturbed."""
    storage, data = open_storage(place), os.urandom(1000)
    kinds = ("PUT", "GET .*list-type", "GET (?!.*list-type)", "HEAD", "DELETE")
    met = [proxy.add(replace(PASSING[name], of=kind)) for kind in kinds]
    storage.put("a.pt", data)
    assert storage.names() == ["a.pt"]
    assert storage.get("a.pt") == data
    assert storage.put_if_match("a.pt", data[::-1], storage.etag("a.pt")) == storage.etag("a.pt")
    storage.rename("a.pt", "b.pt")
    assert (storage.names(), storage.get("b.pt")) == (["b.pt"], data[::-1])
    assert [fault.num_fired for fault in met] == [1] * 5


@pytest.mark.parametrize("name", PASSING)
def test_a_conditional_put_outlasts_what_passes(name: str, proxy: FaultyProxy, place: str) -> None:
    """Making and replacing an object succeed once the fault is over, and the etag returned is the object's."""
    storage, etag = open_storage(place), None
    for data in (b"first", b"second"):
        fault = proxy.add(replace(PASSING[name], of="PUT"))
        etag = storage.put_if_match("a.pt", data, etag)
        assert fault.num_fired == 1
        assert (storage.get("a.pt"), storage.etag("a.pt")) == (data, etag)


def test_requests_are_repeated_by_one_layer_alone(
    proxy: FaultyProxy, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without time for another attempt there is one request: neither s3fs nor botocore adds its own."""
    monkeypatch.setattr(s3, "RETRY_SECONDS", 0)
    fault = proxy.add(Fault(kind="answer", status=503, body=s3_error("SlowDown"), times=1000))
    messages = refusals(open_storage(place))
    assert_say(messages, place, proxy.endpoint, "503", "try again later")
    assert fault.num_fired == len(messages)


@pytest.mark.parametrize("kind", ["reset", "stall", "cut_request"])
@pytest.mark.usefixtures("impatience")
def test_a_write_that_breaks_off_leaves_the_old_object(kind: Kind, proxy: FaultyProxy, place: str) -> None:
    """A server that goes in the middle of it, each time, is a StoreError; once it is back, it has the old bytes."""
    storage, old, new = open_storage(place), os.urandom(1 << 20), os.urandom(1 << 20)
    etag = storage.put_if_match("a.pt", old, None)
    fault = proxy.add(Fault(kind=kind, of="PUT", times=1000))
    for put in (lambda: storage.put("a.pt", new), lambda: storage.put_if_match("a.pt", new, etag)):
        with pytest.raises(StoreError, match="check AWS_ENDPOINT_URL") as caught:
            put()
        assert not isinstance(caught.value, StoreConflict)
    assert fault.num_fired >= 2  # each of them was met
    assert (storage.get("a.pt"), storage.names()) == (old, ["a.pt"])
    proxy.heal()
    storage.put_if_match("a.pt", new, etag)
    assert storage.get("a.pt") == new


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_a_writer_that_is_killed_in_a_write_leaves_the_old_object(sign: int, proxy: FaultyProxy, place: str) -> None:
    """The object is the one before, whole, and nothing else is there."""
    storage = open_storage(place)
    storage.put("a.pt", b"old")
    fault = proxy.add(Fault(kind="stall", of="PUT", times=1000))
    code = (
        "import sys; from elastic_mnist.snapshots.storage import open_storage;"
        "open_storage(sys.argv[1]).put('a.pt', bytes(1 << 20))"
    )
    with subprocess.Popen([sys.executable, "-c", code, place], stderr=subprocess.DEVNULL) as writer:
        assert fault.has_fired.wait(60)
        writer.send_signal(sign)
    assert writer.returncode == -sign
    assert (storage.get("a.pt"), storage.names()) == (b"old", ["a.pt"])


@pytest.mark.usefixtures("impatience")
def test_an_answer_that_is_lost_for_good_is_no_conflict_with_oneself(proxy: FaultyProxy, place: str) -> None:
    """A write that was made without an answer is a StoreError, and the same write again succeeds."""
    storage = open_storage(place)
    old = storage.put_if_match("a.pt", b"old", None)
    fault = proxy.add(Fault(kind="lose_answer", of="PUT"))
    proxy.add(Fault(kind="reset", of="PUT", times=1000))
    with pytest.raises(StoreError) as caught:
        storage.put_if_match("a.pt", b"new", old)
    assert not isinstance(caught.value, StoreConflict)
    assert fault.num_fired == 1
    proxy.heal()
    assert storage.put_if_match("a.pt", b"new", old) == storage.etag("a.pt")
    assert storage.get("a.pt") == b"new"


@pytest.fixture
def rival(place: str) -> Storage:
    """Another writer at the same place, whom no fault meets: to be asked for before the proxy."""
    storage = open_storage(place)
    storage.create()
    return storage


@pytest.mark.parametrize("theirs", [b"theirs", b"mine"])
@pytest.mark.parametrize("kind", ["lose_answer", "reset"])
def test_a_writer_that_comes_between_a_write_and_its_repetition_is_a_conflict(
    kind: Kind, theirs: bytes, rival: Storage, proxy: FaultyProxy, place: str
) -> None:
    """Whether the first request took effect or not, and also where both write the same bytes, the other one has won."""
    storage = open_storage(place)
    old = storage.put_if_match("a.pt", b"old", None)
    met = [proxy.add(Fault(kind=kind, of="PUT")), proxy.add(Fault(kind="reset", of="PUT", times=1000))]
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(storage.put_if_match, "a.pt", b"mine", old)
        assert all(fault.has_fired.wait(60) for fault in met)
        etag = rival.put_if_match("a.pt", theirs, rival.etag("a.pt"))
        proxy.heal()
        with pytest.raises(StoreConflict):
            writing.result(60)
    assert (storage.get("a.pt"), storage.etag("a.pt")) == (theirs, etag)


def test_a_server_without_conditions_is_told_once(proxy: FaultyProxy, place: str) -> None:
    """Where conditional writes are not implemented, conditions are looked at before; storage and log say so."""
    fault = proxy.add(Fault(kind="answer", of="PUT", status=501, body=s3_error("NotImplemented")))
    storage = open_storage(place)
    with structlog.testing.capture_logs() as events:
        etag = storage.put_if_match("a.pt", b"old", None)
        etag = storage.put_if_match("a.pt", b"new", etag)
        with pytest.raises(StoreConflict):
            storage.put_if_match("a.pt", b"mine", None)
    assert fault.num_fired == 1
    assert (storage.get("a.pt"), storage.etag("a.pt")) == (b"new", etag)
    assert not storage.has_conditional_put
    assert [(event["event"], event["log_level"]) for event in events] == [("store.not_fenced", "warning")]


def test_a_server_that_does_not_heed_conditions_is_told_once(proxy: FaultyProxy, place: str) -> None:
    """One that writes whatever the condition is found out by its first write; from then on they are looked at before.

    Storage and log say so.
    """
    fault = proxy.add(Fault(kind="drop_conditions", of="PUT", times=1000))
    storage = open_storage(place)
    with structlog.testing.capture_logs() as events:
        etag = storage.put_if_match("a.pt", b"old", None)
        assert not storage.has_conditional_put
        assert (storage.get("a.pt"), storage.etag("a.pt")) == (b"old", etag)
        etag = storage.put_if_match("a.pt", b"new", etag)
        for stale in (None, '"0"'):
            with pytest.raises(StoreConflict):
                storage.put_if_match("a.pt", b"mine", stale)
    assert fault.num_fired == 3  # both writes, and the one that should have been refused
    assert (storage.get("a.pt"), storage.etag("a.pt")) == (b"new", etag)
    assert [(event["event"], event["log_level"], event["path"]) for event in events] == [
        ("store.not_fenced", "warning", place)
    ]


def test_a_server_that_heeds_conditions_is_tried_once(proxy: FaultyProxy, place: str) -> None:
    """Of a storage's conditional writes the first alone takes a second request, which changes nothing."""
    storage, etag, num_requests = open_storage(place), None, []
    with structlog.testing.capture_logs() as events:
        for data in (b"1", b"2", b"3"):
            before = len(proxy.requests)
            etag = storage.put_if_match("a.pt", data, etag)
            num_requests.append(len(proxy.requests) - before)
            assert (storage.get("a.pt"), storage.etag("a.pt")) == (data, etag)
    assert num_requests == [2, 1, 1]
    assert storage.has_conditional_put
    assert events == []


@pytest.mark.parametrize("name", [name for name in PASSING if name != "cut_answer"])  # a refusal's body says nothing
def test_a_trial_of_the_conditions_that_breaks_off_is_made_again(name: str, proxy: FaultyProxy, place: str) -> None:
    """The write itself is done, and returns its etag; the next one tries the server again."""
    storage, etag = open_storage(place), None
    written = proxy.add(Fault(kind="drop_conditions", of="PUT"))  # there is no object: that changes nothing
    fault = proxy.add(replace(PASSING[name], of="PUT"))
    for data in (b"1", b"2", b"3"):
        etag = storage.put_if_match("a.pt", data, etag)
        assert (storage.get("a.pt"), storage.etag("a.pt")) == (data, etag)
    assert [written.num_fired, fault.num_fired] == [1, 1]
    assert storage.has_conditional_put
    assert sum(request.startswith("PUT") for request in proxy.requests) == 2 + 2 + 1


@pytest.fixture
def mortal(server: S3Server, tmp_path: Path) -> Iterator[S3Server]:
    """A server of the test's own, which may be killed and comes back with its contents."""
    assert server.port  # whose environment is left as it is, but for the endpoint
    with S3Server(tmp_path / "journal") as mortal:
        mortal.request("PUT", "bucket")
        yield mortal


@pytest.mark.parametrize("name", ["step-00000009.pt", "step-00000009.json"])
@pytest.mark.usefixtures("impatience")
def test_a_server_that_is_killed_in_the_middle_of_a_save_leaves_the_old_snapshot(
    name: str, mortal: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half of the data or of the manifest sent, the save is a StoreError; once it is back, there is the old one.

    The same save then succeeds, and retention does its part.
    """
    with FaultyProxy(mortal.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        storage = open_storage("s3://bucket/runs/one")
        commit(storage, 5)
        fault = proxy.add(Fault(kind="hold_request", of=f"PUT .*/{name}"))
        with ThreadPoolExecutor(1) as pool:
            saving = pool.submit(commit, storage, 9, keep_last=1)
            assert fault.is_halfway.wait(60)
            mortal.kill()
            with pytest.raises(StoreError, match="check AWS_ENDPOINT_URL"):
                saving.result(60)
        with pytest.raises(StoreError, match="check AWS_ENDPOINT_URL"):
            DurableTier(storage).newest_valid()
        mortal.restart()
        with structlog.testing.capture_logs() as events:
            newest = DurableTier(storage).newest_valid()
        assert (events, fault.num_fired) == ([], 1)
        assert newest is not None
        assert newest.data == pack(small_state(5))
        commit(storage, 9, keep_last=1)
        newest = DurableTier(storage).newest_valid()
        assert newest is not None
        assert newest.data == pack(small_state(9))
        assert sorted(storage.names()) == ["step-00000009.json", "step-00000009.pt"]


def test_threads_share_a_storage(place: str) -> None:
    """8 threads write and read at once, with the client made by whoever is first; all get what they put."""
    storage, start = open_storage(place), threading.Barrier(8)

    def work(number: int) -> list[bytes]:
        start.wait(30)
        for step in range(5):
            storage.put(f"{number}-{step}.pt", b"%d %d" % (number, step))
        return [storage.get(f"{number}-{step}.pt") for step in range(5)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, range(8)))
    assert found == [[b"%d %d" % (number, step) for step in range(5)] for number in range(8)]


def test_a_forked_process_goes_on_with_a_client_of_its_own(place: str) -> None:
    """A storage that was used before a fork serves in both processes after it."""
    code = (
        "import os, sys; from elastic_mnist.snapshots.storage import open_storage;"
        "storage = open_storage(sys.argv[1]); storage.put('before.pt', b'x');"
        "child = os.fork();"
        "storage.put('parent.pt' if child else 'child.pt', storage.get('before.pt'));"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0)"
    )
    subprocess.run([sys.executable, "-c", code, place], check=True, timeout=120)
    assert sorted(open_storage(place).names()) == ["before.pt", "child.pt", "parent.pt"]


def test_configuration_of_fsspec_is_used(
    server: S3Server, place: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user configures for s3fs, endpoint and bounds for instance, goes before environment and defaults."""
    configured = {
        "endpoint_url": server.endpoint,
        "config_kwargs": {"read_timeout": 77, "retries": {"max_attempts": 3}},
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", configured)
    storage = open_storage(place)
    assert isinstance(storage, s3.S3Storage)
    assert storage.names() == []
    assert proxy.requests == []  # what the environment names was not asked
    config = storage._open()[0].s3.meta.config
    assert (config.read_timeout, config.connect_timeout) == (77, s3.CONNECT_SECONDS)
    assert config.retries["total_max_attempts"] == 4
