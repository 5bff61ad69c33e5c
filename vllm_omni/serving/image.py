"""Pictures at the HTTP edge: uint8 [height, width, 3] RGB to the bytes of a file and back, through Pillow. The calls block."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from vllm_omni.errors import RequestError

Pixels = NDArray[np.uint8]

MAX_PIXELS = 1 << 26
"""The largest picture a client may send: 8192 x 8192, 192 MiB as RGB. A small file can hold far more than its size."""
READABLE = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
WRITABLE = ("png", "jpeg", "webp")


def encode(pixels: Pixels, name: str, quality: int = 100) -> bytes:
    """A file in the format `name`, one of `WRITABLE`; JPEG and WebP lose more the lower the `quality` is, from 100 to 0.

    PNG is compressed lightly: the time matters more than the last tenth of the size.
    """
    options = {"compress_level": 1} if name == "png" else {"quality": quality} | ({"subsampling": 0} if name == "jpeg" else {})
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels, np.uint8)).save(file, name, **options)
    return file.getvalue()


def encode_png(pixels: Pixels) -> bytes:
    return encode(pixels, "png")


def decode(data: bytes, param: str) -> Pixels:
    """The pixels of a picture file, upright, on white where it is transparent; the first frame of an animation.

    `param` names the request field in the RequestError that bad data raises.
    """
    try:
        with Image.open(io.BytesIO(data), formats=READABLE) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                message = f"'{param}' has {picture.width} x {picture.height} pixels: send a picture of at most {MAX_PIXELS} pixels."
                raise RequestError(message, param=param)
            upright = ImageOps.exif_transpose(picture)
            if upright.has_transparency_data:
                layer = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
            return np.asarray(upright.convert("RGB"))
    except UnidentifiedImageError as error:
        raise RequestError(f"'{param}' is not a picture; readable are {', '.join(READABLE)}.", param=param) from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError(f"'{param}' cannot be read as a picture: {error}.", param=param) from error


def readable(data: bytes) -> bool:
    """Whether this is a picture file, by its beginning; `decode` says what else is wrong with it."""
    try:
        with Image.open(io.BytesIO(data), formats=READABLE):
            return True
    except UnidentifiedImageError:
        return False
    except (OSError, SyntaxError, Image.DecompressionBombError):
        return True
