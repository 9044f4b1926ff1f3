"""The ConvNet of the usual MNIST example.

Its `state_dict` has exactly the keys `features.{0,2}.{weight,bias}` and
`classifier.{0,3}.{weight,bias}`: files of other MNIST scripts load here, and ours load there.

Randomness is an argument. Dropout draws from the generator that the caller passes, never from the
process's own, so that a micro-batch's bits do not depend on what was computed before or beside it.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import log_softmax

PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081  # of MNIST's training images, scaled to 0..1


class ConvNet(nn.Module):
    """1,199,882 parameters; (num_samples, 1, 28, 28) float to (num_samples, 10) log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3),  # (n, 32, 26, 26)
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),  # (n, 64, 24, 24)
            nn.ReLU(),
            nn.MaxPool2d(2),  # (n, 64, 12, 12)
            SeededDropout(0.25),
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * 12 * 12, 128),
            nn.ReLU(),
            SeededDropout(0.5),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor, dropout: Generator | None = None) -> Tensor:
        """Classify normalised images.

        Args:
            images: (num_samples, 1, 28, 28) float.
            dropout: where dropout draws from; None: no dropout, as in evaluation.

        Returns:
            (num_samples, 10) log-probabilities.
        """
        hidden = _through(self.features, images, dropout)
        return log_softmax(_through(self.classifier, hidden.flatten(1), dropout), dim=1)


class SeededDropout(nn.Module):
    """Dropout that draws from a generator of the caller's."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, values: Tensor, generator: Generator | None) -> Tensor:
        """Zero each value with `probability` and scale the others up; the identity without a generator."""
        if generator is None:
            return values
        kept = torch.empty_like(values).bernoulli_(1 - self.probability, generator=generator)
        return values * kept.div_(1 - self.probability)


def _through(layers: nn.Sequential, values: Tensor, dropout: Generator | None) -> Tensor:
    for layer in layers:
        values = layer(values, dropout) if isinstance(layer, SeededDropout) else layer(values)
    return values


def normalise(images: Tensor) -> Tensor:
    """Turn (num_samples, 28, 28) uint8 pixels into (num_samples, 1, 28, 28) fp32 of mean 0 and deviation 1."""
    return images.unsqueeze(1).float().div_(255).sub_(PIXEL_MEAN).div_(PIXEL_STD)


def build(seed: int) -> ConvNet:
    """Build the network with the initial weights that `seed` gives, on the CPU.

    The process's own random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConvNet()


def weights_sha256(state_dict: Mapping[str, Tensor]) -> str:
    """Digest the weights: SHA-256 over the keys in order, each in UTF-8 and followed by its tensor's bytes.

    The bytes are contiguous and little-endian, as on every platform that torch supports.
    """
    digest = hashlib.sha256()
    for key in sorted(state_dict):
        digest.update(key.encode())
        digest.update(state_dict[key].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
