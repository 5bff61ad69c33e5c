"""The data of a payload as one range of bytes with a typed header, and back. Copies nothing that is contiguous on the host.

Knows text, bytes, numpy arrays and torch tensors. Imports torch only for a tensor that came as one, and only where asked to.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from vllm_omni.errors import StageError


class Flat(NamedTuple):
    """`container` is text, bytes, numpy, torch or none; `dtype` a numpy or torch name; `data` a contiguous buffer."""

    container: str
    dtype: str
    shape: list[int]
    data: memoryview


def container_of(data: Any) -> str:
    """The container of a payload's data. Raises StageError for anything but text, bytes, a numpy array or a torch tensor."""
    if data is None:
        return "none"
    if isinstance(data, str):
        return "text"
    if isinstance(data, (bytes, bytearray, memoryview)):
        return "bytes"
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(data, numpy.ndarray):
        if data.dtype.kind not in "biufc":
            raise StageError(f"An array of dtype {data.dtype} cannot travel between stages; use a numeric one.")
        return "numpy"
    if torch is not None and isinstance(data, torch.Tensor):
        return "torch"
    raise StageError(f"Data of type {type(data).__name__} cannot travel between stages; give text, bytes, a numpy array or a torch tensor.")


def flatten(data: Any) -> Flat:
    """A payload's data as bytes. Raises StageError for what cannot travel."""
    container = container_of(data)
    if container in ("none", "text"):
        return Flat(container, "", [], memoryview((data or "").encode(errors="surrogatepass")))
    if container == "bytes":
        view = memoryview(data)
        return Flat(container, "", [], view.cast("B") if view.c_contiguous else memoryview(view.tobytes()))
    if container == "numpy":
        import numpy

        return Flat(container, data.dtype.str, list(data.shape), _bytes_of(numpy.ascontiguousarray(data)))
    import torch

    host = data.detach().to("cpu").contiguous()
    return Flat(container, str(host.dtype).removeprefix("torch."), list(host.shape), _bytes_of(host.flatten().view(torch.uint8).numpy()))


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view("u1"))


def restore(container: str, dtype: str, shape: list[int], data: Any, *, torch_here: bool) -> Any:
    """The data as it was. Arrays are views of `data`, which they keep alive.

    Where torch is not wanted (`torch_here` false) a tensor arrives as a numpy array, bfloat16 widened to float32.
    """
    if container == "none":
        return None
    if container == "text":
        return str(data, "utf-8", "surrogatepass")
    if container == "bytes":
        return bytes(data)
    import numpy

    flat = numpy.frombuffer(data, dtype=numpy.uint8)
    if container == "numpy":
        return flat.view(dtype).reshape(shape)
    if torch_here:
        import torch

        writable = flat if flat.flags.writeable else flat.copy()
        return torch.from_numpy(writable).view(getattr(torch, dtype)).reshape(shape)
    if dtype == "bfloat16":
        return (flat.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32).reshape(shape)
    return flat.view(dtype).reshape(shape)
