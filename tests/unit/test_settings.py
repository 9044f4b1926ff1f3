"""The options: their names, defaults and limits, and the one line with which each wrong value is told."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as bounds
from hypothesis import strategies as st

from elastic_mnist.errors import SettingsError
from elastic_mnist.settings import Settings, local_path, parse

OPTIONS = {option.name: option for option in dataclasses.fields(Settings)}

DOCUMENTED = {
    "epochs": 5,
    "batch_size": 512,
    "global_batch_size": None,
    "micro_batch_size": None,
    "lr": 1e-3,
    "lr_schedule": "constant",
    "seed": 0,
    "save_every": 1,
    "save_every_steps": 0,
    "keep_last": 3,
    "snapshot_path": "snapshots",
    "resume_from": None,
    "data_dir": Path("data"),
    "dataset": "mnist",
    "train_samples": None,
    "test_samples": None,
    "device": "auto",
    "precision": "fp32",
    "threads": None,
    "gradient_sync": "exact",
    "hang_timeout": 60,
    "event_log": None,
    "sample_log": None,
    "log_format": "auto",
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_default_is_the_documented_one(name: str) -> None:
    """Without arguments each option has the default of the documentation's table."""
    assert getattr(parse([]), name) == DOCUMENTED[name]


def test_no_arguments_are_the_plain_settings() -> None:
    """The command line adds nothing of its own."""
    assert parse([]) == Settings()


@pytest.mark.parametrize("argument", ["--save_every_steps", "--save-every-steps", "--save_every-steps"])
def test_a_name_may_have_hyphens_or_underscores(argument: str) -> None:
    """Either spelling, and both at once, name the same option."""
    assert parse([argument, "7"]).save_every_steps == 7


def test_a_value_may_follow_an_equals_sign() -> None:
    """--name=value is --name value, and hyphens of the value stay."""
    assert parse(["--snapshot-path=my-run/with_both"]).snapshot_path == "my-run/with_both"


def test_a_value_keeps_its_hyphens() -> None:
    """Only names are respelled, not the values after them."""
    assert parse(["--snapshot_path", "s3://my-bucket/a-b"]).snapshot_path == "s3://my-bucket/a-b"


@pytest.mark.parametrize("name", ["snapshot_path", "resume_from"])
def test_a_chain_of_file_systems_is_refused(name: str) -> None:
    """A cache before a store would be taken for a directory of that name; it is told, and the way out."""
    location = "simplecache::s3://bucket/run"
    with pytest.raises(SettingsError, match=f"^--{name} {location}: chained .* name the store itself$"):
        parse([f"--{name}={location}"])


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("epochs", "7", 7),
        ("global_batch_size", "96", 96),
        ("lr", "3e-4", 3e-4),
        ("lr_schedule", "cosine", "cosine"),
        ("data_dir", "/mnt/data", Path("/mnt/data")),
        ("event_log", "log.jsonl", Path("log.jsonl")),
        ("resume_from", "old/step-00000005.pt", "old/step-00000005.pt"),
        ("hang_timeout", "2.5", 2.5),
    ],
)
def test_a_value_has_its_option_s_type(name: str, text: str, value: object) -> None:
    """Numbers are read as numbers, paths as paths, and text as it is."""
    found = getattr(parse([f"--{name}", text]), name)
    assert (type(found), found) == (type(value), value)


def test_a_switch_needs_no_value() -> None:
    """--accept_changes alone turns it on."""
    assert parse(["--accept_changes"]).accept_changes


@pytest.fixture(scope="module")
def help_text() -> str:
    """What --help prints, its line breaks undone."""
    done = subprocess.run(
        [sys.executable, "-c", "from elastic_mnist.settings import parse; parse(['--help'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    return re.sub(r"\s+", " ", done.stdout)


@pytest.mark.parametrize("name", OPTIONS)
def test_help_explains_each_option(name: str, help_text: str) -> None:
    """Its text stands behind its name."""
    text = re.sub(r"\s+", " ", OPTIONS[name].metadata["text"])
    assert re.search(rf"--{name} (\{{[\w,]+\}} |[A-Z]+ )?{re.escape(text)}", help_text)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "accept_changes"])
def test_help_gives_each_option_its_default(name: str, help_text: str) -> None:
    """The default, or what is done without a value, stands behind the option's text."""
    text = re.sub(r"\s+", " ", OPTIONS[name].metadata["text"])
    shown = OPTIONS[name].metadata["shown_default"] or OPTIONS[name].default
    assert shown is not None
    assert f"{text} (default: {shown})" in help_text


def refusal(*arguments: str) -> str:
    """Return the one line with which arguments are refused."""
    with pytest.raises(SettingsError) as caught:
        parse(arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("value", ["five", "1.5", "", "0x10", "1e3"])
def test_what_is_no_whole_number_is_told(value: str) -> None:
    """The line names option and value, and says what is wanted."""
    assert refusal("--epochs", value) == f"--epochs: {value!r} is not a whole number"


@pytest.mark.parametrize("value", ["fast", "", "1,5"])
def test_what_is_no_number_is_told(value: str) -> None:
    """The line names option and value, and says what is wanted."""
    assert refusal("--lr", value) == f"--lr: {value!r} is not a number"


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("epochs", "0", "at least 1"),
        ("epochs", "-3", "at least 1"),
        ("batch_size", "0", "at least 1"),
        ("global_batch_size", "0", "at least 1"),
        ("micro_batch_size", "-1", "at least 1"),
        ("seed", "-1", "at least 0"),
        ("seed", str(2**62 + 1), f"at most {2**62}"),
        ("save_every", "-1", "at least 0"),
        ("save_every_steps", "-1", "at least 0"),
        ("keep_last", "0", "at least 1"),
        ("train_samples", "0", "at least 1"),
        ("test_samples", "0", "at least 1"),
        ("threads", "0", "at least 1"),
        ("hang_timeout", "0.5", "at least 1"),
        ("hang_timeout", "nan", "at least 1"),
        ("lr", "0.0", "a finite number above 0"),
        ("lr", "-0.1", "a finite number above 0"),
        ("lr", "nan", "a finite number above 0"),
        ("lr", "inf", "a finite number above 0"),
    ],
)
def test_a_value_beyond_its_limit_is_told(name: str, value: str, limit: str) -> None:
    """The line names option, value and limit."""
    assert refusal(f"--{name}={value}") == f"--{name} {value}: must be {limit}"


@pytest.mark.parametrize("name", ["lr_schedule", "dataset", "device", "precision", "gradient_sync", "log_format"])
def test_a_value_that_is_no_choice_is_told(name: str) -> None:
    """The line names option and value, and lists all choices."""
    message = refusal(f"--{name}", "other")
    assert message.startswith(f"--{name}")
    assert "other" in message
    assert all(choice in message for choice in OPTIONS[name].metadata["choices"])


@pytest.mark.parametrize(
    ("argument", "meant"),
    [("--epoch", "--epochs"), ("--batch-sise", "--batch_size"), ("--snapshots_path", "--snapshot_path")],
)
def test_an_unknown_option_is_told_with_the_nearest_one(argument: str, meant: str) -> None:
    """The line names what was written and what was meant; a shortened name is not guessed."""
    for arguments in ([argument, "1"], [f"{argument}=1"]):
        assert (
            refusal(*arguments)
            == f"{argument.replace('-', '_').replace('__', '--', 1)}: no such option; did you mean {meant}?"
        )


def test_an_unknown_option_like_no_other_is_told_with_the_way_to_all() -> None:
    """Where nothing is near, the line points to --help."""
    assert refusal("--zzzzzz", "1") == "--zzzzzz: no such option; --help lists the options"


def test_a_word_without_an_option_is_told() -> None:
    """A stray argument is named."""
    assert refusal("train").startswith("train: no such option")


@pytest.mark.parametrize("name", ["epochs", "lr", "snapshot_path", "device"])
def test_a_missing_value_is_told(name: str) -> None:
    """The line names the option that lacks its value."""
    assert refusal(f"--{name}") == f"--{name}: expected one argument"


@pytest.mark.parametrize("name", ["snapshot_path", "resume_from"])
def test_an_empty_location_is_told(name: str) -> None:
    """An empty text names no place."""
    assert refusal(f"--{name}", "") == f"--{name}: must not be empty"


@pytest.mark.parametrize("name", ["data_dir", "event_log", "sample_log"])
def test_an_empty_path_is_told(name: str) -> None:
    """An empty path names no place either: it is not quietly the working directory."""
    assert refusal(f"--{name}", "").startswith(f"--{name}")


def test_a_wrong_value_is_told_without_a_command_line_too() -> None:
    """The dataclass itself checks: no settings with a wrong value exist."""
    with pytest.raises(SettingsError, match=r"^--keep_last 0: must be at least 1$"):
        Settings(keep_last=0)


@given(epochs=st.integers(1, 10**9), lr=st.floats(1e-30, 1e30), seed=st.integers(0, 2**62))
@bounds(max_examples=100, deadline=None)
def test_every_value_within_its_limits_is_read_as_it_was_written(epochs: int, lr: float, seed: int) -> None:
    """Numbers survive the command line."""
    found = parse([f"--epochs={epochs}", f"--lr={lr!r}", f"--seed={seed}"])
    assert (found.epochs, found.lr, found.seed) == (epochs, lr, seed)


@pytest.mark.parametrize("prefix", ["", "file://", "local://"])
def test_the_event_log_lies_with_local_snapshots(prefix: str, tmp_path: Path) -> None:
    """A directory, also as a URL, holds its events.jsonl."""
    assert Settings(snapshot_path=f"{prefix}{tmp_path}/run").event_log_path == tmp_path / "run" / "events.jsonl"


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://run", "gs://bucket/run"])
def test_the_event_log_of_an_object_store_lies_in_the_working_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines cannot be appended to an object."""
    monkeypatch.chdir(tmp_path)
    assert Settings(snapshot_path=url).event_log_path == tmp_path / "events.jsonl"


def test_an_event_log_that_is_asked_for_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the snapshots are, as an absolute path."""
    monkeypatch.chdir(tmp_path)
    assert Settings(snapshot_path="s3://b", event_log=Path("my.jsonl")).event_log_path == tmp_path / "my.jsonl"


@pytest.mark.parametrize("location", ["snapshots", "/a/b", "./a", "a:b", "c/d://e", "file:///a/b"])
def test_what_is_no_url_is_a_local_path(location: str) -> None:
    """Only a scheme at the beginning makes a URL."""
    assert local_path(location) == Path(location.removeprefix("file://"))


def test_settings_are_plain_for_json() -> None:
    """Paths become text, and nothing else changes."""
    plain = Settings(data_dir=Path("/mnt/data"), epochs=7).as_plain()
    assert (plain["data_dir"], plain["epochs"], plain["event_log"]) == ("/mnt/data", 7, None)
    assert plain.keys() == OPTIONS.keys()


def test_parsing_imports_no_torch() -> None:
    """A wrong option is told before anything heavy is loaded."""
    code = (
        "import sys; from elastic_mnist.settings import parse; parse(['--epochs', '3']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
