"""The memory of a device: how much is left, and which jobs may fill it at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_omni.engine import Memory
from vllm_omni.errors import RequestError

SHARE = 0.8
"""Of what is free on the device: what weights and jobs may fill. The rest is for other stages, and for what an allocator loses."""


class Room:
    """`limit` bytes for `weights` and jobs. A job has `needs`, a Memory, and a `number`: in that order they came.

    A job that does not fit waits. One behind it may go first if the first one would have to wait as long anyway.
    """

    def __init__(self, limit: int, weights: int) -> None:
        self.limit = limit
        self.waiting: deque[Any] = deque()
        self._weights = Memory(weights)
        self._admitted: list[Any] = []

    def used(self, *more: Any) -> int:
        """By the weights, the jobs inside, and `more`."""
        return together([self._weights, *(job.needs for job in (*self._admitted, *more))])

    def queue(self, job: Any) -> None:
        """Let a job wait for its turn. Raises RequestError for one that would never get it."""
        if (alone := together([self._weights, job.needs])) > self.limit:
            needed, weights = shown(alone - self._weights.weights), shown(self._weights.weights)
            wrong = f"This needs {needed} beside the {weights} of the weights, and both may fill {shown(self.limit)}: "
            raise RequestError(wrong + "ask for a smaller size, or fewer frames or samples.", param="size")
        self.waiting.append(job)

    def admit(self) -> Iterator[Any]:
        """The jobs that may begin."""
        for job in tuple(self.waiting):
            head = self.waiting[0]
            passed = [other.needs for other in self._admitted if other.number > head.number] if job is not head else []
            beside_head = together([self._weights, head.needs, *passed, job.needs]) if job is not head else 0
            if max(self.used(job), beside_head) <= self.limit:
                self.waiting.remove(job)
                self._admitted.append(job)
                yield job

    def leave(self, job: Any) -> None:
        """A job is over, wherever it was."""
        for jobs in (self.waiting, self._admitted):
            if job in jobs:
                jobs.remove(job)


def together(needs: Sequence[Memory]) -> int:
    """What those need that are there at the same time. Only one forward runs at a time."""
    return max(each.weights for each in needs) + sum(each.job for each in needs) + max(each.workspace for each in needs)


def free_bytes(device: str) -> int:
    """What is free on the device that torch calls so; of the CPU, what this machine and this control group have left."""
    if device != "cpu":
        import torch

        torch.accelerator.empty_cache()  # what this process keeps for later is free
        return int(torch.accelerator.get_memory_info(device)[0])
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")  # of version 2; elsewhere it has no such files
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


def shown(count: int) -> str:
    """`1.5 GiB`, or `3.1 MiB`."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 29 else f"{count / (1 << 20):.1f} MiB"
