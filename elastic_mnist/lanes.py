"""Several micro-batches at once on a CPU, each on one intra-op thread.

The bits of a micro-batch depend on how many intra-op threads compute it: a convolution split in two
adds in another order. So a micro-batch always gets exactly one, and a process uses its cores by
running several micro-batches beside each other. torch releases the interpreter lock in its kernels.

Invariant: which lane computes an item changes no bit of the item's result.
"""

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

import torch

Item = TypeVar("Item")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGEST_BLOCK: Final = 32 * 2**20  # bytes; glibc keeps no larger one


class Lanes:
    """A fixed number of lanes; with one, everything runs in the calling thread.

    Construct it in the thread that trains: the number of intra-op threads of that thread becomes 1 too,
    so that the optimizer's kernels are as fixed as the gradients'. The process keeps the memory it frees.
    """

    def __init__(self, num_lanes: int) -> None:
        self.num_lanes = num_lanes
        _keep_freed_memory()
        torch.set_num_threads(1)
        self._pool = (
            ThreadPoolExecutor(num_lanes, thread_name_prefix="lane", initializer=torch.set_num_threads, initargs=(1,))
            if num_lanes > 1
            else None
        )

    def run(
        self,
        work: Callable[[int, Item], None],
        items: Iterable[Item],
        *,
        finish: Callable[[int], None] = lambda _lane: None,
    ) -> None:
        """Call `work(lane, item)` for each item, `finish(lane)` for each lane at its end, and wait for all of them.

        A lane takes the next item when it is free. Work of one lane never overlaps in time, so buffers
        belong to a lane. The first exception is raised here, once all lanes have ended.
        """
        if self._pool is None:
            for item in items:
                work(0, item)
            finish(0)
            return
        waiting = deque(items)

        def work_on(lane: int) -> None:
            for item in _taken_from(waiting):
                work(lane, item)
            finish(lane)

        futures = [self._pool.submit(work_on, lane) for lane in range(self.num_lanes)]
        wait(futures)
        for future in futures:
            future.result()


def _taken_from(waiting: deque[Item]) -> Iterator[Item]:
    """Take items until none is left; several threads may."""
    while True:
        try:
            item = waiting.popleft()  # atomic
        except IndexError:
            return
        yield item


def _keep_freed_memory() -> None:
    """Have the process keep what it frees, for the next micro-batch, which asks for the very same blocks.

    Else glibc gives the large ones back to the kernel each time and gets them anew, page by page and zeroed: some
    50,000 page faults in a step of 8 micro-batches, a tenth of its time. Another C library does as it likes.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_ARENA_MAX, 1)  # a thread's own arena gives its memory back, whatever the threshold says
