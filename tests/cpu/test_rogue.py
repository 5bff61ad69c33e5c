"""Plugin code that goes wrong in every way: the request at hand fails alone, says why, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import rogue
from holding import nothing_held

from vllm_omni.errors import RequestError, StageError
from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import ACTION, TEXT

ERRORS = {
    "ValueError": "ValueError: oh no", "SystemExit": r"SystemExit\(3\)", "KeyboardInterrupt": "KeyboardInterrupt",
    "CancelledError": "CancelledError", "StopIteration": "StopIteration", "GeneratorExit": "GeneratorExit",
    "UnsayableError": "UnsayableError", "RequestError": "no", "object": "an object", "surrogate": r"half \\ud800 a pair",
}  # fmt: skip
FAULTS = {
    **{f"{place} {what}": says for place in ("open", "shape_key", "run", "flush", "run2") for what, says in ERRORS.items()},
    "shape_key unhashable": "unhashable",
    **{f"returns {what}": "must return one item for each" for what in ("nothing", "a number", "no row", "a generator", "an array")},
    "returns row nothing": "NoneType", "returns row text": "gave a str where a Payload belongs",
    "returns row undeclared": "'codez', which its stage does not declare", "flush nothing": "NoneType",
    **{f"meta {what}": "cannot travel" for what in ("scalar", "float64", "set", "big", "key", "object")},
    "meta surrogate": "half of a surrogate pair", "meta endless": "RecursionError",
    **{f"data {what}": "cannot travel" for what in ("object", "map", "strings", "scalar")},
    **{f"{place} {what}": ERRORS[what] for place in ("bridge", "mid") for what in ("ValueError", "CancelledError", "GeneratorExit")},
    "bridge StopIteration": "StopIteration", "bridge SystemExit": "raised SystemExit", "mid SystemExit": "raised SystemExit",
}  # fmt: skip
HARMLESS = ["bridge ends early", "flush pause", *(f"close {what}" for what in ERRORS)]


async def nothing_left(omni: AsyncOmni) -> None:
    """Nothing is held, and no garbage collection is needed for it."""
    async with asyncio.timeout(5):
        await nothing_held(omni, collect=False)


async def ask(omni: AsyncOmni, does: str = "") -> tuple[str, Any]:
    async with asyncio.timeout(10):
        result = await omni.generate("x", (TEXT, ACTION), does=does)
        return result.text, None if result.actions is None else result.actions[:, 0].tolist()


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "processes"])
def test_a_fault_ends_its_own_request_and_no_other(inline: bool) -> None:
    async def check(omni: AsyncOmni, does: str, says: str) -> None:
        good, bad, also = await asyncio.gather(ask(omni), ask(omni, does), ask(omni), return_exceptions=True)
        assert good == also == ("0 1 2 ", [0, 1, 2]), does
        assert isinstance(bad, RequestError if says == ERRORS.get(does.split()[1]) in ("no", "an object") else StageError), does
        assert re.search(says, bad.message), f"{does}: {bad.message}"
        assert bad.stage == ("second" if does.split()[0] in ("run2", "bridge", "mid") else "first"), does

    async def main() -> None:
        async with AsyncOmni(rogue.deployment(), inline=inline) as omni:
            processes = [replica.pid for replica in omni.orchestrator._replicas.replicas]
            for does, says in FAULTS.items():
                await check(omni, does, says)
                await nothing_left(omni)
            for does in HARMLESS:
                assert (await ask(omni, does))[0] == "0 1 2 ", does
                assert await ask(omni) == ("0 1 2 ", [0, 1, 2]), does
                await nothing_left(omni)
            assert [replica.pid for replica in omni.orchestrator._replicas.replicas] == processes

    asyncio.run(main())
