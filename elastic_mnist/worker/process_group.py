"""Who takes part in this generation: the process group, and how its ranks agree.

Invariant: the ranks of one generation meet in a namespace of the store that no other generation uses.
Workers of torchrun share the agent's store over restarts, and what they read of a dead generation are
addresses where nobody listens.

Every collective goes through `World` or under its `peer_errors`, and raises `PeerLost` when a rank is gone.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_mnist.errors import PeerLost, UsageError
from elastic_mnist.ipc.environment import WorkerEnvironment
from elastic_mnist.ipc.heartbeat import EXIT_BARRIER, WAITING
from elastic_mnist.worker.heartbeat import heartbeat_writer
from elastic_mnist.worker.peers import PeerWatch
from elastic_mnist.worker.rendezvous_store import assign_rank, open_store

_T = TypeVar("_T")

COLLECTIVE_TIMEOUT: Final = timedelta(days=1)
"""A collective waits for a slow peer as long as it lives; `PeerWatch` decides whether it does."""


class World:
    """The ranks of one generation. Every rank must make the same calls in the same order.

    Args:
        env: of this process.
        device: where its tensors are.
        timeout: seconds without a heartbeat after which a peer counts as lost.
        meeting_timeout: seconds within which all ranks must have connected.
    """

    def __init__(
        self,
        env: WorkerEnvironment,
        device: torch.device,
        *,
        timeout: float,
        meeting_timeout: float = 60.0,
    ) -> None:
        self.size = env.world_size
        self.device = device
        self._timeout = timedelta(seconds=meeting_timeout)
        with peer_errors("meeting"):
            self._store, self._key = open_store(env, self._timeout)
            self.rank = assign_rank(self._store, env)
            if self.size > 1:  # first: a peer may be lost while they connect to each other
                PeerWatch(env, self.rank, timeout=timeout, key=self._key)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.size, timeout=COLLECTIVE_TIMEOUT
            )

    def all_reduce(self, tensor: Tensor) -> None:
        """Add `tensor` up over all ranks, in place."""
        if self.size > 1:
            with peer_errors("all-reduce"):
                dist.all_reduce(tensor)
                if tensor.is_cuda:  # NCCL returns at once: the wait, and a peer's loss, are here
                    torch.cuda.synchronize(tensor.device)

    def gather(self, value: _T) -> list[_T]:
        """Return the ranks' values in their order at rank 0, an empty list at the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with peer_errors("gather"):
            dist.gather_object(value, values)
        return values or []

    def broadcast(self, value: _T | None, *, source: int = 0) -> _T:
        """Return the value of rank `source`; the other ranks' is ignored.

        It is pickled, between the ranks of one job only, and travels through the CPU's backend.
        """
        if self.size > 1:
            values: list[Any] = [value]
            with peer_errors("broadcast"):
                dist.broadcast_object_list(values, src=source, device=torch.device("cpu"))
            (value,) = values
        return cast("_T", value)

    def broadcast_bytes(self, data: bytes | None, *, source: int = 0) -> bytes:
        """Return the bytes of rank `source`, checked against their digest.

        Raises:
            PeerLost: a rank is gone, or what arrived is not what was sent.
        """
        if self.size == 1:
            assert data is not None
            return data
        sent = None if data is None else (data, hashlib.sha256(data).digest())
        received, digest = self.broadcast(sent, source=source)
        if hashlib.sha256(received).digest() != digest:
            raise PeerLost(f"broadcast: the {len(received):,} bytes that arrived are not those that rank {source} sent")
        return received

    def exit_barrier(self) -> None:
        """Wait for rank 0, which may still be writing; rank 0 waits until all others know that it is done."""
        if self.size == 1:
            return
        with peer_errors("exit barrier"), heartbeat_writer.phase(EXIT_BARRIER):
            dist.broadcast(torch.zeros(1, dtype=torch.uint8), src=0)  # raises at once if rank 0 is gone
            self._store.set(f"exited/{self.rank}", "")
            for rank in range(1, self.size) if self.rank == 0 else ():  # it may serve the store
                self._store.get(f"exited/{rank}")

    def wrap(self, model: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Wrap `model` in DDP, which gives all ranks rank 0's parameters."""
        with peer_errors("broadcast of the initial weights"):
            ids = [self.device] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(model, device_ids=ids)

    def leave(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return the device that `--device` asks for, one CUDA device a local rank."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"--device {name}: local rank {local_rank} has no CUDA device of its own, there are "
            f"{torch.cuda.device_count()}; start fewer processes or use --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Set the phase of waiting for peers, and raise `PeerLost` for what torch raises when one of them is gone."""
    try:
        with heartbeat_writer.phase(WAITING):
            yield
    except torch.OutOfMemoryError:  # no peer's fault
        raise
    except RuntimeError as error:  # also torch's DistError and its subclasses
        reason = str(error).splitlines()[0][:300]
        raise PeerLost(f"{what}: {reason}") from error
