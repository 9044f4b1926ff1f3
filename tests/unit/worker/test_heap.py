"""Memory that a process frees comes again without page faults, in every thread that computes."""

import platform
import subprocess
import sys

import pytest

NUM_PAGE_FAULTS = """
import resource
from concurrent.futures import ThreadPoolExecutor
from elastic_mnist.worker.malloc import tune_malloc

tune_malloc()
import torch

def rounds():
    torch.set_num_threads(1)
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        blocks = [torch.ones(1_200_000) for _ in range(30)]  # more than a thread's own heap takes
        del blocks
        print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before, flush=True)

with ThreadPoolExecutor(2) as threads:
    threads.submit(bytearray, 1000).result()  # threads that were there before, as a worker has them
    {call}
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what is freed")
@pytest.mark.parametrize("call", ["rounds()", "threads.submit(rounds).result()"], ids=["main thread", "a lane"])
def test_memory_that_is_freed_is_kept_for_the_next_micro_batch(call: str) -> None:
    """In a process of its own, large blocks that were freed come again without page faults, after a few rounds."""
    program = NUM_PAGE_FAULTS.replace("{call}", call)
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    first, *others = map(int, told.split())
    assert first > 30_000  # 144 MB in pages of 4 KiB
    assert max(others[-4:]) < 1000
