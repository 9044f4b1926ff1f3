"""Exact distributed evaluation: every test sample once, the same numbers at any world size.

The unit is a chunk of the test set, of a fixed size. Ranks take runs of chunks, threads take chunks; the
chunk's loss is turned into fixed point before it is added, so that no order of additions matters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from elastic_mnist.errors import TrainingError
from elastic_mnist.training.fixed_point import loss_from_fixed, loss_to_fixed
from elastic_mnist.training.gradients import AllReduce, autocast
from elastic_mnist.training.model import ConvNet, normalise
from elastic_mnist.training.pool import MicroBatchPool
from elastic_mnist.training.sampler import share

_CHUNK_SAMPLES: Final = 64


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The mean loss and the share of right answers over the whole set."""

    loss: float
    accuracy: float
    num_samples: int


def evaluate(
    model: ConvNet,
    images: Tensor,
    labels: Tensor,
    *,
    device: torch.device,
    precision: str,
    pool: MicroBatchPool,
    all_reduce: AllReduce,
    rank: int,
    world_size: int,
    on_progress: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluate `model`. Every rank must call this, also one to which no sample falls.

    Args:
        model: without dropout, its forward takes (n, 1, 28, 28).
        images: (num_samples, 28, 28) uint8.
        labels: (num_samples,) int64.
        device: where `model` is.
        precision: "fp32" or "bf16".
        pool: computes this rank's chunks.
        all_reduce: adds up over ranks.
        rank: this rank.
        world_size: number of ranks.
        on_progress: called by any thread for each chunk.

    Raises:
        TrainingError: the loss is not finite; at all ranks.
    """
    # Loss in fixed point, right answers, samples, chunks whose loss has no place in fixed point.
    sums = [[0, 0, 0, 0] for _ in range(pool.num_threads)]
    chunks = range(0, len(labels), _CHUNK_SAMPLES)

    def compute(thread: int, start: int) -> None:
        on_progress()
        wanted = labels[start : start + _CHUNK_SAMPLES].to(device)
        with torch.inference_mode():
            inputs = normalise(images[start : start + _CHUNK_SAMPLES].to(device))
            with autocast(device, precision):
                outputs = model(inputs)
            loss = nll_loss(outputs.float(), wanted, reduction="sum").item()
            fixed = loss_to_fixed(loss)
            if fixed is None:  # the weights are the same at all ranks, but not this chunk: told after the sum
                sums[thread][3] += 1
                return
            sums[thread][0] += fixed
            sums[thread][1] += int((outputs.argmax(dim=1) == wanted).sum())
            sums[thread][2] += len(wanted)

    pool.run(compute, [chunks[index] for index in share(len(chunks), rank, world_size)])
    total = torch.tensor(sums, dtype=torch.int64).sum(dim=0).to(device)
    all_reduce(total)
    loss, num_right, num_samples, num_bad = total.tolist()
    if num_bad:
        raise TrainingError(f"the test loss of {num_bad} chunks is not finite or too large; a smaller --lr may help")
    return Evaluation(
        loss=loss_from_fixed(loss) / num_samples, accuracy=num_right / num_samples, num_samples=num_samples
    )
