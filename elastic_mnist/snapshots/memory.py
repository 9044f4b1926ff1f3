"""The memory tier: the state after every step, in memory that outlives the worker.

The memory is a file without a name that the node's agent holds, and that its workers reach through the agent's process
id (see `rendezvous`). So it is private to the user, needs no room in /dev/shm, and the kernel frees it when the agent
ends, however that comes about: nothing is left behind, and nothing stale is ever found.

Invariant: a reader never believes a half-written buffer. There are two; a state is written over the older one, whose
head is blanked first and written last. The fault that this withstands is the death of the writer at any instruction:
what a dead process has stored is there, in the order of its program. (A lost machine loses its memory as a whole.)

    0       head of the file: magic, bytes in a buffer
    4096    buffer 0: head, skeleton, tensors; the skeleton is the state with tensors that have no data
    ...     buffer 1

A node's local rank 0 alone writes; a new one reads before it writes.
"""

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from elastic_mnist.snapshots.record import RunRecord
from elastic_mnist.snapshots.state import State, dump_plain, load_plain, map_tensors, position_of
from elastic_mnist.telemetry.events import log
from elastic_mnist.training.sampler import Position

_MAGIC: Final = b"elastic_mnist.memory.1\n\n"
_FILE_HEAD: Final = struct.Struct(f"<{len(_MAGIC)}sQ")
_PAGE: Final = 4096

_HEAD: Final = struct.Struct("<QQI")
"""Of a buffer: sequence number, bytes of the skeleton, its CRC; then the CRC of these."""
_CRC: Final = struct.Struct("<I")
_HEAD_ROOM: Final = 64
_SKELETON_ROOM: Final = 2**18  # some 6 KB are in use
_ALIGNMENT: Final = 64


@dataclass(frozen=True, kw_only=True)
class MemorySnapshot:
    """What the memory of a node holds: a state, and the record of the run that it is of."""

    record: RunRecord
    state: State

    @property
    def position(self) -> Position:
        """What is finished."""
        return position_of(self.state)


class MemoryTier:
    """The memory of one node, for the worker that writes it.

    Args:
        path: leads to the memory that the agent holds.
        record: the run and the generation that writes.
    """

    def __init__(self, path: str, record: RunRecord) -> None:
        self._path: str | None = path
        self._record = record.to_plain()
        self._descriptor: int | None = None
        self._memory: mmap.mmap | None = None
        self._buffer_size = 0
        self._sequence = 0

    def put(self, state: State) -> None:
        """Keep a copy of a state. Where there is no room for it, that is told once, and nothing is kept."""
        if self._path is None:
            return
        tensors: list[Tensor] = []

        def take(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        skeleton = dump_plain({"record": self._record, "state": map_tensors(state, take)})
        assert len(skeleton) <= _SKELETON_ROOM
        try:
            memory = self._map(self._path, sum(map(_room_of, tensors)))
        except OSError as error:
            self.release()
            log.warning(
                "memory.unavailable",
                reason=f"{error.strerror}; after a worker's death the job will go on from a durable snapshot",
            )
            return
        self._sequence += 1
        begin = _PAGE + self._sequence % 2 * self._buffer_size
        memory[begin : begin + _HEAD_ROOM] = bytes(_HEAD_ROOM)
        memory[begin + _HEAD_ROOM : begin + _HEAD_ROOM + len(skeleton)] = skeleton
        offset = begin + _HEAD_ROOM + _SKELETON_ROOM
        for tensor in tensors:
            _view(memory, tensor, offset).copy_(tensor)
            offset += _room_of(tensor)
        assert offset <= begin + self._buffer_size
        head = _HEAD.pack(self._sequence, len(skeleton), zlib.crc32(skeleton))
        memory[begin : begin + _HEAD.size + _CRC.size] = head + _CRC.pack(zlib.crc32(head))
        log.debug("snapshot.saved", tier="memory", **vars(position_of(state)), size_bytes=offset - begin)

    def _map(self, path: str, tensors_size: int) -> mmap.mmap:
        """Return the memory, with room for two buffers; raises `OSError` where there is none."""
        needed = -(-(_HEAD_ROOM + _SKELETON_ROOM + tensors_size) // _PAGE) * _PAGE
        if self._memory is not None and needed <= self._buffer_size:
            return self._memory
        if self._descriptor is not None:  # before the optimizer's first step, a state has no moments
            os.close(self._descriptor)
        self._buffer_size = needed
        size = _PAGE + 2 * self._buffer_size
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._sequence = max((sequence for sequence, _, _ in _buffers(path)), default=0)
        if os.fstat(self._descriptor).st_size != size:
            os.ftruncate(self._descriptor, 0)
            # Reserved at once: a page that could not be had later would end this process by SIGBUS.
            os.posix_fallocate(self._descriptor, 0, size)
        self._memory = mmap.mmap(self._descriptor, size)
        self._memory[: _FILE_HEAD.size] = _FILE_HEAD.pack(_MAGIC, self._buffer_size)
        return self._memory

    def release(self) -> None:
        """Give the memory back: the run is finished, or there is not enough."""
        self._path = None
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


def read(path: str) -> MemorySnapshot | None:
    """Return the newest state in the memory that an agent holds; None where there is none."""
    found = _buffers(path)
    if not found:
        return None
    _, skeleton, tensors = max(found, key=lambda buffer: buffer[0])
    content = load_plain(skeleton)
    offset = 0

    def fill(tensor: Tensor) -> Tensor:
        nonlocal offset
        filled = torch.empty(tensor.shape, dtype=tensor.dtype)
        filled.copy_(_view(tensors, tensor, offset))
        offset += _room_of(tensor)
        return filled

    state = map_tensors(content["state"], fill)
    return MemorySnapshot(record=RunRecord.from_plain(content["record"]), state=state)


def _buffers(path: str) -> list[tuple[int, bytes, bytearray]]:
    """Return sequence number, skeleton and tensors' bytes of each whole buffer."""
    try:
        data = Path(path).read_bytes()
    except OSError:  # its holder is gone
        return []
    if len(data) < _PAGE:
        return []
    magic, buffer_size = _FILE_HEAD.unpack_from(data)
    if magic != _MAGIC or len(data) != _PAGE + 2 * buffer_size:
        return []
    found = []
    for begin in (_PAGE, _PAGE + buffer_size):
        head = data[begin : begin + _HEAD.size]
        sequence, skeleton_size, skeleton_crc = _HEAD.unpack(head)
        skeleton = data[begin + _HEAD_ROOM : begin + _HEAD_ROOM + skeleton_size]
        is_head_whole = _CRC.unpack_from(data, begin + _HEAD.size)[0] == zlib.crc32(head)
        if sequence > 0 and is_head_whole and zlib.crc32(skeleton) == skeleton_crc:
            tensors = data[begin + _HEAD_ROOM + _SKELETON_ROOM : begin + buffer_size]
            found.append((sequence, skeleton, bytearray(tensors)))
    return found


def _room_of(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _view(memory: mmap.mmap | bytearray, like: Tensor, offset: int) -> Tensor:
    """Return the tensor of `like`'s type and shape that lies in `memory`."""
    return torch.frombuffer(memory, dtype=torch.uint8)[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
