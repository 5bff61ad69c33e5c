"""The OneShot stage that turns latents into a picture or frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_omni.api import IMAGE, Job, OneShotModule, Payload, StageContext, image, video

from .autoencoder import Autoencoder


class Decoder(OneShotModule):
    """One video at a time."""

    def load(self, ctx: StageContext) -> None:
        self.autoencoder = Autoencoder(ctx)

    def open(self, job: Job) -> Job:
        return job

    def run(self, rows: Sequence[tuple[Any, Payload]]) -> Sequence[Sequence[Payload]]:
        made = []
        for job, latents in rows:
            frames = self.autoencoder.decode(latents.data).cpu().numpy()
            meta = {name: value for name, value in latents.meta.items() if name != "fps"}
            made.append([image(frames[0], **meta)] if IMAGE in job.wants else [video(frames, latents.meta["fps"], **meta)])
        return made
