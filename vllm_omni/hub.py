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
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_omni.errors import NotFoundError, OmniError, SettingError, UnavailableError

SMALL = (".json", ".txt", ".yaml", ".model", ".tiktoken", ".vocab", ".bpe", ".jinja")
WEIGHTS = ((".safetensors",), (".bin", ".pt", ".pth", ".ckpt"), (".onnx", ".onnx_data"), (".gguf",))
ALL_WEIGHTS = tuple(suffix for family in WEIGHTS for suffix in family)
LARGEST = 50_000_000_000
"""Bytes of the largest file the hub gives by plain HTTP."""


def open_model(model: str, revision: str | None = None, token: str | None = None) -> Checkpoint:
    """The files of a folder or of a hub id (`owner/name`). Raises NotFoundError if MODEL can be neither."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        for name, value in (("--revision", revision), ("--hf-token", token)):
            if value is not None:
                raise SettingError(f"{name} has no effect: MODEL is the folder {path}. Leave it out.", param=name)
        return Folder(path)
    if model and path.exists():
        raise NotFoundError(f"{path} is a file; MODEL is a checkpoint's folder, a hub id or an alias.", param="model")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise NotFoundError(f"There is no folder '{model}', and a hub id looks like owner/name.", param="model")
    return Repository(model, revision, token)


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
        """One file on this machine. Raises KeyError if the checkpoint has none of that name."""

    @abstractmethod
    def fetch(self) -> str:
        """The folder, with everything that running the model takes."""

    @cached_property
    @abstractmethod
    def names(self) -> tuple[str, ...]: ...

    def __getitem__(self, name: str) -> Any:
        path = self.path(name)
        try:
            return json.loads(path.read_bytes()) if name.endswith(".json") else None
        except ValueError as error:
            raise SettingError(f"{name} of {self.where} is not JSON: {error}.", param="model") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class Folder(Checkpoint):
    """A checkpoint that is already here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.where = folder, str(folder)

    def path(self, name: str) -> Path:
        if not (self.folder / name).is_file():
            raise KeyError(name)
        return self.folder / name

    def fetch(self) -> str:
        return str(self.folder)

    @cached_property
    def names(self) -> tuple[str, ...]:
        found = (path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        return tuple(sorted(path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)))


class Repository(Checkpoint):
    """A repository of the hub at one commit; without a connection, what the cache has of it."""

    def __init__(self, repo: str, revision: str | None, token: str | None) -> None:
        self.repo, self.token = repo, token
        self.where = f"{repo}@{revision}" if revision else repo
        self.asked = self.revision = revision or "main"
        """The revision asked for, and, once the hub has answered, the commit it stands for."""
        self.offline = False

    def path(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        with self._errors():
            try:
                found = hf_hub_download(self.repo, name, revision=self.revision, token=self.token, local_files_only=self.offline)
            except LocalEntryNotFoundError:
                self.offline = True
                self.revision = self._cached().name
                raise KeyError(name) from None
            except EntryNotFoundError:
                raise KeyError(name) from None
        path = Path(found)
        self.revision = path.parents[name.count("/")].name
        return path

    @cached_property
    def names(self) -> tuple[str, ...]:
        from huggingface_hub import HfApi, errors

        with self._errors():
            try:
                info = HfApi(token=self.token).model_info(self.repo, revision=self.revision)
            except errors.HfHubHTTPError:
                raise
            except (errors.HTTPError, errors.OfflineModeIsEnabled):  # type: ignore[attr-defined]
                self.offline = True
                return Folder(self._cached()).names
        self.revision = info.sha or self.revision
        return tuple(file.rfilename for file in info.siblings or ())

    def fetch(self) -> str:
        from huggingface_hub import snapshot_download

        wanted = needed(self.names)
        if self.offline:
            return str(_complete(self._cached(), self.where))
        with self._errors():
            self._fetch_weights([name for name in wanted if name.endswith(ALL_WEIGHTS)])
            patterns = [glob.escape(name) for name in wanted]
            return snapshot_download(self.repo, revision=self.asked, token=self.token, allow_patterns=patterns)

    def _cached(self) -> Path:
        """The folder the cache has for this revision."""
        from huggingface_hub import snapshot_download

        with self._errors():
            return Path(snapshot_download(self.repo, revision=self.revision, local_files_only=True, allow_patterns=[]))

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

        url = hf_hub_url(self.repo, name, revision=self.revision)
        cache, folder = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=self.repo, repo_type="model")
        if (cache / folder / "snapshots" / self.revision / name).exists():
            return
        meta = get_hf_file_metadata(url, token=self.token)
        if not meta.etag or meta.size is None or meta.size > LARGEST:
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
                if have > meta.size:
                    have = file.truncate(file.seek(0))
                http_get(url, file, resume_size=have, headers=headers, expected_size=meta.size, displayed_filename=name)
                file.seek(0)
                if have and len(meta.etag) == 64 and hashlib.file_digest(file, "sha256").hexdigest() != meta.etag:
                    partial.unlink()
                    raise OSError(f"what an earlier run had fetched of {name} was damaged; run the command again to fetch it anew")
            partial.replace(blob)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """The hub's errors as ours: what failed, and what to do."""
        from huggingface_hub import constants, errors

        hub = constants.ENDPOINT
        try:
            yield
        except OmniError:
            raise
        except errors.GatedRepoError as error:
            wrong = f"'{self.repo}' is gated: accept its terms at {hub}/{self.repo}, then give a token with --hf-token or HF_TOKEN."
            raise NotFoundError(wrong, param="model") from error
        except errors.RepositoryNotFoundError as error:
            wrong = f"{hub} has no model '{self.repo}', or it is private: check the spelling, or give a token with --hf-token or HF_TOKEN."
            raise NotFoundError(wrong, param="model") from error
        except errors.RevisionNotFoundError as error:
            wrong = f"'{self.repo}' has no revision '{self.asked}': see {hub}/{self.repo}/commits/main."
            raise NotFoundError(wrong, param="revision") from error
        except errors.HFValidationError as error:
            raise NotFoundError(f"'{self.repo}' is no hub id; one looks like owner/name.", param="model") from error
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
            raise UnavailableError(f"'{self.where}' is not in the cache, and {why}. Connect, or give a folder.", param="model") from error
        except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
            raise UnavailableError(f"Fetching '{self.where}' from {hub} failed: {error}", param="model") from error


class _Partial(io.FileIO):
    """A file that is being fetched, until `stop`."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        path.touch()
        super().__init__(path, "r+")
        self._stop = stop

    def write(self, data: Any, /) -> int:
        if self._stop.is_set():
            raise InterruptedError("another file could not be fetched, or the command was interrupted")
        return super().write(data)


def _complete(folder: Path, where: str) -> Path:
    """The cached folder, if it has weights and every shard that its indexes list. Raises UnavailableError otherwise."""
    missing = [] if any(path.name.endswith(ALL_WEIGHTS) for path in folder.rglob("*")) else ["its weights"]
    for index in folder.rglob("*.index.json"):
        shards = set(json.loads(index.read_bytes()).get("weight_map", {}).values())
        missing += [shard for shard in sorted(shards) if not (index.parent / shard).exists()]
    if missing:
        shown = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
        raise UnavailableError(f"The cache has '{where}' without {shown}, and the hub cannot be reached. Connect to fetch the rest.")
    return folder
