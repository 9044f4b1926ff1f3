"""Files that other programs wrote: read as they were meant, or refused by the name of what does not fit."""

import argparse
import copy
import functools
import io
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import Bare, Trap, bare, saved, trained
from states import commit, small_state
from torch import Tensor, nn

from elastic_mnist.errors import SnapshotError, UsageError
from elastic_mnist.snapshots.durable import Snapshot
from elastic_mnist.snapshots.importers import Foreign, ForeignFile, read
from elastic_mnist.snapshots.lookup import find
from elastic_mnist.snapshots.state import pack
from elastic_mnist.snapshots.storage import LocalStorage, open_storage
from elastic_mnist.training.model import build

LAYERS = ("features.0", "features.2", "classifier.0", "classifier.3")
KEYS = [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]

NO_MOMENTS = "the optimizer's moments: they begin at zero"
NO_EPOCHS = "the number of finished epochs: they are counted from 0"
NO_SETTINGS = "the settings it was made under: this run's own apply"

STATE = bare().state_dict()


def wrapped(prefix: str) -> dict[str, Tensor]:
    """Return the weights with a prefix before each key."""
    return {prefix + key: value for key, value in STATE.items()}


def same_weights(found: Foreign) -> bool:
    """Whether the weights that were read are those that were saved, bit for bit."""
    return list(found.model) == KEYS and all(torch.equal(found.model[key], STATE[key]) for key in KEYS)


def refused(content: object) -> str:
    """Return the one line with which a file is refused."""
    with pytest.raises(SnapshotError) as caught:
        read(content if isinstance(content, bytes) else saved(content))
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    return message


def adam_of(network: nn.Module, **options: Any) -> torch.optim.Optimizer:  # noqa: ANN401 - what Adam takes
    """Return an Adam that has made two steps."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01, **options)
    trained(network, optimizer)
    return optimizer


@functools.cache
def adam_state() -> dict[str, Any]:
    """Return the state of an Adam that has made two steps; whoever changes it takes a copy."""
    return adam_of(bare()).state_dict()


def test_a_state_dict() -> None:
    """The weights are those of the file, and all that it lacks is named with what that means."""
    found = read(saved(STATE))
    assert same_weights(found)
    assert (found.kind, found.optimizer, found.num_epochs) == ("state_dict", None, None)
    assert found.lacking == (NO_MOMENTS, NO_EPOCHS, NO_SETTINGS)


def test_the_weights_make_the_same_network() -> None:
    """This package's network computes with them, to the bit, what the script's own network does."""
    ours = build(seed=0)
    ours.load_state_dict(read(saved(STATE)).model)
    images = torch.randn(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(images), bare()(images))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_taken_off(prefix: str) -> None:
    """What DDP and torch.compile put before each key makes no difference, in one order or the other."""
    assert same_weights(read(saved(wrapped(prefix))))
    assert same_weights(read(saved({"MODEL_STATE": wrapped(prefix), "EPOCHS_RUN": 1})))


def test_a_prefix_of_some_keys_alone_is_refused() -> None:
    """A file of which only a part is wrapped is no one network's."""
    state = {**wrapped("module."), "features.0.weight": STATE["features.0.weight"]}
    assert "has module.features.0.weight and 7 more" in refused(state)


def test_the_ddp_tutorials_snapshot() -> None:
    """EPOCHS_RUN holds the index of the epoch that was just finished, counted from 0: one more epochs are finished."""
    found = read(saved({"MODEL_STATE": STATE, "EPOCHS_RUN": 3}))
    assert same_weights(found)
    assert (found.num_epochs, found.optimizer) == (4, None)
    assert (
        "the number of finished epochs: EPOCHS_RUN 3 is the last one's index, so 4 are taken as finished"
        in found.lacking
    )
    assert NO_MOMENTS in found.lacking


def test_mingpts_snapshot() -> None:
    """`finished_epoch` counts the finished epochs, and the moments are Adam's."""
    found = read(saved({"model_state": STATE, "optimizer_state": adam_state(), "finished_epoch": 3}))
    assert same_weights(found)
    assert found.num_epochs == 3
    assert found.optimizer is not None
    assert found.lacking == (NO_SETTINGS,)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("model_state_dict", "optimizer_state_dict"), ("state_dict", "optimizer"), ("model", "optimizer")],
)
def test_other_checkpoints(model: str, optimizer: str) -> None:
    """Weights and moments are taken; `epoch`, which some scripts count and others index, is not, and that is said."""
    found = read(saved({model: STATE, optimizer: adam_state(), "epoch": 3, "loss": 0.1}))
    assert same_weights(found)
    assert found.optimizer is not None
    assert found.num_epochs is None
    (line,) = (line for line in found.lacking if line.startswith("the number of finished epochs"))
    assert "its epoch, 3, is an index in some scripts and a count in others; they are counted from 0" in line


def test_two_candidates_for_the_weights_are_refused() -> None:
    """Which of two is the network, nobody but the user knows."""
    assert "both state_dict and model" in refused({"model": STATE, "state_dict": STATE})


@pytest.mark.parametrize("content", [STATE, {"MODEL_STATE": STATE, "EPOCHS_RUN": 0}], ids=["plain", "tutorial"])
def test_a_file_of_an_old_torch(content: dict[str, Any]) -> None:
    """A file that is no zip archive, as torch wrote it before 1.6, is read like one that is."""
    data = saved(content, _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(io.BytesIO(data))
    assert same_weights(read(data))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_a_gpu(zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that lay on CUDA are read onto the CPU, where no such device is."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda _storage: "cuda:0")
        data = saved(STATE, _use_new_zipfile_serialization=zipped)
    assert b"cuda:0" in data
    found = read(data)
    assert same_weights(found)
    assert {str(tensor.device) for tensor in found.model.values()} == {"cpu"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_converted_and_told(dtype: torch.dtype) -> None:
    """The weights become fp32, each the nearest there is, and a line says so."""
    state = {key: value.to(dtype) for key, value in STATE.items()}
    found = read(saved(state))
    assert all(found.model[key].dtype == torch.float32 for key in KEYS)
    assert all(torch.equal(found.model[key], state[key].float()) for key in KEYS)
    assert f"weights in fp32: those of {dtype} were converted" in found.lacking


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_no_real_number_is_refused(dtype: torch.dtype) -> None:
    """Integers for instance are no weights; the error names key and type."""
    message = refused({**STATE, "classifier.3.bias": torch.zeros(10, dtype=dtype)})
    assert "weight classifier.3.bias is of " + str(dtype) in message


def test_weights_are_in_memory_of_their_own() -> None:
    """A weight that was a part of a larger tensor, or spread in memory, is saved again at its own size."""
    state = {**STATE, "classifier.3.weight": torch.randn(128, 1000)[:, :10].T}
    found = read(saved(state)).model["classifier.3.weight"]
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == 10 * 128 * 4
    assert torch.equal(found, state["classifier.3.weight"])


def test_parameters_are_weights_like_any() -> None:
    """A dictionary of `named_parameters()` is read, and what comes of it asks for no gradient."""
    found = read(saved(dict(bare().named_parameters())))
    assert same_weights(found)
    assert not any(tensor.requires_grad for tensor in found.model.values())


def test_another_width_is_refused_by_name() -> None:
    """The error names the key, its shape and this network's."""
    message = refused(bare(width=64).state_dict())
    assert message == "weight classifier.0.weight has the shape (64, 9216), this network's has (128, 9216)"


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(key: str) -> None:
    """Whichever of the eight it is."""
    assert f"it lacks {key};" in refused({other: value for other, value in STATE.items() if other != key})


def test_another_network_is_refused_by_its_keys() -> None:
    """The error names what is missing, what is there, and this network's own keys."""
    message = refused(nn.Linear(2, 2).state_dict())
    assert "lacks features.0.weight and 7 more and has weight and 1 more" in message
    assert message.endswith("this network's keys are features.0.weight ... classifier.3.bias")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    """One such number is enough; the error names the key."""
    state = {key: tensor.clone() for key, tensor in STATE.items()}
    state["features.2.bias"][63] = value
    assert "weight features.2.bias is not finite" in refused(state)


def test_weights_that_are_too_large_for_fp32_are_refused() -> None:
    """A number that overflows when it is converted is as bad as an infinite one."""
    assert "not finite in fp32" in refused(
        {**STATE, "classifier.3.bias": torch.full((10,), 1e300, dtype=torch.float64)}
    )


def test_a_small_file_with_a_huge_tensor_is_refused_by_its_shape() -> None:
    """Four bytes spread over 10^15 places are never laid out."""
    huge = torch.zeros(1).expand(10**8, 10**7)
    data = saved({**STATE, "classifier.0.weight": huge})
    assert len(data) < 2**20
    assert "has the shape (100000000, 10000000)" in refused(data)


def test_the_moments_are_those_of_the_file() -> None:
    """Loaded into an Adam of one's own, they make its next step the same, bit for bit, as the script's own next one."""
    network = bare()
    optimizer = adam_of(network)
    content = {"model_state": network.state_dict(), "optimizer_state": optimizer.state_dict(), "finished_epoch": 1}
    found = read(saved(content))
    ours = bare(seed=9)
    ours.load_state_dict(found.model)
    own = torch.optim.Adam(ours.parameters(), lr=0.01)
    assert found.optimizer is not None
    own.load_state_dict({**own.state_dict(), **found.optimizer})
    trained(network, optimizer)
    trained(ours, own)
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), network.parameters(), strict=True))
    fresh = bare(seed=9)
    fresh.load_state_dict(found.model)
    trained(fresh, torch.optim.Adam(fresh.parameters(), lr=0.01))
    assert not all(torch.equal(*pair) for pair in zip(ours.parameters(), fresh.parameters(), strict=True))


def test_the_moments_of_groups_find_their_parameters() -> None:
    """A script that sorts its parameters into groups, as minGPT does, numbers them otherwise; each finds its own."""
    network = bare()
    groups = [[p for p in network.parameters() if (p.ndim > 1) is is_weight] for is_weight in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    trained(network, optimizer)
    found = read(saved({"model_state": STATE, "optimizer_state": optimizer.state_dict(), "finished_epoch": 1}))
    assert found.optimizer is not None
    for index, parameter in enumerate(network.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found.optimizer["state"][index][name], optimizer.state[parameter][name])


def _changed(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["state"][5].update(changes)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda state: state["state"].pop(7), "a state for 7 parameters, this network has 8"),
        (lambda state: state["state"].clear(), "a state for 0 parameters, this network has 8"),
        (lambda state: state.pop("state"), "no optimizer's state_dict"),
        (lambda state: state["state"][5].pop("step"), "not Adam's"),
        (_changed(exp_avg=torch.zeros(127)), r"exp_avg of shape \(127,\)"),
        (_changed(exp_avg=torch.zeros(32)), r"exp_avg of shape \(32,\)"),
        (_changed(exp_avg_sq=torch.zeros(127)), r"exp_avg_sq has the shape \(127,\)"),
        (_changed(exp_avg_sq=torch.full((128,), -1.0)), "exp_avg_sq is below 0"),
        (_changed(exp_avg=torch.full((128,), math.nan)), "exp_avg is not finite"),
        (_changed(exp_avg=[0.0]), "not Adam's"),
        (_changed(step=-1), "step is -1"),
        (_changed(step=math.nan), "step is nan"),
        (_changed(step=torch.zeros(2)), "step is a Tensor"),
        (_changed(step="many"), "step is 'many'"),
    ],
)
def test_moments_that_do_not_fit_are_left_out(damage: Callable[[dict[str, Any]], object], reason: str) -> None:
    """The weights serve all the same; a line says why the moments do not, and that they begin at zero."""
    state = copy.deepcopy(adam_state())
    damage(state)
    found = read(saved({"model_state": STATE, "optimizer_state": state, "finished_epoch": 1}))
    assert same_weights(found)
    assert found.optimizer is None
    (line,) = (line for line in found.lacking if line.startswith("optimizer's moments that fit"))
    assert re.search(reason, line)
    assert line.endswith("they begin at zero")


@pytest.mark.parametrize(
    "optimizer", [lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9), torch.optim.Adadelta]
)
def test_another_optimizers_state_is_left_out(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Momentum alone is nothing that Adam can go on from."""
    network = bare()
    other = optimizer(network.parameters())
    trained(network, other)
    found = read(saved({"model": STATE, "optimizer": other.state_dict()}))
    assert found.optimizer is None
    assert any("not Adam's" in line for line in found.lacking)


def test_what_adam_has_more_is_named() -> None:
    """AMSGrad's third moment is not taken, and a line says so."""
    network = bare()
    found = read(saved({"model": STATE, "optimizer": adam_of(network, amsgrad=True).state_dict()}))
    assert found.optimizer is not None
    assert set(found.optimizer["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert any("max_exp_avg_sq" in line for line in found.lacking)


def test_a_step_that_is_a_number_is_adams() -> None:
    """Before torch 1.12 the count of steps was no tensor."""
    state = copy.deepcopy(adam_state())
    for entry in state["state"].values():
        entry["step"] = int(entry["step"])
    found = read(saved({"model": STATE, "optimizer": state}))
    assert found.optimizer is not None
    assert torch.equal(found.optimizer["state"][7]["step"], torch.tensor(2.0))


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", [1], torch.tensor(3), 10**30, 10**6 + 1])
@pytest.mark.parametrize(("model", "epochs"), [("MODEL_STATE", "EPOCHS_RUN"), ("model_state", "finished_epoch")])
def test_a_number_of_epochs_that_is_none_is_refused(model: str, epochs: str, value: object) -> None:
    """A position is not guessed; the error names the field."""
    assert f"its {epochs} is " in refused({model: STATE, epochs: value})


@pytest.mark.parametrize(("model", "epochs"), [("MODEL_STATE", "EPOCHS_RUN"), ("model_state", "finished_epoch")])
def test_a_number_of_epochs_that_is_missing_is_named(model: str, epochs: str) -> None:
    """The weights alone, under such a script's key, are taken."""
    for content in ({model: STATE}, {model: STATE, epochs: None}):
        found = read(saved(content))
        assert found.num_epochs is None
        assert NO_EPOCHS in found.lacking


@pytest.mark.parametrize("form", ["zip", "old", "pickle 0", "pickle 2", "pickle 5", "in a checkpoint"])
def test_a_hostile_file_is_refused_and_nothing_of_it_is_run(form: str, tmp_path: Path) -> None:
    """Whatever its form, the error says in one line what it wants to run, and the way out."""
    trap = Trap(tmp_path / "caught")
    if form.startswith("pickle"):
        data = pickle.dumps(trap, protocol=int(form[-1]))
    elif form == "in a checkpoint":
        data = saved({"MODEL_STATE": STATE, "EPOCHS_RUN": trap})
    else:
        data = saved(trap, _use_new_zipfile_serialization=form == "zip")
    message = refused(data)
    assert message == (
        "not readable as plain data: it wants to run 'os.system'; load it where you trust it, and save its "
        "state_dict() alone"
    )
    assert not (tmp_path / "caught").exists()
    if form.startswith("pickle"):
        pickle.loads(data)  # noqa: S301 - the trap is one: loaded without care, it snaps
    else:
        torch.load(io.BytesIO(data), weights_only=False)
    assert (tmp_path / "caught").exists()


def test_a_whole_module_is_refused() -> None:
    """A pickled network would run its class; the error names it and asks for the state_dict."""
    message = refused(bare())
    assert "it wants to run 'networks.Bare'" in message
    assert "save its state_dict()" in message


def test_options_in_a_checkpoint_are_refused_by_name() -> None:
    """Argparse's namespace, which many scripts save beside the weights, is no plain data."""
    assert "'argparse.Namespace'" in refused({"model": STATE, "args": argparse.Namespace(lr=1)})


def _archive(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in members.items():
            file.writestr(f"archive/{name.replace('__', '.')}", data)
    return buffer.getvalue()


DEEP = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="0 bytes"),
        pytest.param(saved(STATE)[:-1000], id="all but its end"),
        pytest.param(saved(STATE)[:10_000], id="its beginning"),
        pytest.param(saved(STATE, _use_new_zipfile_serialization=False)[:100_000], id="half of an old one"),
        pytest.param(b"step,loss\n1,0.5\n" * 50, id="a text"),
        pytest.param("größer".encode("utf-16"), id="another text"),
        pytest.param(b'{"MODEL_STATE": {}, "EPOCHS_RUN": 1}', id="json"),
        pytest.param(bytes(5000), id="zeros"),
        pytest.param(_archive(readme__txt=b"hello"), id="a zip"),
        pytest.param(_archive(data__pkl=DEEP, version=b"3\n"), id="deep lists"),
        pytest.param(torch.zeros(3), id="a tensor"),
        pytest.param([STATE], id="a list"),
        pytest.param(None, id="nothing"),
        pytest.param(1.5, id="a number"),
        pytest.param({}, id="an empty dictionary"),
        pytest.param({"MODEL_STATE": {"MODEL_STATE": STATE}}, id="one level too deep"),
        pytest.param({"MODEL_STATE": [STATE], "EPOCHS_RUN": 1}, id="a list of weights"),
        pytest.param({"MODEL_STATE": None, "EPOCHS_RUN": 1}, id="no weights"),
        pytest.param({1: torch.zeros(2), 2: torch.zeros(2)}, id="keys that are numbers"),
        pytest.param({(1, "a"): torch.zeros(2)}, id="keys that are tuples"),
        pytest.param(dict([(None, 1), *STATE.items()]), id="a key that is None"),
        pytest.param({**STATE, "a\nb\x1b[31m" * 10_000: torch.zeros(2)}, id="a large key"),
        pytest.param(dict([(10**6000, 1), *STATE.items()]), id="a large number"),
        pytest.param({**STATE, **{f"layer.{index}": torch.zeros(1) for index in range(3000)}}, id="many keys"),
        pytest.param({**STATE, "classifier.3.bias": [0.0] * 10}, id="a list for a weight"),
        pytest.param({**STATE, "classifier.3.bias": torch.zeros(10).to_sparse()}, id="a sparse weight"),
        pytest.param({**STATE, "classifier.3.bias": torch.zeros(10, device="meta")}, id="a weight without values"),
        pytest.param({**STATE, "classifier.3.bias": torch.zeros(())}, id="a weight without dimensions"),
        pytest.param({**STATE, "classifier.3.bias": torch.zeros(0)}, id="an empty weight"),
    ],
)
def test_what_is_no_network_of_ours_is_refused(content: object) -> None:
    """Whatever it is: one line of a SnapshotError."""
    assert refused(content)


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["state", "step", "exp_avg", "module.x"]) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    content=st.dictionaries(
        st.sampled_from(["MODEL_STATE", "EPOCHS_RUN", "model_state", "optimizer_state", "model", "epoch", KEYS[0]]), ODD
    )
    | ODD
)
@settings(max_examples=100, deadline=None)
def test_plain_data_without_weights_is_refused(content: object) -> None:
    """Whatever the nesting, the error is a SnapshotError of one line."""
    refused(content)


@given(optimizer=ODD, epochs=ODD)
@settings(max_examples=40, deadline=None)
def test_whatever_lies_beside_the_weights(optimizer: object, epochs: object) -> None:
    """The file is refused for its number of epochs, or read without moments: never another error."""
    is_count = epochs is None or (type(epochs) is int and 0 <= epochs <= 10**6)
    content = {"model_state": SMALL_FILE, "optimizer_state": optimizer, "finished_epoch": epochs}
    if is_count:
        found = read(saved(content))
        assert (found.optimizer, found.num_epochs) == (None, epochs)
        assert all(line.isprintable() for line in found.lacking)
    else:
        refused(content)


SMALL_FILE = {key: torch.zeros(1).expand(value.shape) for key, value in STATE.items()}


def located(location: Path | str) -> ForeignFile:
    """Find another program's file as `--resume_from` does."""
    found = find(str(location), named="--resume_from", allow_foreign=True)
    assert isinstance(found, ForeignFile)
    return found


@pytest.mark.parametrize(
    "name", ["mnist.pt", "mnist.pth", "mnist.bin", "mnist.ckpt", "snapshot", "run.1", "step-00000005.pt"]
)
def test_a_file_of_any_name_is_found(name: str, tmp_path: Path) -> None:
    """Where a file lies, it is read, whatever its suffix."""
    (tmp_path / name).write_bytes(saved(STATE))
    found = located(tmp_path / name)
    assert (found.path, found.size_bytes) == (f"{tmp_path}/{name}", (tmp_path / name).stat().st_size)
    assert same_weights(found.foreign)


def test_a_file_of_a_url_is_found(tmp_path: Path) -> None:
    """In an object store, too."""
    url = f"memory://{tmp_path.name}-foreign"
    open_storage(url).put("mnist.pth", saved(STATE))
    found = located(f"{url}/mnist.pth")
    assert (found.path, same_weights(found.foreign)) == (f"{url}/mnist.pth", True)


def test_a_json_of_the_users_is_no_manifest(tmp_path: Path) -> None:
    """What lies beside a foreign file under the same name is not asked."""
    (tmp_path / "best.pt").write_bytes(saved(STATE))
    (tmp_path / "best.json").write_text('{"accuracy": 0.99}')
    assert same_weights(located(tmp_path / "best.pt").foreign)


def test_a_directory_with_a_suffix_is_a_directory(tmp_path: Path) -> None:
    """Its newest snapshot is found."""
    storage = LocalStorage(tmp_path / "run.pt")
    storage.create()
    commit(storage, 5)
    found = find(str(tmp_path / "run.pt"), named="--resume_from", allow_foreign=True)
    assert isinstance(found, Snapshot)
    assert found.state["step"] == 5


def test_own_files_are_found_as_such(tmp_path: Path) -> None:
    """A copy of a snapshot of ours is one, under any suffix."""
    (tmp_path / "best.ckpt").write_bytes(pack(small_state(5)))
    found = find(str(tmp_path / "best.ckpt"), named="--resume_from", allow_foreign=True)
    assert isinstance(found, Snapshot)
    assert (found.state["step"], found.manifest) == (5, None)


def test_a_foreign_file_is_refused_where_only_ours_will_do(tmp_path: Path) -> None:
    """A tool that compares optimizers and positions says that this is no snapshot of ours; it is never overlooked."""
    (tmp_path / "mnist.pth").write_bytes(saved(STATE))
    with pytest.raises(
        SnapshotError, match=f"^snapshot {tmp_path}/mnist.pth: not of the format elastic_mnist.snapshot$"
    ):
        find(f"{tmp_path}/mnist.pth", named="snapshot")


def test_what_does_not_fit_is_told_with_its_place(tmp_path: Path) -> None:
    """The error names option, path, key and both shapes."""
    (tmp_path / "wide.pth").write_bytes(saved(Bare(256).state_dict()))
    with pytest.raises(SnapshotError) as caught:
        located(tmp_path / "wide.pth")
    assert str(caught.value) == (
        f"--resume_from {tmp_path}/wide.pth: weight classifier.0.weight has the shape (256, 9216), this network's has "
        f"(128, 9216)"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("typo.pth", "no such file; name another"),
        ("typo", "no snapshot there; name another"),
        ("empty", "no snapshot there; name another"),
        ("pipe.pt", "neither a file nor a directory; name another"),
        ("\0.pt", "cannot read"),
    ],
)
def test_a_name_of_nothing_is_the_users_to_put_right(name: str, reason: str, tmp_path: Path) -> None:
    """One line of a UsageError, and nothing is waited for."""
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(UsageError, match=f"^--resume_from {tmp_path}.*{reason}"):
        located(f"{tmp_path}/{name}")
