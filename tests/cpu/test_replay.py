"""Forwards that are recorded: which, when, and how many are kept. The device here records by making the call again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_omni.kit import replay
from vllm_omni.kit.replay import AFTER, SHAPES, Replays, bucket


class Recorder:
    """Fills the same tensor anew at each replay, as recordings on a device do."""

    def __init__(self) -> None:
        self.records = self.replays = 0

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.records += 1
        made = call().clone()

        def again() -> None:
            self.replays += 1
            made.copy_(call())

        return again, made


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(replay, "platform", lambda name: made)
    return made


def test_what_comes_often_is_recorded_and_reads_what_is_there_now(recorder: Recorder) -> None:
    replays, given = Replays("anything"), torch.zeros(2)
    for number in range(AFTER + 4):
        given.fill_(number)
        assert replays("a shape", lambda: given * 2).tolist() == [2 * number] * 2
    assert (recorder.records, recorder.replays) == (1, 4)


def test_what_was_not_used_for_longest_goes_and_may_come_again(recorder: Recorder) -> None:
    replays = Replays("anything")
    for shape in range(SHAPES + 1):
        for _ in range(AFTER + 1):
            assert replays(shape, lambda: torch.tensor([shape])).item() == shape  # noqa: B023 - called at once
        replays(0, lambda: torch.tensor([0]))
    assert recorder.records == SHAPES + 1
    replays(0, lambda: torch.tensor([0]))
    assert recorder.records == SHAPES + 1, "what was used all the time is gone"
    for _ in range(AFTER + 1):
        replays(1, lambda: torch.tensor([1]))
    assert recorder.records == SHAPES + 2


def test_a_device_that_cannot_record_makes_the_calls() -> None:
    replays, count = Replays("cpu"), iter(range(10))
    assert [replays("a shape", lambda: next(count)) for _ in range(10)] == list(range(10))


@pytest.mark.parametrize("least", [64, 256])
def test_buckets_are_few_and_close(least: int) -> None:
    sizes = {count: bucket(count, least) for count in range(1, 4097)}
    assert all(count <= size and size - count < max(least, count / 15) and size % least == 0 for count, size in sizes.items())
    assert all(sizes[size] == size for size in set(sizes.values()) if size in sizes)
    assert len(set(sizes.values())) <= 64
