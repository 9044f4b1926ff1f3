"""The network of the usual MNIST scripts, written here without the package, and the files that such scripts write."""

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Bare(nn.Module):
    """What a user's own script has; `width` of the hidden layer."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)
        )
        self.classifier = nn.Sequential(nn.Linear(9216, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Classify (num_samples, 1, 28, 28) images."""
        return torch.log_softmax(self.classifier(self.features(images).flatten(1)), dim=1)


def bare(seed: int = 3, width: int = 128) -> Bare:
    """Return the network with the weights of a seed, for evaluation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Bare(width).eval()


def trained(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make two steps, so that it has a state."""
    for step in range(2):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(step)
        network(torch.randn(4, 1, 28, 28, generator=draw)).square().sum().backward()
        optimizer.step()


def saved(content: object, **options: Any) -> bytes:  # noqa: ANN401 - what torch.save takes
    """Return what torch.save writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


class Trap:
    """An object whose unpickling makes a directory, by a shell."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"mkdir {self.path}",)
