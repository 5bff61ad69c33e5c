"""Rows of a Denoise stage on their way, and packs of them: what is kept on the device for rows that make their steps together.

A pack is made when rows come together and taken apart when one joins or leaves. Between that a step of it moves no row by itself and waits
for no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vllm_omni.engine import DenoiseModule, Row
from vllm_omni.kit.solvers import Samples


class Moving:
    """A row on its way: its samples (while it is in no pack), and how many steps it has made. `owner` is the engine's."""

    def __init__(self, row: Row, owner: Any) -> None:
        self.row, self.owner = row, owner
        self.samples: Samples | None = Samples.start(row.tokens)
        self.pack: Pack | None = None
        self.step = 0

    @property
    def cost(self) -> int:
        return len(self.row.tokens) * len(self.row.passes)

    @property
    def over(self) -> bool:
        return self.step == int(self.row.solver.steps)

    def taken(self) -> Samples:
        """Its samples, out of the pack that it is in."""
        if self.pack is not None:
            self.pack.part()
        assert self.samples is not None
        return self.samples


class Pack:
    """Rows that make their steps together. `used` is how many seconds their forwards took."""

    def __init__(self, rows: Sequence[Moving], module: DenoiseModule) -> None:
        self.rows, self.used = tuple(rows), 0.0
        self._module = module
        self._done = 0
        self._counts = [len(row.row.tokens) for row in rows]
        self._samples = Samples.join([row.taken() for row in rows])
        for row in rows:
            row.pack, row.samples = self, None
        tokens = rows[0].row.tokens
        passes = [(number, each) for number, row in enumerate(rows) for each in row.row.passes]
        self._packed = module.pack([each for _, each in passes])
        begins = [sum(self._counts[:number]) for number in range(len(rows))]
        self._owner = _spread(list(range(len(rows))), self._counts, tokens)
        self._schedule = self._schedules(tokens)
        own = torch.arange(sum(self._counts), device=tokens.device)
        parts = own.split(self._counts)
        self._spread = torch.cat([parts[number] for number, _ in passes])
        self._passing = torch.tensor([number for number, _ in passes]).to(tokens.device)
        self._guided = any(len(row.row.passes) > 1 for row in rows)
        if self._guided:
            at = [
                sum(len(row.row.passes) * count for row, count in zip(rows[:number], self._counts, strict=False))
                for number in range(len(rows))
            ]
            to = [at[number] - begins[number] for number in range(len(rows))]
            away = [
                to[number] + (count if len(row.row.passes) > 1 else 0)
                for number, (row, count) in enumerate(zip(rows, self._counts, strict=True))
            ]
            self._to, self._away = (own + _spread(each, self._counts, tokens) for each in (to, away))
            self._guidance = torch.tensor([[row.row.guidance] for row in rows], dtype=tokens.dtype).to(tokens.device)[self._owner]
        masks = [row.row.mask for row in rows]
        filled = [torch.ones_like(row.row.tokens) if mask is None else mask for row, mask in zip(rows, masks, strict=True)]
        self._mask = None if all(mask is None for mask in masks) else torch.cat(filled)

    def _schedules(self, like: Any) -> Any:
        """[steps, rows, columns]: the solvers' tables from where each row is, with the model's time as the last column."""
        left = max(row.row.solver.steps - row.step for row in self.rows)
        found = []
        for row in self.rows:
            times = torch.tensor(row.row.times, dtype=torch.float64).unsqueeze(1)
            mine = torch.cat([row.row.solver.table, times], dim=1)[row.step :]
            found.append(torch.nn.functional.pad(mine, (0, 0, 0, left - len(mine))))
        return torch.stack(found, dim=1).to(like.dtype).to(like.device)

    def forward(self) -> Iterator[Any]:
        """What the module yields for the next step: None any number of times, and the velocities at last."""
        times = self._schedule[self._done, :, -1].index_select(0, self._passing)
        yield from self._module.predict(self._packed, self._samples.now.index_select(0, self._spread), times)

    def move(self, velocities: Any) -> None:
        """Make the step that `velocities` are for."""
        if self._guided:
            away = velocities.index_select(0, self._away)
            velocities = away + self._guidance * (velocities.index_select(0, self._to) - away)
        if self._mask is not None:
            velocities = velocities * self._mask
        self._samples.step(velocities, self._schedule[self._done, :, :-1].index_select(0, self._owner))
        self._done += 1
        for row in self.rows:
            row.step += 1

    def of(self, row: Moving, *, data: bool) -> Any:
        """The tokens of a row as they are, or (`data`) as they were predicted to become."""
        at = self.rows.index(row)
        begin = sum(self._counts[:at])
        return (self._samples.seen[0] if data else self._samples.now)[begin : begin + self._counts[at]]

    def part(self) -> None:
        """Give each row its samples back."""
        for row, samples in zip(self.rows, self._samples.split(self._counts), strict=True):
            row.pack, row.samples = None, samples


def _spread(values: Sequence[int], counts: Sequence[int], like: Any) -> Any:
    """Each value so many times, on the device of `like`."""
    return torch.tensor(values).repeat_interleave(torch.tensor(counts)).to(like.device)
