"""What a result's bits may hang on beside the settings: the programs and the processor.

It is in every snapshot, and as fixed as it can be. Where it changes, the job goes on, and says once that the bits
may differ.
"""

import contextlib
import os
import platform
from pathlib import Path

import torch

from elastic_mnist import __version__


def platform_fingerprint(device: torch.device) -> dict[str, str]:
    """Return the environment of a process that computes on `device`, one text a field."""
    return {
        "elastic_mnist": __version__,
        "torch": str(torch.__version__),  # a class of torch's own, which a plain load refuses
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
    }


def use_deterministic_kernels(device: torch.device) -> None:
    """Have torch choose kernels that give the same bits each time. Call it before the device is first used."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False


def _processor() -> str:
    """Return the kind of the CPU, and the instructions that torch uses of it."""
    name = platform.machine()
    with contextlib.suppress(OSError, StopIteration), Path("/proc/cpuinfo").open() as lines:
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return what differs between two environments, one text a field."""
    return [f"{key} was {before.get(key)} and is now {now.get(key)}" for key in now if now[key] != before.get(key)]
