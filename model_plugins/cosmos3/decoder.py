"""The OneShot stage that turns latents into pictures, or into frames as they are ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vllm_omni.api import IMAGE, Job, OneShotModule, Payload, StageContext, image, video

from .autoencoder import Autoencoder
from .guardrail import Guardrail, wanted


class Decoder(OneShotModule):
    """Pictures at once, so that a preview does not wait; videos one after the other, in pieces, other jobs' in between."""

    def load(self, ctx: StageContext) -> None:
        self.autoencoder = Autoencoder(ctx, encodes=False)
        self.guardrail = Guardrail(ctx) if ctx.args["guardrail"] else None

    def open(self, job: Job) -> tuple[Job, list[Payload]]:
        return job, []

    def run(self, rows: Sequence[tuple[tuple[Job, list[Payload]], Payload]]) -> Sequence[Sequence[Payload]]:
        made: list[list[Payload]] = []
        for (job, videos), latents in rows:
            made.append([])
            if IMAGE in job.wants:
                (picture,) = next(self._frames(job, latents))
                made[-1].append(image(picture, **_told(latents)))
            else:
                videos.append(latents)
        return made

    def flush(self, state: tuple[Job, list[Payload]]) -> Iterator[Payload]:
        job, videos = state
        for latents in videos:
            for frames in self._frames(job, latents):
                yield video(frames, latents.meta["fps"], **_told(latents))

    def _frames(self, job: Job, latents: Payload) -> Iterator[Any]:
        """uint8 [frames, height, width, 3], some at a time; all at once if the guardrail has to see them first."""
        made = (frames.cpu().numpy() for frames in self.autoencoder.decode(latents.data))
        guardrail = wanted(self.guardrail, job.params["guardrails"])
        return iter([guardrail.cleaned(np.concatenate(list(made)))]) if guardrail else made


def _told(latents: Payload) -> dict[str, object]:
    return {name: value for name, value in latents.meta.items() if name != "fps"}
