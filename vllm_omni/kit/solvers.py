"""Solvers of a flow's differential equation, as tables of numbers: what each step multiplies with, for many rows at once.

A sample at noise level sigma is `(1 - sigma) * data + sigma * noise`, and the model predicts its velocity, `noise - data`. Every solver
here is linear in what it has seen. So a step is a few multiplications, and rows with other solvers and lengths go through it together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

HISTORY = 2
"""Predictions of the data that a step may look back on, beside its own."""
COLUMNS = 6 + 2 * HISTORY
"""What a step of a table has: sigma; the corrector's weights of the sample, the corrected sample before, the prediction, and those before
it; the predictor's weights of the corrected sample, the prediction, and those before it."""


@dataclass(frozen=True, slots=True)
class Solver:
    """A solver for one number of steps: the noise levels [steps + 1], from noise to data, and the table [steps, COLUMNS], both float64."""

    sigmas: Any
    table: Any

    @property
    def steps(self) -> int:
        return int(self.table.shape[0])


def shifted(sigmas: Sequence[float] | Any, shift: float) -> Any:
    """Noise levels moved towards noise: `shift * sigma / (1 + (shift - 1) * sigma)` (arXiv:2403.03206, equation 23). float64."""
    sigmas = torch.as_tensor(sigmas, dtype=torch.float64)
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def euler(sigmas: Sequence[float] | Any) -> Solver:
    """`sample + (sigma_next - sigma) * velocity`, for noise levels [steps + 1] that fall, the last one 0 as a rule."""
    levels = torch.as_tensor(sigmas, dtype=torch.float64)
    rows = []
    for sigma, after in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        rows.append(_row(sigma, _NOTHING, {"sample": after / sigma, "seen": [1 - after / sigma]}))
    return Solver(levels, torch.tensor(rows, dtype=torch.float64))


def unipc(sigmas: Sequence[float] | Any, order: int = 2, *, corrector: bool = True) -> Solver:
    """UniPC (arXiv:2302.04867) that predicts the data, with B(h) = exp(h) - 1, and lower orders in the first and the last steps.

    Noise levels [steps + 1] must fall, and be below 1. `order` is 1 or 2; ValueError for others.
    """
    if not 1 <= order <= HISTORY:
        raise ValueError(f"'order' is {order}; it can be 1 or 2.")
    levels = torch.as_tensor(sigmas, dtype=torch.float64)
    noise = levels.tolist()
    steps, used, rows = len(noise) - 1, 0, []
    for step in range(steps):
        correct = _update(noise, step - 1, used, corrects=True) if corrector and step else _NOTHING
        used = min(order, steps - step, step + 1)
        rows.append(_row(noise[step], correct, _update(noise, step, used, corrects=False)))
    return Solver(levels, torch.tensor(rows, dtype=torch.float64))


_NOTHING: dict[str, Any] = {"sample": 0.0, "seen": [], "keep": 1.0}
"""A corrector that leaves the sample as it is."""


def _row(sigma: float, correct: dict[str, Any], predict: dict[str, Any]) -> list[float]:
    def padded(weights: list[float]) -> list[float]:
        return [*weights, *[0.0] * (HISTORY + 1 - len(weights))]

    return [sigma, correct.get("keep", 0.0), correct["sample"], *padded(correct["seen"]), predict["sample"], *padded(predict["seen"])]


def _update(noise: Sequence[float], start: int, order: int, *, corrects: bool) -> dict[str, Any]:
    """The weights of the step from level `start` to the next, of the sample and of the predictions: newest first.

    A corrector's newest is that at the next level, which it knows already; a predictor's is that at `start`.
    """
    begin, end = noise[start], noise[start + 1]
    h = _lambda(end) - _lambda(begin)
    back = [(_lambda(noise[start - number]) - _lambda(begin)) / h for number in range(1, order)]
    grow = math.expm1(-h)
    weights = _weights([*back, 1.0] if corrects else back, h)
    scale = (1 - end) * grow
    at_start = -scale + scale * sum(weight / place for weight, place in zip(weights, [*back, 1.0], strict=False))
    before = [-scale * weight / place for weight, place in zip(weights, back, strict=False)]
    newest = [-scale * weights[-1]] if corrects else []
    return {"sample": end / begin, "seen": [*newest, at_start, *before]}


def _lambda(sigma: float) -> float:
    """Half the logarithm of the signal-to-noise ratio."""
    return math.inf if sigma == 0 else math.log1p(-sigma) - math.log(sigma)


def _weights(places: list[float], h: float) -> list[float]:
    """Those of the differences to the prediction at the start, for predictions at these places (1 is the end of the step)."""
    if len(places) < 2:
        return [0.5] * len(places)
    part, factorial, right = math.expm1(-h) / -h - 1, 1, []
    for number in range(1, len(places) + 1):
        right.append(part * factorial / math.expm1(-h))
        factorial *= number + 1
        part = part / -h - 1 / factorial
    powers = torch.tensor([[place**power for place in places] for power in range(len(places))], dtype=torch.float64)
    solved: list[float] = torch.linalg.solve(powers, torch.tensor(right, dtype=torch.float64)).tolist()
    return solved


@dataclass(slots=True)
class Samples:
    """Samples of any rows, packed: [tokens, channels] each, and what their solvers remember of them."""

    now: Any
    corrected: Any
    seen: list[Any]

    @classmethod
    def start(cls, noise: Any) -> Samples:
        return cls(noise, torch.zeros_like(noise), [torch.zeros_like(noise) for _ in range(HISTORY)])

    @classmethod
    def join(cls, parts: Sequence[Samples]) -> Samples:
        """Those of several, packed in this order."""
        seen = [torch.cat(each) for each in zip(*(part.seen for part in parts), strict=True)]
        return cls(torch.cat([part.now for part in parts]), torch.cat([part.corrected for part in parts]), seen)

    def split(self, counts: Sequence[int]) -> list[Samples]:
        """The opposite of `join`, for parts of so many tokens."""
        seen = zip(*(each.split(counts) for each in self.seen), strict=True)
        every = zip(self.now.split(counts), self.corrected.split(counts), seen, strict=True)
        return [Samples(now, corrected, list(each)) for now, corrected, each in every]

    def step(self, velocity: Any, weights: Any) -> None:
        """One step of every token, in place of what was. `weights` [tokens, COLUMNS] are the rows of their solvers' tables."""
        sigma, keep, corrected, *rest = weights.unsqueeze(-1).unbind(1)
        correct, (sample, *predict) = rest[: HISTORY + 1], rest[HISTORY + 1 :]
        seen = [self.now - sigma * velocity, *self.seen]
        here = keep * self.now + corrected * self.corrected + sum(weight * each for weight, each in zip(correct, seen, strict=True))
        self.now = sample * here + sum(weight * each for weight, each in zip(predict, seen, strict=True))
        self.corrected, self.seen = here, seen[:HISTORY]
