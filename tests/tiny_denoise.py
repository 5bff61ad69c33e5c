"""A Denoise module without weights: its rows move to the number that the request names, at their own pace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm_omni.api import DenoiseModule, Job, Memory, Payload, RequestError, Row, StageContext, text
from vllm_omni.kit.solvers import euler


class Tiny(DenoiseModule):
    """Params: `to`, `tokens`, `steps`, `rows`, `slices` (in a step), `fail` (in a step that is shared, or alone), `previews`, `late`
    (slices of its preparation)."""

    calls: list[list[float]]
    """For each call the numbers that its rows move to."""

    def load(self, ctx: StageContext) -> None:
        self.calls = []

    def prepare(self, job: Job, parts: Sequence[Payload]) -> Iterable[Row | None]:
        asked = {"tokens": 4, "steps": 4, "rows": 1, "slices": 1, "fail": False, "previews": (), "late": 0, **job.params}
        if asked["to"] < 0:
            raise RequestError("'to' is below 0.", param="to")
        solver = euler(torch.linspace(1, 0, asked["steps"] + 1, dtype=torch.float64))
        start = torch.zeros(asked["tokens"], 1)
        for _ in range(asked["late"]):
            yield None
        for _ in range(asked["rows"]):
            yield Row(start, solver, [0.0] * asked["steps"], [asked], previews=asked["previews"], state=asked)

    def predict(self, passes: Sequence[Any], tokens: Any, times: Any) -> Iterable[Any]:
        self.calls.append([each["to"] for each in passes])
        for _ in range(max(each["slices"] for each in passes)):
            yield None
        if any(each["fail"] for each in passes):
            raise ValueError("it fails")
        yield torch.cat([torch.full((each["tokens"], 1), -float(each["to"])) for each in passes])

    def finish(self, row: Row, tokens: Any) -> Iterable[Payload]:
        yield text(f"{float(tokens.mean()):.3f}")


def memory(ctx: StageContext, job: Job | None) -> Memory:
    """A token is a MiB, and so is a forward; the weights are 10."""
    return Memory(10 << 20, (job.params.get("tokens", 4) if job else 1) << 20, 1 << 20)
