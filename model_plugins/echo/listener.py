"""The listener measures what a client sends: how loud a sound is, what colour a picture has.

It runs only for requests that bring either: the edges that leave it are optional.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_omni.api import AUDIO, Job, OneShotModule, Payload
from vllm_omni_echo.plugin import COLOUR, LOUDNESS


class Listener(OneShotModule):
    def open(self, job: Job) -> Job:
        return job

    def run(self, rows: Sequence[tuple[Job, Payload]]) -> Sequence[Sequence[Payload]]:
        return [[found for found in (_measured(part),) if found.kind in job.wants] for job, part in rows]


def _measured(part: Payload) -> Payload:
    if part.kind == AUDIO:
        return Payload(LOUDNESS, np.abs(part.data).max(initial=0, keepdims=True).astype(np.float32))
    return Payload(COLOUR, part.data.mean(axis=(0, 1), dtype=np.float64, keepdims=True)[0].astype(np.float32))
