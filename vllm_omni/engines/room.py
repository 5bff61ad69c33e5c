"""How much memory a device has left, and how a number of bytes is said."""

from __future__ import annotations

from pathlib import Path


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
