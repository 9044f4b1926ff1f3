"""Several micro-batches at once on a CPU, each on one intra-op thread.

The bits of a micro-batch depend on how many intra-op threads compute it: a convolution split in two
adds in another order. So a micro-batch always gets exactly one, and a process uses its cores by
running several micro-batches beside each other. torch releases the interpreter lock in its kernels.

Invariant: which lane computes an item changes no bit of the item's result.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Item = TypeVar("Item")


class MicroBatchPool:
    """A fixed number of lanes; with one, everything runs in the calling thread.

    Construct it in the thread that trains: the number of intra-op threads of that thread becomes 1 too,
    so that the optimizer's kernels are as fixed as the gradients'.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        torch.set_num_threads(1)
        self._pool = (
            ThreadPoolExecutor(num_threads, thread_name_prefix="lane", initializer=torch.set_num_threads, initargs=(1,))
            if num_threads > 1
            else None
        )

    def run(
        self,
        work: Callable[[int, Item], object],
        items: Iterable[Item],
        *,
        finish: Callable[[int], object] = lambda _lane: None,
    ) -> None:
        """Call `work(lane, item)` for each item, `finish(lane)` for each lane at its end, and wait for all of them.

        A lane takes the next item when it is free. Work of one lane never overlaps in time, so buffers
        belong to a lane. The first exception is raised here, once all lanes have ended; the lane of an exception
        is not finished.
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

        futures = [self._pool.submit(work_on, lane) for lane in range(self.num_threads)]
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
