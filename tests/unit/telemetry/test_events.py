"""The event log: one JSON object a line, from whoever has the word, and no line lost or torn."""

import errno
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import structlog
from places import Place

from elastic_mnist.telemetry import events
from elastic_mnist.telemetry.events import configure, console_only, identify, log

HEAD = ["timestamp", "level", "event", "run_id", "generation", "rank", "world_size"]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave the process's event log as it was."""
    package = logging.getLogger("elastic_mnist")
    before = (package.handlers, package.level, package.propagate, dict(events._identity.keys), events._file)
    yield
    structlog.reset_defaults()
    package.handlers, package.level, package.propagate, events._identity.keys, events._file = before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log file in a directory that does not exist yet."""
    return tmp_path / "logs" / "events.jsonl"


def no_json(constant: str) -> NoReturn:
    """Refuse what Python's parser takes beside JSON."""
    raise AssertionError(f"{constant} is not JSON")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a log, after a check that each line is one."""
    content = path.read_bytes()
    assert content.endswith(b"\n")
    objects = [json.loads(line, parse_constant=no_json) for line in content[:-1].split(b"\n")]
    assert all(isinstance(item, dict) for item in objects)
    return objects


def rank(number: int, path: Path | None, *, world_size: int = 4, log_format: str = "json") -> None:
    """Be a rank of a world."""
    configure(path, rank=number, world_size=world_size, log_format=log_format)


def test_each_event_is_one_object_on_a_line(path: Path) -> None:
    """Two events are two lines, with their names and keys, a line break within a value notwithstanding."""
    rank(0, path)
    log.info("run.started", epochs=5)
    log.warning("snapshot.rejected", reason="two\nlines")
    first, second = lines_of(path)
    assert (first["event"], first["level"], first["epochs"]) == ("run.started", "info", 5)
    assert (second["event"], second["level"], second["reason"]) == ("snapshot.rejected", "warning", "two\nlines")


def test_each_line_begins_with_the_documented_keys(path: Path) -> None:
    """Those seven are in every line, known already or not."""
    rank(0, path)
    log.info("run.started", epochs=5)
    identify(run_id="abc", generation=2)
    log.info("run.resumed")
    first, second = lines_of(path)
    assert list(first) == [*HEAD, "epochs"]
    assert list(second) == HEAD


def test_a_line_says_who_speaks(path: Path) -> None:
    """Rank and world size as configured, run and generation as identified."""
    rank(0, path, world_size=4)
    identify(run_id="abc", generation=2)
    log.info("run.started")
    (line,) = lines_of(path)
    assert [line[key] for key in HEAD[3:]] == ["abc", 2, 0, 4]


def test_what_is_told_while_a_start_is_decided_is_of_the_recorded_run(path: Path, tmp_path: Path) -> None:
    """A damaged snapshot is told under the run's name and its last generation, before the next one is claimed."""
    place = Place.at_step_5(tmp_path)
    before = place.record()
    (place.directory / "step-00000005.pt").write_bytes(b"damaged")
    rank(0, path)
    identify(run_id=None, generation=None)
    place.decide()
    (line,) = lines_of(path)
    assert (line["event"], line["run_id"], line["generation"]) == ("snapshot.rejected", before.run_id, 0)


def test_a_timestamp_is_of_utc(path: Path) -> None:
    """ISO 8601 with the offset of UTC."""
    rank(0, path)
    log.info("run.started")
    (line,) = lines_of(path)
    assert datetime.fromisoformat(line["timestamp"].replace("Z", "+00:00")).utcoffset() == timedelta(0)


def test_rank_0_tells_all(path: Path) -> None:
    """Infos, warnings and errors."""
    rank(0, path)
    log.info("a")
    log.warning("b")
    log.error("c")
    assert [line["event"] for line in lines_of(path)] == ["a", "b", "c"]


def test_other_ranks_tell_warnings_and_errors_alone(path: Path) -> None:
    """An info of rank 1 is not in the file."""
    rank(1, path)
    log.info("a")
    log.warning("b")
    log.error("c")
    assert [(line["event"], line["rank"]) for line in lines_of(path)] == [("b", 1), ("c", 1)]


def test_other_ranks_speak_on_standard_error(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is rank 0's."""
    rank(1, path)
    log.info("a")
    log.warning("b")
    out, err = capsys.readouterr()
    assert out == ""
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["b"]


def test_standard_output_has_the_lines_of_the_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In json format, the same objects."""
    rank(0, path)
    log.info("run.started", epochs=5)
    log.warning("b")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines_of(path)


def test_a_console_shows_what_people_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Event and values, and not the long ones that the file has."""
    rank(0, path, log_format="console")
    log.info("run.started", epochs=5, argv=["--lr=0.125"])
    shown = capsys.readouterr().out
    assert "run.started" in shown
    assert "epochs" in shown
    assert "0.125" not in shown
    assert lines_of(path)[0]["argv"] == ["--lr=0.125"]


def test_a_log_is_appended_to(path: Path) -> None:
    """A later life leaves the lines of an earlier one."""
    rank(0, path)
    log.info("a")
    before = path.read_bytes()
    rank(0, path)
    log.info("b")
    assert path.read_bytes().startswith(before)
    assert [line["event"] for line in lines_of(path)] == ["a", "b"]


def test_a_process_with_nothing_to_say_makes_no_file(path: Path) -> None:
    """Configuring, and an info of another rank, leave no trace."""
    rank(1, path)
    log.info("a")
    assert not path.parent.exists()


def test_lines_of_several_processes_are_not_torn(path: Path) -> None:
    """Four processes write 200 lines of up to 9 kB each at once: each line is whole, and none is missing."""
    code = """
import sys
from pathlib import Path
from elastic_mnist.telemetry.events import configure, log
configure(Path(sys.argv[1]), rank=int(sys.argv[2]), world_size=4, log_format="json")
print("ready", flush=True)
sys.stdin.readline()
for number in range(200):
    log.warning("test.line", number=number, text=str(number % 10) * (number * 45))
"""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(1, 5)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:  # all of them before the first is waited for
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    found = [(line["rank"], line["number"], line["text"]) for line in lines_of(path)]
    assert sorted(found) == [(r, n, str(n % 10) * (n * 45)) for r in range(1, 5) for n in range(200)]


@pytest.mark.parametrize("kind", ["a directory", "below a file", "a full disk"])
def test_a_log_that_cannot_be_written_is_told_once(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Events go on without an exception; one line on standard error names the file."""
    (tmp_path / "file").touch()
    path = {"a directory": tmp_path, "below a file": tmp_path / "file" / "x.jsonl", "a full disk": Path("/dev/full")}
    rank(0, path[kind])
    log.info("a")
    log.info("b")
    out, err = capsys.readouterr()
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["a", "b"]
    (line,) = err.splitlines()
    assert line.startswith(f"elastic_mnist: warning: event log {path[kind]}: ")


def test_a_disk_that_was_full_does_not_tear_the_next_lifes_line(path: Path) -> None:
    """Where only a part of a line fitted, a later life's first line is whole all the same."""
    code = """
import resource, sys
from pathlib import Path
from elastic_mnist.telemetry.events import configure, log
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
configure(Path(sys.argv[1]), rank=0, world_size=1, log_format="json")
for number in range(10):
    log.info("test.line", number=number)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "File too large; going on without" in done.stderr
    assert path.stat().st_size == 1000  # the fault fired in the middle of a line
    rank(0, path)
    log.info("run.started")
    assert json.loads(path.read_bytes().splitlines()[-1])["event"] == "run.started"


def test_a_log_that_is_removed_is_begun_anew(path: Path) -> None:
    """What is told after somebody has removed the file, or moved it away, is in a new one."""
    rank(0, path)
    log.info("test.before")
    path.unlink()
    log.info("test.after")
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["test.after"]


def test_a_disk_that_is_full_for_a_moment_costs_that_moments_events_only(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is told when there is room again is in the log, on lines of its own; that it was full is said once."""
    rank(0, path)
    log.info("test.before")
    write, num_fired = os.write, 0

    def full(descriptor: int, data: bytes) -> int:
        nonlocal num_fired
        num_fired += 1
        if num_fired == 1:  # half a line fits
            return write(descriptor, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(os, "write", full)
        log.info("test.full")
        log.info("test.full")
    assert num_fired >= 3
    log.info("test.after")
    lines = path.read_bytes().splitlines()
    assert [json.loads(line)["event"] for line in (lines[0], lines[-1])] == ["test.before", "test.after"]
    assert capsys.readouterr().err.count("No space left on device; going on without") == 1


def test_a_reader_that_has_gone_away_is_no_error(path: Path) -> None:
    """With standard output a pipe that nobody reads, all lines reach the file and the process ends well."""
    code = """
import sys
from pathlib import Path
from elastic_mnist.telemetry.events import configure, log
configure(Path(sys.argv[1]), rank=0, world_size=1, log_format=sys.argv[2])
for number in range(50):
    log.info("test.line", number=number)
"""
    for log_format in ("json", "console"):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-c", code, str(path), log_format], stdout=writer, stderr=subprocess.PIPE, check=False
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")
    assert [line["number"] for line in lines_of(path)] == [*range(50)] * 2


def test_a_record_of_the_standard_library_becomes_an_event(path: Path) -> None:
    """What a module of the package says through `logging` is in the log: name first, the rest as its detail."""
    rank(0, path)
    logging.getLogger("elastic_mnist.agent.rendezvous").warning("rendezvous.joined at %s:%d", "host", 29500)
    (line,) = lines_of(path)
    assert (line["event"], line["level"], line["detail"]) == ("rendezvous.joined", "warning", "at host:29500")


def test_the_rule_of_ranks_holds_for_the_standard_library_too(path: Path) -> None:
    """Rank 1's infos are not told, its warnings are."""
    rank(1, path)
    logging.getLogger("elastic_mnist.data").info("data.fetched now")
    logging.getLogger("elastic_mnist.data").warning("data.damaged file")
    assert [line["event"] for line in lines_of(path)] == ["data.damaged"]


def test_other_packages_are_not_carried(path: Path) -> None:
    """Records of a foreign logger stay out of the log."""
    rank(0, path)
    log.info("a")
    logging.getLogger("elsewhere").warning("b c")
    assert [line["event"] for line in lines_of(path)] == ["a"]


def test_console_only_leaves_the_file_as_it_is(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From then on events are shown and not written."""
    rank(0, path)
    log.info("a")
    before = path.read_bytes()
    console_only()
    log.info("b")
    assert path.read_bytes() == before
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]


@pytest.mark.parametrize(
    "value",
    [Path("/a/b"), {1}, 1 + 2j, ValueError("wrong"), b"bytes"],
    ids=["path", "set", "complex", "error", "bytes"],
)
def test_a_value_that_json_does_not_know_is_told_as_text(value: object, path: Path) -> None:
    """Its str stands in the line."""
    rank(0, path)
    log.info("a", value=value)
    assert lines_of(path)[0]["value"] == str(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_number_that_json_does_not_have_leaves_the_line_json(value: float, path: Path) -> None:
    """A loss that is not finite does not make a line that other programs cannot read."""
    rank(0, path)
    log.info("a", loss=value)
    assert lines_of(path)[0]["event"] == "a"


def test_an_exception_is_part_of_its_line(path: Path) -> None:
    """A traceback is one more value, and no line of its own."""
    rank(0, path)
    try:
        int("wrong")
    except ValueError:
        log.exception("run.failed")
    (line,) = lines_of(path)
    assert "ValueError: invalid literal" in line["exception"]


def test_without_a_file_events_are_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """None is no log file, and no error."""
    rank(0, None)
    log.info("a")
    out, err = capsys.readouterr()
    assert json.loads(out)["event"] == "a"
    assert err == ""


def test_a_closed_standard_output_is_no_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file object that was closed is passed over."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    rank(0, path)
    stream.close()
    log.info("a")
    assert [line["event"] for line in lines_of(path)] == ["a"]
