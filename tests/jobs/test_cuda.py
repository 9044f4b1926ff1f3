"""What must hold on a CUDA device as on a CPU. Where a CPU can do the same, it does, so that the tests are tried too.

On a machine with one GPU:

    scripts/test -m gpu tests/test_cuda.py

NCCL takes no two ranks on one GPU, so these are one after the other, and their messages are added.
"""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from builders import BATCH, MICRO_BATCH, NUM_SAMPLES, SEED, flat_gradient, objective, poison, step_of
from harness import SMALL, Job, fault, plain, standalone
from states import small_state
from torch import Tensor

from elastic_mnist.snapshots.state import pack, unpack
from elastic_mnist.training import determinism
from elastic_mnist.training.fixed_point import choose_exponent, error_bound
from elastic_mnist.training.gradients import AllReduce, ExactGradient, Objective
from elastic_mnist.training.model import ConvNet, build, weights_sha256
from elastic_mnist.training.pool import MicroBatchPool
from elastic_mnist.training.sampler import StepSampler

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ON_CUDA = (*SMALL, "--save_every_steps=5", "--device=cuda")


def prepared(name: str) -> Iterator[torch.device]:
    """Prepare a device as a job does, and put torch's own choice of kernels back afterwards."""
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    device = torch.device(name)
    determinism.use_deterministic_kernels(device)
    yield device
    torch.use_deterministic_algorithms(mode=False)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device."""
    yield from prepared(request.param)


@pytest.fixture(params=["cpu", CUDA])
def other_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device, once more."""
    yield from prepared(request.param)


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """The CUDA device."""
    yield from prepared("cuda")


def network_on(device: torch.device) -> ConvNet:
    """Return the network with its initial weights."""
    return build(SEED).to(device)


def problem_on(device: torch.device, model: ConvNet, precision: str = "fp32") -> Objective:
    """Return the problem of the other tests, on a device."""
    return replace(objective(model, precision), device=device)


def exact(objective: Objective, all_reduce: AllReduce = lambda _: None) -> ExactGradient:
    """Return the exact gradient of a problem; one rank, unless `all_reduce` knows of others."""
    return ExactGradient(
        objective, MicroBatchPool(1), all_reduce, global_batch_size=BATCH, micro_batch_size=MICRO_BATCH
    )


def train(
    device: torch.device, model: ConvNet, optimizer: torch.optim.Optimizer, precision: str, num_steps: int
) -> None:
    """Make steps, from the first of epoch 0 on."""
    gradient = exact(problem_on(device, model, precision))
    num_done = 0
    for epoch in range(num_steps):
        sizes = {"global_batch_size": BATCH, "micro_batch_size": MICRO_BATCH}
        for step in StepSampler(NUM_SAMPLES, seed=SEED, epoch=epoch, rank=0, world_size=1, **sizes):
            if num_done == num_steps:
                return
            gradient(step, step_index=num_done)
            optimizer.step()
            num_done += 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gradient_is_the_fp64_sum_within_its_error_bound(device: torch.device, precision: str) -> None:
    """Each value of the mean before its rounding to fp32 is off from fp64's by the bound and fp64's own rounding."""
    model, step = network_on(device), step_of()
    learned = problem_on(device, model, precision)
    sent: list[Tensor] = []
    exact(learned, lambda message: sent.append(message.clone()))(step, step_index=3)

    total = torch.zeros(sum(parameter.numel() for parameter in model.parameters()), dtype=torch.float64, device=device)
    for micro_batch in step.micro_batches:
        loss = learned.loss(micro_batch, epoch=step.epoch, step_index=3)
        pieces = torch.autograd.grad(loss, list(model.parameters()))
        total += torch.cat([piece.flatten() for piece in pieces]).double()
    mean = total / step.num_samples

    num_micro_batches = len(step.micro_batches)
    factor = 2.0 ** -choose_exponent(MICRO_BATCH, num_micro_batches) / step.num_samples
    bound = error_bound(MICRO_BATCH, num_micro_batches, step.num_samples)
    found = sent[0][: len(mean)].double() * factor
    assert mean.any()
    assert bool(((found - mean).abs() <= bound + mean.abs() * 2.0**-48).all())
    torch.testing.assert_close(flat_gradient(model), mean.float(), rtol=2.0**-22, atol=2 * bound)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_split_over_two_ranks_changes_no_bit_of_the_gradient(device: torch.device, precision: str) -> None:
    """Two ranks, one after the other on the device, whose messages are added, get what one rank gets."""
    model = network_on(device)
    learned = problem_on(device, model, precision)
    undivided = exact(learned)(step_of(), step_index=3)
    gradient = flat_gradient(model)
    sent: list[Tensor] = []
    exact(learned, lambda message: sent.append(message.clone()))(step_of(1, 2), step_index=3)
    divided = exact(learned, lambda message: message.add_(sent[0]))(step_of(0, 2), step_index=3)
    assert divided == undivided
    assert torch.equal(flat_gradient(model).view(torch.int32), gradient.view(torch.int32))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_twenty_steps_give_the_same_weights_each_time(device: torch.device, precision: str) -> None:
    """Two runs of the same steps end with the same bits, and not with the initial ones."""
    digests = {weights_sha256(network_on(device).state_dict())}
    for _ in range(2):
        model = network_on(device)
        train(device, model, torch.optim.Adam(model.parameters(), lr=1e-3), precision, 20)
        assert all(bool(values.isfinite().all()) for values in model.state_dict().values())
        digests.add(weights_sha256(model.state_dict()))
    assert len(digests) == 2


def test_a_gradient_that_is_not_finite_is_found(device: torch.device) -> None:
    """Each micro-batch of weights with a NaN is counted, and nothing of it is in the gradient."""
    model = network_on(device)
    poison(model)
    result = exact(problem_on(device, model))(step_of(), step_index=3)
    assert result.num_bad == len(step_of().micro_batches)
    assert not flat_gradient(model).any()


def test_a_snapshot_goes_on_at_another_device(device: torch.device, other_device: torch.device) -> None:
    """What one device has saved is plain data on a CPU, and all of it arrives on the other, which trains on."""
    model = network_on(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(device, model, optimizer, "fp32", 2)

    state = unpack(pack(small_state(model=model.state_dict(), optimizer=optimizer.state_dict())))
    moments = state["optimizer"]["state"].values()
    loaded = [*state["model"].values(), *(values for moment in moments for values in moment.values())]
    assert {values.device.type for values in loaded} == {"cpu"}

    resumed = build(SEED + 1).to(other_device)
    resumed.load_state_dict(state["model"])
    assert weights_sha256(resumed.state_dict()) == weights_sha256(model.state_dict())
    resumed_optimizer = torch.optim.Adam(resumed.parameters(), lr=1e-3)
    resumed_optimizer.load_state_dict(state["optimizer"])
    for mine, its in zip(model.parameters(), resumed.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            before, after = optimizer.state[mine][name], resumed_optimizer.state[its][name]
            assert torch.equal(before.cpu(), after.cpu())
    train(other_device, resumed, resumed_optimizer, "fp32", 1)
    assert weights_sha256(resumed.state_dict()) != weights_sha256(model.state_dict())


@pytest.mark.gpu
def test_nccl_takes_the_message_as_it_is(cuda: torch.device) -> None:
    """NCCL's sum of int64 over its one rank is the message, in values that neither fp32 nor fp64 can hold."""
    message = torch.tensor([2**62 - 1, -(2**62) + 1, 2**53 + 1, -1, 0], device=cuda)
    expected = message.clone()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(message)
    finally:
        dist.destroy_process_group()
    assert torch.equal(message, expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_killed_job_on_cuda_ends_with_the_undisturbed_weights(mnist_dir: Path, tmp_path: Path) -> None:
    """A worker with a GPU that is killed is replaced; memory has all it had finished, and the end is the same."""
    with Job(tmp_path / "undisturbed", mnist_dir, plain(), ON_CUDA) as job:
        undisturbed = job.finish()
        (started,) = job.events("run.started")
        assert started["device"].startswith("cuda")
    environment, fired = fault(tmp_path / "killed", "kill", rank=0, step=8)
    with Job(tmp_path / "killed", mnist_dir, standalone(1), ON_CUDA, environment) as job:
        finished = job.finish()
        assert fired.exists()
        (resumed,) = job.events("run.resumed")
        assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("memory", 8, 0)
        assert finished["num_restarts"] == 1
        assert finished["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("kind", ["stop", "spin"])
def test_a_worker_on_cuda_that_hangs_is_told_and_replaced(kind: str, mnist_dir: Path, tmp_path: Path) -> None:
    """Stopped or spinning between two steps, it is named with its step, and nothing that was finished is lost."""
    environment, fired = fault(tmp_path, kind, rank=0, step=3)
    options = (*ON_CUDA, "--hang_timeout=4")
    with Job(tmp_path, mnist_dir, standalone(1), options, environment) as job:
        job.finish()
        assert fired.exists()
        (hung,) = job.events("worker.hung")
        assert (hung["rank"], hung["step"]) == (0, 3)
        (resumed,) = job.events("run.resumed")
        assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("memory", 3, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_job_on_cuda_stops_where_it_is_asked_to(mnist_dir: Path, tmp_path: Path) -> None:
    """SIGTERM ends it with 143 and a snapshot of the step that it says; the same command goes on from that."""
    environment, _ = fault(tmp_path, "none", rank=0, step=0)
    slow = {**environment, "ELASTIC_MNIST_TEST_CRAWL": "0.3"}
    with Job(tmp_path, mnist_dir, standalone(1), ON_CUDA, slow) as job:
        job.wait_for_step(1)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        (stopped,) = job.events("run.stopped")
    with Job(tmp_path, mnist_dir, standalone(1), ON_CUDA) as job:
        assert job.finish()["step"] == 32
        (resumed,) = job.events("run.resumed")
        assert (resumed["source"], resumed["step"], resumed["num_lost_steps"]) == ("storage", stopped["step"], 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_job_begun_on_cuda_goes_on_on_a_cpu(mnist_dir: Path, tmp_path: Path) -> None:
    """A job that was on CUDA resumes on a CPU, says that the bits may differ from here on, and finishes."""
    with Job(tmp_path, mnist_dir, plain(), (*ON_CUDA, "--epochs=1")) as job:
        assert job.finish()["step"] == 16
    with Job(tmp_path, mnist_dir, plain(), (*ON_CUDA, "--device=cpu")) as job:
        assert job.finish()["step"] == 32
        (resumed,) = job.events("run.resumed")
        assert resumed["step"] == 16
        (told,) = job.events("run.environment_changed")
        assert any(change.startswith("device was ") for change in told["changed"])
