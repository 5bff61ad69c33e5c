"""MODEL as files: those of a folder, or of a repository on the Hugging Face hub, of which only what is needed is fetched.

`huggingface_hub` does the work and its environment variables hold (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE). What it no
longer does is done here: a weight file whose download was killed goes on where it stopped. Whose model it is, is `resolve.py`'s question.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import re
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.errors import NotFoundError, OmniError, SettingError, UnavailableError

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

SMALL = (".json", ".txt", ".yaml", ".model", ".tiktoken", ".vocab", ".bpe", ".jinja")
WEIGHTS = ((".safetensors",), (".bin", ".pt", ".pth", ".ckpt"), (".onnx", ".onnx_data"), (".gguf",))
ALL_WEIGHTS = tuple(suffix for family in WEIGHTS for suffix in family)


def open_model(model: str, revision: str | None = None, token: str | None = None) -> Checkpoint:
    """The files of a folder or of a hub id (`owner/name`). Raises NotFoundError if MODEL can be neither."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        refuse_source(f"MODEL is the folder {path}", revision, token)
        return Folder(path, str(path))
    if model and path.exists():
        raise NotFoundError(f"{path} is a file; MODEL is a checkpoint's folder, a hub id or an alias.", param="model")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise NotFoundError(f"There is no folder '{model}', and a hub id looks like owner/name.", param="model")
    return _open_repository(model, revision or "main", token)


def refuse_source(reason: str, revision: str | None, token: str | None) -> None:
    """Raise SettingError if a flag was given that means something for a hub id only."""
    for name, value in (("--revision", revision), ("--hf-token", token)):
        if value is not None:
            raise SettingError(f"{name} has no effect: {reason}. Leave it out.", param=name)


def needed(names: Iterable[str]) -> list[str]:
    """The files that running a checkpoint takes: configurations, tokenizers, and its weights in one format, safetensors if it has them."""
    names = [name for name in names if not name.startswith("original/")]
    weights: tuple[str, ...] = next((family for family in WEIGHTS if any(name.endswith(family) for name in names)), ())
    return [name for name in names if name.endswith((*SMALL, *weights))]


class Checkpoint(Mapping[str, Any]):
    """The files by name: what a JSON file holds, None for any other. A file is fetched and read when it is asked for."""

    where: str

    @abstractmethod
    def path(self, name: str) -> Path:
        """One file, on this machine."""

    @abstractmethod
    def fetch(self) -> str:
        """The folder, with everything that running the model takes."""

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        try:
            return json.loads(self.path(name).read_bytes()) if name.endswith(".json") else None
        except ValueError as error:
            raise SettingError(f"{name} of {self.where} is not JSON: {error}.", param="model") from None

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Folder(Checkpoint):
    """A checkpoint that is already here."""

    def __init__(self, folder: Path, where: str) -> None:
        self.folder, self.where = folder, where

    def __contains__(self, name: object) -> bool:
        return (self.folder / str(name)).is_file()

    def __iter__(self) -> Iterator[str]:
        found = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        return iter(sorted(path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)))

    def path(self, name: str) -> Path:
        return self.folder / name

    def fetch(self) -> str:
        return str(self.folder)


class Cached(Folder):
    """What the cache has of a repository, where the hub cannot be reached."""

    def fetch(self) -> str:
        """The folder, if it has weights and every shard that its indexes list. Raises UnavailableError otherwise."""
        missing = [] if any(name.endswith(ALL_WEIGHTS) for name in self) else ["its weights"]
        for index in self.folder.rglob("*.index.json"):
            shards = set(json.loads(index.read_bytes()).get("weight_map", {}).values())
            missing += [shard for shard in sorted(shards) if not (index.parent / shard).exists()]
        if missing:
            shown = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
            wrong = f"The cache has '{self.where}' without {shown}, and the hub cannot be reached. Connect to fetch the rest."
            raise UnavailableError(wrong, param="model")
        return super().fetch()


def _open_repository(repo: str, revision: str, token: str | None) -> Checkpoint:
    """A repository of the hub, or what the cache has of it."""
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    with _errors(repo, revision):
        try:
            info = HfApi(token=token).model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except errors.HfHubHTTPError:
            raise
        except (errors.HTTPError, errors.OfflineModeIsEnabled):  # type: ignore[attr-defined]
            folder = snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[])
            return Cached(Path(folder), _where(repo, revision))
    return Repository(repo, revision, token, info)


class Repository(Checkpoint):
    """A repository of the hub, at the commit that its revision stands for now."""

    def __init__(self, repo: str, revision: str, token: str | None, info: ModelInfo) -> None:
        self.repo, self.revision, self.token = repo, revision, token
        self.where = _where(repo, revision)
        self._commit = info.sha or revision
        self._names = [file.rfilename for file in info.siblings or ()]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def path(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        with _errors(self.repo, self.revision):
            return Path(hf_hub_download(self.repo, name, revision=self.revision, token=self.token))

    def fetch(self) -> str:
        from huggingface_hub import snapshot_download

        wanted = needed(self)
        with _errors(self.repo, self.revision):
            self._fetch_weights([name for name in wanted if name.endswith(ALL_WEIGHTS)])
            patterns = [glob.escape(name) for name in wanted]
            return snapshot_download(self.repo, revision=self.revision, token=self.token, allow_patterns=patterns)

    def _fetch_weights(self, names: list[str]) -> None:
        """Bring the weights into the cache, several at once; an interrupt stops them all at the next chunk."""
        stop = threading.Event()
        with ThreadPoolExecutor(8) as pool:
            try:
                for done in as_completed([pool.submit(self._fetch_blob, name, stop) for name in names]):
                    done.result()
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)

    def _fetch_blob(self, name: str, stop: threading.Event) -> None:
        """One weight file into the cache's `blobs`, where `snapshot_download` finds it. Goes on with what an earlier run left."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.file_download import http_get, repo_folder_name
        from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.repo, name, revision=self._commit)
        cache, folder = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=self.repo, repo_type="model")
        if (cache / folder / "snapshots" / self._commit / name).exists():
            return
        meta = get_hf_file_metadata(url, token=self.token)
        if not meta.etag or meta.size is None or meta.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            return
        blob = cache / folder / "blobs" / meta.etag
        partial, lock = blob.with_name(f"{meta.etag}.incomplete"), cache / ".locks" / folder / f"{meta.etag}.lock"
        for parent in (blob.parent, lock.parent):
            parent.mkdir(parents=True, exist_ok=True)
        headers = build_hf_headers(token=self.token)  # kept from the hosts that the hub redirects to
        with WeakFileLock(lock):
            if blob.exists():
                return
            with _Partial(partial, stop) as file:
                have = file.seek(0, io.SEEK_END)
                http_get(url, file, resume_size=have, headers=headers, expected_size=meta.size, displayed_filename=name)
                file.seek(0)
                if have and len(meta.etag) == 64 and hashlib.file_digest(file, "sha256").hexdigest() != meta.etag:
                    partial.unlink()
                    raise OSError(f"what an earlier run had fetched of {name} was damaged; run the command again to fetch it anew")
            partial.replace(blob)


class _Partial(io.FileIO):
    """A file that is being fetched, until `stop`."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(path, "a+")
        self._stop = stop

    def write(self, data: Any, /) -> int:
        if self._stop.is_set():
            raise InterruptedError("another file could not be fetched, or the command was interrupted")
        return super().write(data)


def _where(repo: str, revision: str) -> str:
    return repo if revision == "main" else f"{repo}@{revision}"


@contextmanager
def _errors(repo: str, revision: str) -> Iterator[None]:
    """The hub's errors as ours: what failed, and what to do."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:  # type: ignore[attr-defined]
        raise _told(error, repo, revision) from error


def _told(error: Exception, repo: str, revision: str) -> OmniError:
    from huggingface_hub import constants, errors

    hub, where = constants.ENDPOINT, _where(repo, revision)
    token = "give a token with --hf-token or HF_TOKEN"
    match error:
        case errors.GatedRepoError():
            return NotFoundError(f"'{repo}' is gated: accept its terms at {hub}/{repo}, then {token}.", param="model")
        case errors.RepositoryNotFoundError():
            return NotFoundError(f"{hub} has no model '{repo}', or it is private: check the spelling, or {token}.", param="model")
        case errors.RevisionNotFoundError():
            return NotFoundError(f"'{repo}' has no revision '{revision}': see {hub}/{repo}/commits/main.", param="revision")
        case errors.HFValidationError():
            return NotFoundError(f"'{repo}' is no hub id; one looks like owner/name.", param="model")
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
            remedy = "Connect, give a folder, or, if it is an alias, install its plugin."
            return UnavailableError(f"'{where}' is not in the cache, and {why}. {remedy}", param="model")
    return UnavailableError(f"Fetching '{where}' from {hub} failed: {error}", param="model")
