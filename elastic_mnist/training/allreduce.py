"""DDP's own floating-point sum, overlapped with the backward pass: the field's usual way, for comparison.

Its bits depend on the world size, and on how many threads compute.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_mnist.training.gradients import AllReduce, Objective, StepResult
from elastic_mnist.training.sampler import MicroBatch, Step

# A rank without work still takes part in DDP's collectives: it computes a batch of nothing.
_NOTHING = MicroBatch(index=-1, samples=torch.empty(0, dtype=torch.int64))


class AllReduceGradient:
    """The mean gradient by DDP; see `GradientSync`.

    Args:
        problem: what is learned, by a model in DDP.
        all_reduce: adds up over ranks.
        peer_errors: the context of a collective, which turns what torch raises for a lost peer into `PeerLost`.
        world_size: number of ranks.
        is_stopping: whether this process has been asked to stop.
    """

    def __init__(
        self,
        objective: Objective,
        all_reduce: AllReduce,
        peer_errors: Callable[[str], AbstractContextManager[None]],
        *,
        world_size: int,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        assert isinstance(objective.model, DistributedDataParallel)
        self._wrapped = objective.model
        self._objective = objective
        self._all_reduce = all_reduce
        self._peer_errors = peer_errors
        self._world_size = world_size
        self._is_stopping = is_stopping

    def __call__(self, step: Step, *, step_index: int) -> StepResult:
        """Compute and agree; see `GradientSync`."""
        self._wrapped.zero_grad()
        loss_sum = 0.0
        *before, last = step.micro_batches or (_NOTHING,)
        for micro_batch in (*before, last):
            is_last = micro_batch is last
            with nullcontext() if is_last else self._wrapped.no_sync():
                loss = self._objective.loss(micro_batch, epoch=step.epoch, step_index=step_index)
                # The last one's backward pass waits for the peers. DDP divides by the world size; the gradient wanted
                # is that of the mean over the step.
                waits = is_last and self._world_size > 1
                with self._peer_errors("DDP's all-reduce") if waits else nullcontext():
                    (loss * (self._world_size / step.num_samples)).backward()
                    if waits and loss.is_cuda:
                        torch.cuda.synchronize(loss.device)
            loss_sum += loss.item()
        gradients = [parameter.grad for parameter in self._wrapped.parameters()]
        is_finite = math.isfinite(loss_sum) and all(
            gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients
        )
        extras = torch.tensor(
            [loss_sum if is_finite else 0.0, float(not is_finite), float(self._is_stopping())],
            dtype=torch.float64,
            device=self._objective.device,
        )
        self._all_reduce(extras)
        loss_total, num_bad, num_stopping = extras.tolist()
        return StepResult(loss_sum=loss_total, num_bad=round(num_bad), num_stopping=round(num_stopping))
