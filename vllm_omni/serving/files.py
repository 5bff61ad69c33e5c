"""Files that an answer names by a link: in a temporary folder, which is gone when the process ends. Whoever has the link reads them."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_omni.errors import NotFoundError

LIMIT = 1 << 30
"""Bytes that are kept; beyond them the oldest files go."""


class Files:
    """The folder. The calls block, and may come from any thread."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._folder: TemporaryDirectory[str] | None = None

    def keep(self, data: bytes, suffix: str) -> str:
        """The name of a new file, which nobody can guess. The newest one stays, however large."""
        name = f"{secrets.token_urlsafe(24)}.{suffix}"
        with self._lock:
            self._folder = self._folder or TemporaryDirectory(prefix="vllm-omni-")
            self._sizes[name] = len(data)
            (Path(self._folder.name) / name).write_bytes(data)
            while sum(self._sizes.values()) > self._limit and len(self._sizes) > 1:
                oldest = next(iter(self._sizes))
                del self._sizes[oldest]
                (Path(self._folder.name) / oldest).unlink()
        return name

    def read(self, name: str) -> bytes:
        """Raises NotFoundError for a name that is not, or no longer, here."""
        with self._lock:
            if self._folder and name in self._sizes:
                return (Path(self._folder.name) / name).read_bytes()
        raise NotFoundError(f"There is no file '{name[:100]}'. The oldest go when there are too many, and all when the server stops.")
