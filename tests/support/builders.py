"""Small things that several test files are built of."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from elastic_mnist.training.gradients import Objective
from elastic_mnist.training.model import ConvNet, SeededDropout, build, normalise
from elastic_mnist.training.sampler import Step, StepSampler

NUM_SAMPLES = 23
BATCH = 20  # a first step of 20 samples in 5 micro-batches, a last one of 3 samples in 1
MICRO_BATCH = 4
SEED = 5


def objective(model: ConvNet, precision: str = "fp32") -> Objective:
    """Return the problem of learning a few random images with random labels."""
    draw = torch.Generator().manual_seed(1)
    return Objective(
        model=model,
        images=torch.randint(0, 256, (NUM_SAMPLES, 28, 28), dtype=torch.uint8, generator=draw),
        labels=torch.randint(0, 10, (NUM_SAMPLES,), generator=draw),
        seed=SEED,
        device=torch.device("cpu"),
        precision=precision,
    )


def without_dropout(model: ConvNet) -> ConvNet:
    """Return the model with all its dropout at probability 0."""
    for module in model.modules():
        if isinstance(module, SeededDropout):
            module.probability = 0.0
    return model


def poison(model: ConvNet) -> None:
    """Put a NaN into the weights of a model."""
    model.state_dict()["classifier.3.bias"][0] = math.nan


def enlarge_loss(model: ConvNet, size: float) -> None:
    """Let a sample of label k cost k times `size`, with a gradient as small as ever."""
    model.state_dict()["classifier.3.bias"].copy_(torch.arange(10) * -size)


def step_of(rank: int = 0, world_size: int = 1, *, start: int = 0) -> Step:
    """Return the step at a position of epoch 0, as a rank sees it."""
    sampler = StepSampler(
        NUM_SAMPLES,
        seed=SEED,
        epoch=0,
        start=start,
        global_batch_size=BATCH,
        micro_batch_size=MICRO_BATCH,
        rank=rank,
        world_size=world_size,
    )
    return next(iter(sampler))


def samples_of(step: Step) -> Tensor:
    """Return the samples of a step seen by a single rank."""
    return torch.cat([micro_batch.samples for micro_batch in step.micro_batches])


def flat_gradient(model: nn.Module) -> Tensor:
    """Return a copy of all gradients in one vector."""
    pieces = [parameter.grad for parameter in model.parameters()]
    return torch.cat([piece.flatten() for piece in pieces if piece is not None])


def plain_gradient(samples: Tensor) -> tuple[float, Tensor]:
    """Return loss sum and gradient of the mean loss over a batch, by autograd alone."""
    model = without_dropout(build(SEED))
    learned = objective(model)
    outputs = model(normalise(learned.images[samples]))
    loss = nll_loss(outputs, learned.labels[samples])
    loss.backward()
    return loss.item() * len(samples), flat_gradient(model)
