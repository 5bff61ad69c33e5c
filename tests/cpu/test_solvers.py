"""The solvers against diffusers' schedulers, step by step, in float64; many rows at once against each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from vllm_omni.kit.solvers import Samples, Solver, euler, shifted, unipc


def velocity(sample: torch.Tensor, sigma: float) -> torch.Tensor:
    """Anything that depends on both."""
    return torch.sin(3 * sample) + sigma * sample.flip(0)


def reference(scheduler: Any, start: torch.Tensor) -> list[torch.Tensor]:
    sample, samples = start, []
    for number, time in enumerate(scheduler.timesteps):
        moved = velocity(sample, float(scheduler.sigmas[number]))
        sample = scheduler.step(moved.unsqueeze(0), time, sample.unsqueeze(0), return_dict=False)[0].squeeze(0)
        samples.append(sample)
    return samples


def ours(solver: Solver, start: torch.Tensor) -> list[torch.Tensor]:
    state, samples = Samples.start(start), []
    for number in range(solver.steps):
        state.step(velocity(state.now, float(solver.sigmas[number])), solver.table[number].expand(len(start), -1))
        samples.append(state.now)
    return samples


def noise(tokens: int = 5) -> torch.Tensor:
    return torch.randn(tokens, 4, generator=torch.Generator().manual_seed(tokens), dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 35])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("shift", [1.0, 10.0])
def test_unipc_is_diffusers_step_by_step(steps: int, order: int, shift: float) -> None:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, solver_order=order)
    scheduler.set_timesteps(steps)
    scheduler.sigmas = scheduler.sigmas.double()
    expected = reference(scheduler, noise())
    assert all((left - right).abs().max() > 1e-3 for left, right in zip(expected, [noise(), *expected], strict=False)), "it does nothing"
    for got, wanted in zip(ours(unipc(scheduler.sigmas, order), noise()), expected, strict=True):
        assert (got - wanted).abs().max() <= 1e-9 * wanted.abs().max()


@pytest.mark.parametrize("steps", [1, 4, 28])
def test_euler_is_diffusers_step_by_step(steps: int) -> None:
    """Theirs computes in float32, whatever it is given."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    scheduler.sigmas = scheduler.sigmas.double()
    for got, wanted in zip(ours(euler(scheduler.sigmas), noise()), reference(scheduler, noise()), strict=True):
        assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_rows_with_other_solvers_and_lengths_go_together() -> None:
    base = shifted(torch.linspace(1, 0.001, 9)[:-1], 5.0).clamp(max=1 - 1e-6)
    levels = [torch.cat([base[skip:], base.new_zeros(1)]) for skip in (0, 2, 5)]
    solvers = [unipc(levels[0]), euler(levels[1]), unipc(levels[2], 1)]
    starts = [noise(3), noise(5), noise(2)]
    alone = [ours(solver, start)[-1] for solver, start in zip(solvers, starts, strict=True)]
    state, left = Samples.start(torch.cat(starts)), [0, 1, 2]
    for number in range(3):  # all of them run for three steps
        parts = state.now.split([len(start) for start in starts])
        moved = torch.cat([velocity(part, float(solvers[row].sigmas[number])) for row, part in zip(left, parts, strict=True)])
        weights = torch.cat([solvers[row].table[number].expand(len(starts[row]), -1) for row in left])
        state.step(moved, weights)
    assert torch.allclose(state.now.split([3, 5, 2])[2], alone[2], rtol=1e-12, atol=1e-12)
    for row in (0, 1):
        assert torch.allclose(state.now.split([3, 5, 2])[row], ours(solvers[row], starts[row])[2], rtol=1e-12, atol=1e-12)


def test_what_a_solver_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="'order' is 3; it can be 1 or 2"):
        unipc([0.9, 0.5, 0.0], 3)
