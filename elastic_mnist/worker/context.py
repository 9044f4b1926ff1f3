"""What one generation of a worker has before it knows where it resumes from."""

import os

from elastic_mnist import data
from elastic_mnist.ipc.environment import WorkerEnvironment
from elastic_mnist.settings import Settings
from elastic_mnist.snapshots.durable import DurableTier
from elastic_mnist.snapshots.storage import open_storage
from elastic_mnist.telemetry import events
from elastic_mnist.training import determinism
from elastic_mnist.worker.process_group import World, choose_device
from elastic_mnist.worker.stop_requests import StopRequests


class WorkerContext:
    """The surroundings of the training in one process. Every rank must construct it.

    Args:
        settings: of the job.
        env: of this process.
        requests: to stop, which this process receives.
    """

    def __init__(self, settings: Settings, env: WorkerEnvironment, requests: StopRequests) -> None:
        self.requests = requests
        self.settings = settings
        self.env = env
        self.device = choose_device(settings.device, env.local_rank)
        determinism.use_deterministic_kernels(self.device)
        self.dataset = data.load(
            settings.dataset,
            settings.data_dir,
            train_samples=settings.train_samples,
            test_samples=settings.test_samples,
            seed=settings.seed,
        )
        self.dataset_facts = {
            "name": self.dataset.name,
            "num_samples": len(self.dataset.train_labels),
            "sha256": self.dataset.sha256,
        }
        self.world = World(
            env, self.device, timeout=settings.hang_timeout, meeting_timeout=max(60.0, settings.hang_timeout)
        )
        if self.world.rank != env.rank:  # a longer-serving node is rank 0, and logs
            events.configure(
                settings.event_log_path,
                rank=self.world.rank,
                world_size=self.world.size,
                log_format=settings.log_format,
            )
        self.storage = open_storage(settings.snapshot_path)
        self.tier = DurableTier(self.storage, keep_last=settings.keep_last)
        self.progress_path = settings.event_log_path.with_name(settings.event_log_path.name + ".progress")

    @property
    def num_threads(self) -> int:
        """How many micro-batches this process computes at once."""
        if self.device.type != "cpu":
            return 1
        return self.settings.threads or max(1, len(os.sched_getaffinity(0)) // self.env.local_world_size)
