"""NVIDIA GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .numbered import Numbered

DRIVERS = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each CUDA: docs.nvidia.com/deploy/cuda-compatibility, "minor version compatibility"."""
FORWARD = "usr/local/cuda*/compat/libcuda.so*"
"""Where NVIDIA's package for older drivers is (same page, "forward compatibility"); with it, more depends on the GPU than files tell."""


class Cuda(Numbered):
    """Devices are numbered as the driver's tools number them, by bus."""

    variable = "CUDA_VISIBLE_DEVICES"
    driver = "NVIDIA driver"
    tested = True
    kernels = {"fa3-fwd": "fa3_fwd_interface", "flash-attn": "flash_attn", "flashinfer-python": "flashinfer", "triton": "triton"}  # noqa: RUF012

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def visible_devices_env(self, devices: Sequence[int]) -> Mapping[str, str]:
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **super().visible_devices_env(devices)}

    def attention(self, dtype: Any, head_dim: int) -> tuple[Any, str]:
        import torch

        if dtype not in (torch.float16, torch.bfloat16) or head_dim > 256:
            return None, "FlashAttention-3 is for 16 bits and heads of at most 256"
        if torch.cuda.get_device_capability()[0] != 9:
            return None, "FlashAttention-3 is for Hopper"
        try:
            from fa3_fwd_interface import flash_attn_varlen_func
        except ImportError as error:
            return None, f"fa3-fwd does not load: {error}"

        def flash(query: Any, keys: Any, values: Any, spans: Any) -> Any:
            found = flash_attn_varlen_func(query, keys, values, spans.query_ends, spans.key_ends, spans.most_queries, spans.most_keys)
            return found[0] if isinstance(found, tuple) else found

        return flash, "FlashAttention-3, as this is a Hopper and fa3-fwd is there"

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any] | None:
        import torch

        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # what is made at a first call, such as compiled kernels, cannot be recorded
        torch.cuda.current_stream().wait_stream(stream)
        # Other threads may use the device meanwhile. One pool: graphs are launched one after the other.
        with torch.cuda.graph(graph, pool=_graphs(), stream=stream, capture_error_mode="thread_local"):
            made = call()
        return graph.replay, made

    def faults(self, torch: Mapping[str, str], drivers: Mapping[str, str]) -> Iterable[str]:
        have, cuda = re.search(r"\((\d+)[\d.]*\)", drivers.get(self.driver, "")), torch.get("cuda", "")
        oldest = DRIVERS.get(int(cuda.partition(".")[0] or 0), 0)
        if have and int(have[1]) < oldest and not any(self._root.glob(FORWARD)):
            needed = f"torch {torch['__version__']} is built for CUDA {cuda}, which needs an NVIDIA driver of {oldest} or later"
            yield f"{needed}, and {have[1]} is here: update it, or install a torch for an older CUDA."


@cache
def _graphs() -> Any:
    """The memory that all recordings of this process share."""
    import torch

    return torch.cuda.graph_pool_handle()
