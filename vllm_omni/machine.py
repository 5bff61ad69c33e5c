"""This machine and this environment: the device, and what was built for it. Reads files; imports nothing of what it tells about."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from importlib_metadata import PackageNotFoundError, distribution

from vllm_omni.errors import SettingError


def detected() -> Any:
    """What `vllm_omni_platforms.detect` says of this machine. Raises SettingError for a misspelt variable."""
    from vllm_omni_platforms.detect import detect  # type: ignore[import-not-found,unused-ignore]

    try:
        return detect()
    except ValueError as error:
        raise SettingError(str(error), param="device") from None


def build(package: str) -> dict[str, str]:
    """What the version.py of one of PyTorch's packages says of its build (`{"__version__": "2.13.0+cpu"}`); {} if there is none."""
    from vllm_omni_platforms.detect import read_build

    spec = find_spec(package)
    built: dict[str, str] = read_build(Path(spec.origin).with_name("version.py")) if spec and spec.origin else {}
    return built


def record() -> dict[str, Any]:
    """What the build of this installation found out about the machine; {} if nobody recorded it."""
    try:
        return dict(json.loads(distribution("vllm-omni").read_text("vllm_omni.json") or "{}"))
    except (PackageNotFoundError, ValueError):
        return {}


def source(name: str) -> tuple[str, ...]:
    """What to tell an installer so that it installs the very distribution that is there: where it came from, else its name and version."""
    dist = distribution(name)
    try:
        direct = json.loads(dist.read_text("direct_url.json") or "{}")
        url = str(direct.get("url", ""))
    except (ValueError, AttributeError):  # it is not what it should be
        url = ""
    if not url:
        return (f"{dist.name}=={dist.version}",)
    if "vcs_info" in direct:
        inside = f"#subdirectory={direct['subdirectory']}" if "subdirectory" in direct else ""
        return (f"{dist.name} @ {direct['vcs_info']['vcs']}+{url}@{direct['vcs_info']['commit_id']}{inside}",)
    if not url.startswith("file:"):
        return (f"{dist.name} @ {url}",)
    path = unquote(urlsplit(url).path)
    return ("-e", path) if direct.get("dir_info", {}).get("editable") else (path,)
