"""The throughput of the training, logged about once a second."""

import time
from typing import Final

from elastic_mnist.telemetry.events import log
from elastic_mnist.training.sampler import Position

_LOG_SECONDS: Final = 1.0


class Meter:
    """Counts samples, over an epoch and since the last `train.progress`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a new epoch."""
        self._epoch_began = self._logged = time.monotonic()
        self._epoch_samples = self._samples = 0

    def epoch_rate(self) -> float:
        """Return samples per second since the epoch, or this generation's part of it, began."""
        return round(self._epoch_samples / max(time.monotonic() - self._epoch_began, 1e-9), 1)

    def count(self, position: Position, *, num_samples: int, loss: float) -> None:
        """Count a step, after which `position` is finished, and log it if a second has passed since the last one."""
        self._epoch_samples += num_samples
        self._samples += num_samples
        elapsed = time.monotonic() - self._logged
        if elapsed >= _LOG_SECONDS or position.step == 1:
            log.info(
                "train.progress",
                step=position.step,
                epoch=position.epoch,
                loss=loss,
                samples_per_second=round(self._samples / max(elapsed, 1e-9), 1),
            )
            self._logged, self._samples = time.monotonic(), 0
