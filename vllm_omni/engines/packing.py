"""Rows of a Denoise stage on their way, and packs of them: what is kept on the device for rows that make their steps together.

A pack is made when rows come together and taken apart when one joins or leaves. Between that a step of it moves no row by itself and waits
for no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
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
        device = rows[0].row.tokens.device
        passes = [(number, each) for number, row in enumerate(rows) for each in row.row.passes]
        self._packed = module.pack([each for _, each in passes])
        self._schedule = self._schedules().to(rows[0].row.tokens)
        # Of each token of the rows: its row. Of each pass: its row. Of each token of the passes: its place among those of the rows.
        self._owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(self._counts)).to(device)
        self._passing = torch.tensor([number for number, _ in passes]).to(device)
        parts = torch.arange(sum(self._counts)).split(self._counts)
        self._spread = torch.cat([parts[number] for number, _ in passes]).to(device)
        self._guided = len(passes) > len(rows)
        if self._guided:  # of each token of the rows: where the velocity to go to is among those of the passes, and the one to go away from
            begins = accumulate((self._counts[number] for number, _ in passes), initial=0)
            spans = [
                (number, torch.arange(begin, begin + self._counts[number])) for begin, (number, _) in zip(begins, passes, strict=False)
            ]
            last = dict(spans)
            first = dict(reversed(spans))
            self._to, self._away = (torch.cat([each[number] for number in range(len(rows))]).to(device) for each in (first, last))
            self._guidance = torch.tensor([[row.row.guidance] for row in rows]).to(rows[0].row.tokens)[self._owner]
        masks = [row.row.mask for row in rows]
        filled = [torch.ones_like(row.row.tokens) if mask is None else mask for row, mask in zip(rows, masks, strict=True)]
        self._mask = None if all(mask is None for mask in masks) else torch.cat(filled)

    def _schedules(self) -> Any:
        """[steps, rows, columns]: the solvers' tables from where each row is, with the model's time as the last column."""
        left = max(row.row.solver.steps - row.step for row in self.rows)
        found = []
        for row in self.rows:
            times = torch.tensor(row.row.times, dtype=torch.float64).unsqueeze(1)
            mine = torch.cat([row.row.solver.table, times], dim=1)[row.step :]
            found.append(torch.nn.functional.pad(mine, (0, 0, 0, left - len(mine))))
        return torch.stack(found, dim=1)

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
