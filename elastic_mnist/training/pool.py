"""Several micro-batches at once on a CPU, each on one intra-op thread.

The bits of a micro-batch depend on how many intra-op threads compute it: a convolution split in two
adds in another order. So a micro-batch always gets exactly one, and a process uses its cores by
running several micro-batches beside each other. torch releases the interpreter lock in its kernels.

Invariant: which thread computes an item changes no bit of the item's result.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

import torch

Item = TypeVar("Item")

THREAD_NAME: Final = "micro-batch"
"""The names of the pool's threads begin with it."""


class MicroBatchPool:
    """A fixed number of threads; with one, everything runs in the calling thread.

    Construct it in the thread that trains: the number of intra-op threads of that thread becomes 1 too,
    so that the optimizer's kernels are as fixed as the gradients'.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        torch.set_num_threads(1)
        self._pool = (
            ThreadPoolExecutor(
                num_threads, thread_name_prefix=THREAD_NAME, initializer=torch.set_num_threads, initargs=(1,)
            )
            if num_threads > 1
            else None
        )

    def run(
        self,
        work: Callable[[int, Item], object],
        items: Iterable[Item],
        *,
        finish: Callable[[int], object] = lambda _thread: None,
    ) -> None:
        """Call `work(thread, item)` for each item, then `finish(thread)` for each thread, and wait for all of them.

        A thread takes the next item when it is free. Work of one thread never overlaps in time, so buffers
        belong to a thread. The first exception is raised here, once all threads have ended; the thread of an exception
        is not finished.
        """
        if self._pool is None:
            for item in items:
                work(0, item)
            finish(0)
            return
        waiting = deque(items)

        def work_on(thread: int) -> None:
            for item in _taken_from(waiting):
                work(thread, item)
            finish(thread)

        futures = [self._pool.submit(work_on, thread) for thread in range(self.num_threads)]
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
