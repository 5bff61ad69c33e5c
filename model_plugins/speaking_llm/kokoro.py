"""Kokoro's ONNX graph, changed so that sound comes sooner, and stays the same bit for bit.

An integer convolution becomes one integer matrix product over shifted copies of its input, time first. ONNX Runtime gathers those
copies number by number, and most of its time went there; and it has faster products for weights with a sign.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_END = 2**62


def can_multiply_signed(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies bytes without and with a sign exactly (VNNI). On x86 without it, ONNX Runtime's sums saturate."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    return not {"avx512_vnni", "avx_vnni", "amx_int8"}.isdisjoint(flags)


def multiplied(model: bytes) -> bytes:
    """The serialised model with products in place of convolutions: every ConvInteger over time of stride 1 with constant weights."""
    import onnx

    proto = onnx.load_model_from_string(model)
    _multiply(proto.graph)
    return bytes(proto.SerializeToString())


def _multiply(graph: Any) -> None:
    from onnx import helper, numpy_helper

    values = {value.name: value for value in graph.initializer}
    nodes: list[Any] = []
    for node in graph.node:
        options = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type != "ConvInteger" or options.get("strides", [1]) != [1] or len(node.input) < 4:
            nodes.append(node)
            continue
        source, zero = node.input[0], node.input[2]
        weight, weight_zero = (numpy_helper.to_array(values[node.input[at]]).astype("int16") - 128 for at in (1, 3))
        out, channels, taps = weight.shape
        step, pads = options.get("dilations", [1])[0], options.get("pads", [0, 0])
        name = node.output[0]

        def keep(what: str, value: Any, name: str = name) -> str:
            graph.initializer.append(numpy_helper.from_array(value, f"{name}.{what}"))
            return f"{name}.{what}"

        def add(kind: str, inputs: list[str], what: str, name: str = name, **options: Any) -> str:
            nodes.append(helper.make_node(kind, inputs, [f"{name}.{what}"], **options))
            return f"{name}.{what}"

        rows = weight.transpose(2, 1, 0).reshape(taps * channels, out).astype("int8")
        timed = add("Transpose", [source], "timed", perm=[0, 2, 1])
        if any(pads):
            timed = add("Pad", [timed, keep("pads", _ints(0, pads[0], 0, 0, pads[1], 0)), zero], "padded")
        if taps > 1:
            one = keep("one", _ints(1))
            borders = [
                (keep(f"from{tap}", _ints(tap * step)), keep(f"to{tap}", _ints((tap - taps + 1) * step or _END))) for tap in range(taps)
            ]
            shifted = [add("Slice", [timed, *border, one], f"tap{tap}") for tap, border in enumerate(borders)]
            timed = add("Concat", shifted, "taps", axis=2)
        product = add("MatMulInteger", [timed, keep("rows", rows), zero, keep("zero", weight_zero.astype("int8").reshape(()))], "product")
        nodes.append(helper.make_node("Transpose", [product], [name], perm=[0, 2, 1]))
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    kept = [value for value in graph.initializer if value.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _ints(*values: int) -> Any:
    import numpy as np

    return np.array(values, np.int64)
