"""The painter draws lines of text, each word in the colour of its pitch, on a ground of the client's mean colour.

A picture is one chunk: it is drawn when the last line is known. Previews, if wanted, come before it.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vllm_omni.api import Job, OneShotModule, Payload, StageContext, image
from vllm_omni_echo.plugin import COLOUR

Colour = tuple[int, int, int]
MARGIN = 8
LINE = 24
"""Height of a line, in pixels."""


@dataclass
class Canvas:
    """One request: its ground and its lines so far, each a list of words with their pitches in Hz."""

    previews: int = 0
    ground: Colour = (255, 255, 255)
    lines: list[list[tuple[str, float]]] = field(default_factory=list)


class Painter(OneShotModule):
    def load(self, ctx: StageContext) -> None:
        self.font = ImageFont.load_default(16)

    def open(self, job: Job) -> Canvas:
        return Canvas(job.params["partial_images"])

    def run(self, rows: Sequence[tuple[Canvas, Payload]]) -> Sequence[Sequence[Payload]]:
        for canvas, chunk in rows:
            if chunk.kind == COLOUR:
                red, green, blue = chunk.data.mean(axis=0).round().astype(int).tolist()
                canvas.ground = (red, green, blue)
            else:
                canvas.lines.append(list(zip(chunk.data.split(), chunk.meta["hz"], strict=True)))
        return [()] * len(rows)

    def flush(self, canvas: Canvas) -> Iterator[Payload]:
        space = self.font.getlength(" ")
        widths = [sum(self.font.getlength(word) + space for word, _ in line) for line in canvas.lines]
        picture = Image.new("RGB", (math.ceil(max(widths)) + 2 * MARGIN, len(widths) * LINE + 2 * MARGIN), canvas.ground)
        draw = ImageDraw.Draw(picture)
        count, drawn, shown = sum(map(len, canvas.lines)), 0, 0
        for row, line in enumerate(canvas.lines):
            left = float(MARGIN)
            for word, hz in line:
                while shown < canvas.previews and drawn * (canvas.previews + 1) >= count * (shown + 1):
                    yield image(np.array(picture), partial=shown)
                    shown += 1
                draw.text((left, MARGIN + row * LINE), word, fill=colour(hz), font=self.font)
                left += self.font.getlength(word) + space
                drawn += 1
        yield image(np.asarray(picture))


def colour(hz: float) -> Colour:
    """The colour of a pitch: an octave goes once round the colour wheel."""
    red, green, blue = colorsys.hsv_to_rgb(math.log2(hz / 220) % 1, 1, 0.75)
    return round(red * 255), round(green * 255), round(blue * 255)
