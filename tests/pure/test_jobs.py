"""Where jobs and their files are kept: what stays, what goes, and what is refused."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_omni.errors import NotFoundError, OmniError, RequestError, SettingError
from vllm_omni.serving.jobs import KEPT, RESTARTED, Job, Store, ended


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "a/store")
    yield made
    made.close()


def completed(store: Store, name: str, data: bytes = b"film") -> Job:
    job = Job(name, {"prompt": "a cube"})
    job = ended(job, None, file=store.keep(job, data, "mp4"))
    store.put(job)
    return job


def test_a_job_is_kept_with_its_file(store: Store) -> None:
    store.put(Job("one", {"prompt": "x"}))
    assert store.get("one").status == "queued"
    job = completed(store, "one")
    assert store.get("one") == job and job.status == "completed" and job.expires_at == job.completed_at + KEPT
    assert store.path(job).read_bytes() == b"film"
    store.remove(job)
    assert not store.path(job).exists()
    with pytest.raises(NotFoundError, match="'one'"):
        store.get("one")


def test_pages(store: Store) -> None:
    for number in range(5):
        store.put(Job(str(number), {}))
    store.put(replace(store.get("1"), status="in_progress"))  # its place stays
    found, more = store.page(None, 2, newest=True)
    assert [job.id for job in found] == ["4", "3"] and more
    found, more = store.page("3", 3, newest=True)
    assert [job.id for job in found] == ["2", "1", "0"] and not more
    found, more = store.page("1", 10, newest=False)
    assert [job.id for job in found] == ["2", "3", "4"] and not more
    with pytest.raises(RequestError, match="'after'"):
        store.page("none", 2, newest=True)


def test_what_was_under_way_has_failed_after_a_restart(tmp_path: Path) -> None:
    first = Store(tmp_path)
    done = completed(first, "done")
    first.put(Job("queued", {}))
    first.put(Job("begun", {}, status="in_progress"))
    first.keep(Job("begun", {}), b"cut", "mp4")
    first.close()
    second = Store(tmp_path)
    assert second.get("done") == done and second.path(done).read_bytes() == b"film"
    for name in ("queued", "begun"):
        assert second.get(name).status == "failed" and second.get(name).error == RESTARTED
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["done.mp4"]
    second.close()


def test_a_job_goes_when_its_time_is_over(store: Store) -> None:
    job = completed(store, "old")
    completed(store, "new")
    store.put(replace(job, expires_at=int(time.time()) - 1))
    with pytest.raises(NotFoundError):
        store.get("old")
    assert not store.path(job).exists() and [each.id for each in store.page(None, 9, newest=True)[0]] == ["new"]


def test_a_folder_has_one_server(store: Store, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"Another server .*--store"):
        Store(tmp_path / "a/store")
    assert not store.page(None, 1, newest=True)[0]


def test_a_folder_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/jobs.sqlite").write_bytes(b"no database" * 100)
    for name in ("file", "file/below", "damaged"):
        with pytest.raises(SettingError, match="--store"):
            Store(tmp_path / name)


def test_a_file_that_cannot_be_written(store: Store, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "a/store/files")
    with pytest.raises(OmniError, match="cannot be stored: No such file"):
        store.keep(Job("one", {}), b"film", "mp4")
