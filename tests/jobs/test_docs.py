"""README.md and docs/ hold: each command runs or parses, links lead somewhere, files and events are described.

The README's kill is a real job, made once with tiny sizes; the commands that look at it run in its directory.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Job, plain, standalone
from torch.distributed.run import parse_args

from elastic_mnist import settings
from elastic_mnist.chaos.plan import KINDS
from elastic_mnist.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = re.compile(r"(scripts/\w+|torchrun|python|pip|pkill|elastic-mnist|grep|tail)\s\S")
LOOKING = re.compile(r"grep|tail|elastic-mnist (?!chaos)")
"""Commands that look at what a job has left; they run."""

TINY = ("--dataset=synthetic", "--train_samples=1920", "--test_samples=64", "--global_batch_size=32")
TOP = {".ci", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "LICENSE", "README.md"}
TOP |= {"docs", "elastic_mnist", "pyproject.toml", "scripts", "tests"}
EVENT = re.compile(r"\b(?:run|train|epoch|snapshot|store|memory|world|ledger|step|worker|peer|warden|data)\.[a-z_]+")


def commands_of(page: Path) -> Iterator[str]:
    """Return the commands in a page's code blocks and code spans, without what is said beside them."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"(?:^ {4,}\S.*\n)+", text, re.MULTILINE)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        yield re.split(r"\s{2,}", re.sub(r"(\S) +(?=--)", r"\1 ", line.strip()))[0]
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


COMMANDS = sorted({command for page in PAGES for command in commands_of(page) if PROGRAM.match(command)})


def command_with(*parts: str) -> str:
    """Return the only command that has all of some parts."""
    (found,) = [command for command in COMMANDS if all(part in command for part in parts)]
    return found


def training_of(command: str) -> list[str]:
    """Return the options behind the module's name."""
    words = shlex.split(command)
    return words[words.index("elastic_mnist") + 1 :]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the README's job, killed as it says, and of the undisturbed one beside it."""
    directory = tmp_path_factory.mktemp("readme")
    (directory / "snapshots").symlink_to("killed")  # where `Job` looks for events
    launch = command_with("-m elastic_mnist", "--sample_log ledger")
    with Job(directory, directory, standalone(2), [*training_of(launch), *TINY]) as job:
        job.wait_for_step(2)
        youngest = " ".join(job.worker(1).cmdline())
        for command in COMMANDS:
            if command.startswith("pkill"):
                pattern = shlex.split(command)[-1]
                of_workers, of_agents = re.search(pattern, youngest), re.search(pattern, launch)
                assert bool(of_workers) != bool(of_agents), command
        job.kill(1)
        job.finish()
        (resumed,) = job.events("run.resumed")
        assert (resumed["source"], resumed["num_lost_steps"]) == ("memory", 0)
    undisturbed = command_with("python", "--snapshot_path calm")
    with Job(directory, directory, plain(), [*training_of(undisturbed), *TINY]) as job:
        assert job.wait() == 0
    return directory


def test_the_commands_that_look_at_a_job_run(
    killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What inspects, verifies, audits, exports or searches finds what the pages say, on the README's own job."""
    monkeypatch.chdir(killed)
    for command in filter(LOOKING.match, COMMANDS):
        words = shlex.split(command.replace("PATH_OR_URL", "killed"))
        if words[0] == "elastic-mnist":
            assert cli.main(words[1:]) == 0, command
        else:
            subprocess.run(["bash", "-ec", f"set -o pipefail; {command}"], check=True, capture_output=True)
    assert "equal     weights, optimizer and position, bit for bit" in capsys.readouterr().out


@pytest.mark.parametrize("command", [command for command in COMMANDS if not LOOKING.match(command)])
def test_a_command_is_possible(command: str) -> None:
    """Programs, files, markers, extras and options that a command names are there."""
    program, *words = shlex.split(command)
    if program in ("torchrun", "python"):
        if program == "torchrun":
            assert parse_args(words).training_script == "elastic_mnist"
        settings.parse(training_of(command))
    elif program == "elastic-mnist":
        options = cli._parser().parse_args(words)
        assert options.tool == "chaos"
        assert {*options.kinds.split(",")} <= {*KINDS}
    elif program == "pip":
        (extra,) = re.findall(r"\[(\w+)\]", command) or ["dependencies"]
        assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
    elif program.startswith("scripts/"):
        assert (ROOT / program).is_file()
        _check_script(program, words)
    else:
        assert program == "pkill"  # see `killed`


def _check_script(program: str, words: list[str]) -> None:
    if program == "scripts/bench":
        assert (ROOT / f"scripts/bench_{words[0]}.py").is_file()
    elif program == "scripts/test":
        paths = [ROOT / word for word in words if "/" in word]
        assert all(path.exists() for path in paths), words
        if "-m" in words:
            marker = words[words.index("-m") + 1]
            assert f'\n  "{marker}: ' in (ROOT / "pyproject.toml").read_text()
            assert all(f"mark.{marker}" in path.read_text() for path in paths)
    elif program == "scripts/train" and words not in (["ARGS"], ["--help"]):
        launcher, training = (
            (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else ([], words)
        )
        parse_args([*launcher, "-m", "elastic_mnist"])
        settings.parse(training)


def test_what_a_job_leaves_is_described(killed: Path) -> None:
    """Each key of its events, its run record, its manifest and its snapshot stands in formats.md."""
    described = set(re.findall(r"`([a-z_0-9]+)`", (ROOT / "docs/formats.md").read_text()))
    (data,) = (killed / "killed").glob("*.pt")
    state: dict[str, Any] = torch.load(data, weights_only=True)
    record = json.loads((killed / "killed/run.json").read_text())
    manifest = json.loads(data.with_suffix(".json").read_text())
    events = [json.loads(line) for line in (killed / "killed/events.jsonl").read_text().splitlines()]
    for content in (
        state,
        state["progress"],
        state["versions"],
        record,
        record["contract"],
        record["holder"],
        manifest,
    ):
        assert {*content} <= described
    for event in events:
        assert {*event} <= described, event


def test_every_event_is_described() -> None:
    """The table of events in formats.md has those that the code logs, and no other."""
    table = re.findall(r"^\| (`[a-z_]+\..*?) \|", (ROOT / "docs/formats.md").read_text(), re.MULTILINE)
    described = {name for cell in table for name in EVENT.findall(cell) if name != "run.json"}
    source = "".join(path.read_text() for path in (ROOT / "elastic_mnist").rglob("*.py") if "chaos" not in path.parts)
    logged = set(re.findall(rf'"({EVENT.pattern})[" ]', source)) - {"run.json"}
    assert described == logged


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_tests_that_a_page_names_are_there(page: Path) -> None:
    """Each link leads to a file, and to a heading where it names one; each test that is named exists."""
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
        other = page.parent / target if target else page
        assert other.is_file(), target
        headings = re.findall(r"^#+ (.*)", other.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{target}#{anchor}"
    for name in re.findall(r"\b(?:unit|jobs)/[\w/]*test_\w+\.py", text):
        assert (ROOT / "tests" / name).is_file(), name


def test_modules_that_the_architecture_names_are_there() -> None:
    """Each module that the page names, but for the table of an old commit, is in the package."""
    text = (ROOT / "docs/architecture.md").read_text().partition("### Before")[0]
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        assert any((folder / name).is_file() for folder in (ROOT / "elastic_mnist", ROOT / "tests")), name


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    """A first reader has 150 lines, and finds each page of docs/ from there."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert {page.name for page in PAGES[1:]} <= set(re.findall(r"\(docs/(\w+\.md)", text))


def test_the_top_level_stays_small() -> None:
    """Nothing is committed at the top that is not on the list."""
    listing = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False).stdout
    assert {line.partition("/")[0] for line in listing.splitlines()} <= TOP
