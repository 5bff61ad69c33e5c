"""The OneShot stage that turns latents into pictures, or into frames as they are ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_omni.api import IMAGE, Job, OneShotModule, Payload, StageContext, image, video

from .autoencoder import Autoencoder


class Decoder(OneShotModule):
    """Pictures at once, so that a preview does not wait; videos one after the other, in pieces, other jobs' in between."""

    def load(self, ctx: StageContext) -> None:
        self.autoencoder = Autoencoder(ctx)

    def open(self, job: Job) -> tuple[Job, list[Payload]]:
        return job, []

    def run(self, rows: Sequence[tuple[tuple[Job, list[Payload]], Payload]]) -> Sequence[Sequence[Payload]]:
        made: list[list[Payload]] = []
        for (job, videos), latents in rows:
            made.append([])
            if IMAGE in job.wants:
                made[-1].append(image(next(self.autoencoder.decode(latents.data))[0].cpu().numpy(), **_told(latents)))
            else:
                videos.append(latents)
        return made

    def flush(self, state: tuple[Job, list[Payload]]) -> Iterator[Payload]:
        for latents in state[1]:
            for frames in self.autoencoder.decode(latents.data):
                yield video(frames.cpu().numpy(), latents.meta["fps"], **_told(latents))


def _told(latents: Payload) -> dict[str, object]:
    return {name: value for name, value in latents.meta.items() if name != "fps"}
