"""Whole jobs whose snapshots lie in a bucket of a real S3 server process: killed, cut off, refused."""

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_proxy import Fault as Spoiled
from faulty_proxy import FaultyProxy
from harness import SMALL, Event, Job, eventually, plain, standalone
from s3_server import S3Server
from tiers import Fault, Plan, undisturbed

from elastic_mnist.snapshots.listing import look
from elastic_mnist.snapshots.lookup import find
from elastic_mnist.training.model import weights_sha256

pytestmark = pytest.mark.s3

EVERY_5 = (*SMALL, "--save_every_steps=5")
LOCAL_LOG = "--event_log=snapshots/events.jsonl"  # where `Job` looks


@pytest.fixture(scope="module")
def process() -> Iterator[S3Server]:
    """A server process for this file."""
    with S3Server() as server:
        yield server


@pytest.fixture
def server(process: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, in an environment by which a job finds it, and in which nothing of the user's is left."""
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
    """The option that names a prefix in that bucket."""
    return f"--snapshot_path=s3://{bucket}/runs/one"


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy before the server, which a job that is started from here on goes through."""
    with FaultyProxy(server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture(scope="module")
def undisturbed_sha256(mnist_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the small job on a local path when nobody touches it."""
    return str(undisturbed(tmp_path_factory.mktemp("undisturbed"), mnist_dir)["weights_sha256"])


def test_a_job_in_a_bucket(
    mnist_dir: Path, tmp_path: Path, server: S3Server, place: str, undisturbed_sha256: str
) -> None:
    """Killed once it goes on from memory and ends as undisturbed; started again it does nothing, and changes nothing.

    Its event log lies in the working directory.
    """
    plan = Plan(tmp_path / "faults", Fault(kind="kill", place="step", ranks=(0,), step=8))
    with Job(tmp_path / "job", mnist_dir, standalone(2), (*EVERY_5, place), plan.environment) as job:
        assert job.wait() == 0, job.output
    assert plan.fired() == [("begins", 0, 8, 8)]
    log = tmp_path / "job" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    (resumed,) = [event for event in events if event["event"] == "run.resumed"]
    (finished,) = [event for event in events if event["event"] == "run.finished"]
    assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("memory", 8, 0)
    assert finished["weights_sha256"] == undisturbed_sha256

    bucket = place.split("/")[2]
    before = listing(server, bucket), log.read_bytes()
    assert f"runs/one/step-{32:08d}.json" in before[0]
    with Job(tmp_path / "job", mnist_dir, plain(), (*EVERY_5, place)) as job:
        assert job.wait() == 0
        assert "run.nothing_to_do" in job.output
    assert (listing(server, bucket), log.read_bytes()) == before
    assert not (tmp_path / "job" / "snapshots").exists()


def listing(server: S3Server, bucket: str) -> str:
    """Return what the server says of all objects of a bucket, their times too."""
    return server.request("GET", f"{bucket}?list-type=2&max-keys=1000").decode()


def test_a_job_that_was_lost_goes_on_from_the_bucket(
    mnist_dir: Path, tmp_path: Path, place: str, undisturbed_sha256: str
) -> None:
    """With all its memory gone, a job goes on from its newest snapshot in the bucket, in another working directory."""
    plan = Plan(tmp_path / "faults", Fault(kind="hold", place="step", ranks=(0,), step=12))
    options = (*EVERY_5, place, LOCAL_LOG)
    with Job(tmp_path / "lost", mnist_dir, plain(), options, plan.environment) as job:
        plan.wait()
        saved = eventually(lambda: job.events("snapshot.saved")[1:])[-1]
        assert saved["step"] == 10
        job.kill_all()
    with Job(tmp_path / "elsewhere", mnist_dir, plain(), options) as job:
        finished = job.finish()
        (resumed,) = job.events("run.resumed")
    assert (resumed["source"], resumed["path"], resumed["step"]) == ("storage", saved["path"], 10)
    assert saved["path"].startswith("s3://")
    assert finished["weights_sha256"] == undisturbed_sha256


def test_a_server_that_goes_in_the_middle_of_a_save(
    mnist_dir: Path, tmp_path: Path, place: str, proxy: FaultyProxy, undisturbed_sha256: str
) -> None:
    """It is back for a later try: every snapshot is saved, none is failed, and the result is the same."""
    gone = proxy.add(Spoiled(kind="cut_request", of=r"PUT .*step-00000005\.pt", times=2))
    deaf = proxy.add(Spoiled(kind="answer", of=r"PUT .*step-00000016\.json", times=2, status=503))
    options = (*EVERY_5, place, LOCAL_LOG)
    with Job(tmp_path, mnist_dir, plain(), options) as job:
        finished = job.finish()
        told = {event["step"] for name in ("snapshot.saved", "snapshot.superseded") for event in job.events(name)}
        assert job.events("snapshot.failed") == []
        assert {5, 32} <= {event["step"] for event in job.events("snapshot.saved")}
    assert told == {5, 10, 15, 16, 20, 25, 30, 32}
    assert gone.num_fired == 2
    assert deaf.num_fired in (0, 2)  # 0 where that snapshot was superseded
    assert finished["weights_sha256"] == undisturbed_sha256


def test_a_server_that_is_killed_in_the_middle_of_a_save(
    mnist_dir: Path,
    tmp_path: Path,
    server: S3Server,
    undisturbed_sha256: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dead for some tries of the job and back with its contents, it has all the snapshots that it would have had.

    None has failed, the last one is whole, and the result is the same.
    """
    assert server.port  # whose environment is left as it is, but for the endpoint
    location = "s3://bucket/runs/one"
    options = (*EVERY_5, f"--snapshot_path={location}", LOCAL_LOG)
    with S3Server(tmp_path / "journal") as mortal, FaultyProxy(mortal.port) as proxy:
        mortal.request("PUT", "bucket")
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        held = proxy.add(Spoiled(kind="hold_request", of=r"PUT .*step-00000005\.pt"))
        with Job(tmp_path / "job", mnist_dir, plain(), options) as job:
            assert held.is_halfway.wait(90), job.output
            mortal.kill()
            num_before = len(proxy.requests)
            eventually(lambda: len(proxy.requests) >= num_before + 3, what="tries of the job")
            assert [event for event in job.events("snapshot.saved") if event["tier"] == "storage"] == []
            mortal.restart()
            finished = job.finish()
            saved = {event["step"] for event in job.events("snapshot.saved")}
            superseded = {event["step"] for event in job.events("snapshot.superseded")}
            assert job.events("snapshot.failed") == []
        assert {5, 32} <= saved
        assert saved | superseded == {5, 10, 15, 16, 20, 25, 30, 32}
        assert held.num_fired == 1
        newest = find(location, named="location")
        assert (newest.state["step"], newest.num_damaged_newer) == (32, 0)
        assert look(location, verify=True).verdict == "whole"
    assert finished["weights_sha256"] == undisturbed_sha256 == weights_sha256(newest.state["model"])


def refused(job: Job) -> str:
    """Return the one line with which a job ends with status 2 before its first step, within seconds.

    Those are at most 15 of asking again, and what a busy machine makes of 3 for the start.
    """
    assert job.wait(within=45) == 2, job.output
    (line,) = [text for text in job.output.splitlines() if text.startswith("elastic_mnist: error: ")]
    assert "Traceback" not in job.output
    assert job.events("run.started") == []
    return line


def test_a_missing_bucket_is_refused(mnist_dir: Path, tmp_path: Path, server: S3Server) -> None:
    """A typo in the bucket's name costs seconds, and is named."""
    assert server.endpoint
    with Job(tmp_path, mnist_dir, plain(), (*SMALL, "--snapshot_path=s3://no-such-bucket/runs", LOCAL_LOG)) as job:
        line = refused(job)
    assert "--snapshot_path s3://no-such-bucket/runs" in line
    assert "bucket" in line


@pytest.mark.parametrize("launcher", [plain(), standalone(2)], ids=["python", "standalone"])
def test_wrong_credentials_are_refused(
    launcher: tuple[str, ...], mnist_dir: Path, tmp_path: Path, place: str, server: S3Server
) -> None:
    """A key that the server does not know is no empty place, and no reason to restart."""
    server.require_signatures(required=True)
    try:
        with Job(tmp_path, mnist_dir, launcher, (*SMALL, place, LOCAL_LOG)) as job:
            line = refused(job)
    finally:
        server.require_signatures(required=False)
    assert place.replace("=", " ") in line
    assert "403" in line or "InvalidAccessKeyId" in line


def test_an_endpoint_where_nobody_listens_is_refused(
    mnist_dir: Path, tmp_path: Path, place: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is named."""
    assert server.endpoint
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with Job(tmp_path, mnist_dir, plain(), (*SMALL, place, LOCAL_LOG)) as job:
        line = refused(job)
    assert "http://127.0.0.1:9" in line


def test_a_store_that_is_away_when_a_worker_dies(
    mnist_dir: Path, tmp_path: Path, place: str, proxy: FaultyProxy, undisturbed_sha256: str
) -> None:
    """The job goes on from memory and says so; once the store is back, snapshots are saved there again."""
    kill = Fault(kind="hold", place="step", ranks=(1,), step=12)
    look = Fault(kind="hold", place="step", ranks=(0,), step=14, generation=None)
    plan = Plan(tmp_path / "faults", kill, look, has_pauses=False)
    options = (*EVERY_5, place, LOCAL_LOG, "--max_snapshot_failures=100")
    with Job(tmp_path / "job", mnist_dir, standalone(2), options, plan.environment) as job:
        plan.wait(0)
        eventually(lambda: [event for event in job.events("snapshot.saved") if event["step"] == 10])
        away = proxy.add(Spoiled(kind="reset", times=10**6))
        job.kill(1)
        plan.wait(1)
        assert away.num_fired > 0
        (resumed,) = job.events("run.resumed")
        assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("memory", 12, 0)
        unreachable: list[Event] = job.events("snapshot.store_unreachable")
        assert unreachable
        assert all(event["level"] == "warning" and "--snapshot_path s3://" in event["reason"] for event in unreachable)
        proxy.heal()
        plan.let_go(1)
        finished = job.finish()
        saved = [event for event in job.events("snapshot.saved") if event["generation"] == resumed["generation"]]
    assert saved[-1]["step"] == 32
    assert finished["weights_sha256"] == undisturbed_sha256
