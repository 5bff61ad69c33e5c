"""What every model plugin promises, as tests that its own tests inherit: `class TestContract(PluginContract): model = "name"`.

Everything runs in one process on the CPU. How fast a model is, and whether it is right, is for the plugin's own tests to say:
mark those with `claim("figures")` and `claim("parity")`.
"""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import ClassVar, TypeVar

import pytest

from vllm_omni import __version__, discovery, settle
from vllm_omni.deployment import Deployment
from vllm_omni.engine import OneShotModule
from vllm_omni.engines.load import load_object
from vllm_omni.errors import RequestError
from vllm_omni.graph import OneShot
from vllm_omni.omni import AsyncOmni
from vllm_omni.payload import TEXT, Kind, Payload, text
from vllm_omni.request import Message, Request
from vllm_omni.resolve import resolve
from vllm_omni.samples import samples
from vllm_omni.testing.chunks import CUTS, assert_same, assert_well_formed, by_kind
from vllm_omni.testing.runs import assert_freed, collect, one_by_one, using
from vllm_omni.testing.walk import crossings

Test = TypeVar("Test", bound=Callable[..., None])
HEAVY = ("torch", "vllm", "transformers", "numpy")
ALONE: dict[type[PluginContract], list[list[Payload]]] = {}


def claim(name: str) -> Callable[[Test], Test]:
    """Says what a test proves; `python -m vllm_omni.testing.prove` writes it down when the test passes."""

    def mark(test: Test) -> Test:
        test.__dict__["claim"] = name
        return test

    return mark


class PluginContract:
    """`model` is what `vllm-omni serve` takes: an alias, or the folder of a tiny checkpoint in the real layout.

    `tolerance` is how far apart numbers may be that should be equal (0: bit for bit); state it with its reason.
    """

    model: ClassVar[str]
    tolerance: ClassVar[float] = 0.0

    def requests(self) -> list[Request]:
        """Different requests that together use every stage and every edge; a few words each, and one of each other kind it takes."""
        takes = self.deployment.graph.takes
        prompts = ("one two three", "A longer line, with more words than the others have.", "four") if TEXT in takes else ()
        parts = [[text(prompt)] for prompt in prompts]
        others = [sample for sample in samples().values() if sample.kind in takes and sample.kind != TEXT]
        parts += [[*(text(prompt) for prompt in prompts[:1]), sample] for sample in others]
        return [self.request(*content) for content in parts]

    def request(self, *content: Payload, **params: object) -> Request:
        """One user message that asks for every output its content allows."""
        graph, wanted = self.deployment.graph, list[Kind]()
        for kind in graph.outputs:
            with suppress(RequestError):
                graph.route((kind,), {part.kind for part in content})
                wanted.append(kind)
        return Request(messages=(Message("user", content),), outputs=tuple(wanted), params=params)

    @property
    def deployment(self) -> Deployment:
        return settle.deploy(self.model)

    @property
    def found(self) -> discovery.Found:
        """The installed plugin that owns this model."""
        return resolve(self.model).found

    def alone(self) -> list[list[Payload]]:
        """The answer to each request, run one by one; computed once."""
        if type(self) not in ALONE:
            ALONE[type(self)] = using(self.model, lambda omni: one_by_one(omni, self.requests()))
        return ALONE[type(self)]

    # ---- the declaration

    @claim("light")
    def test_the_declaration_is_light(self) -> None:
        module = self.found.value.partition(":")[0]
        code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert not ran.stdout.split(), f"importing {module} imports {ran.stdout.strip()}"

    @claim("versions")
    def test_the_plugin_says_which_core_it_needs(self) -> None:
        ranges = discovery.ranges(self.found.distribution, "vllm-omni")
        assert ranges, f"{self.found.distribution} must require vllm-omni"
        assert ranges[0].contains(__version__, prereleases=True)
        assert not ranges[0].contains("0.1"), "the range of vllm-omni has no lower end"
        assert not ranges[0].contains("9999"), "the range of vllm-omni has no upper end"

    @claim("graph")
    def test_the_graph_is_sound(self) -> None:
        for graph in self.deployment.plugin.graphs:
            for stage in graph.stages:
                for param in (*stage.params, *stage.all_args):
                    assert param.help, f"{stage.name}.{param.name} has no help"
                    assert param.default is None or param.check(param.default) == param.default
                for param in stage.params:
                    assert graph.params[param.name] == param, f"two stages declare '{param.name}' differently"

    @claim("recipe")
    def test_the_default_recipe_fits_every_graph(self) -> None:
        for graph in self.deployment.plugin.graphs:
            assert settle.deploy(self.model, graph=graph.name, weights=False).graph is graph

    @claim("code")
    def test_what_the_graphs_name_exists(self) -> None:
        for graph in self.deployment.plugin.graphs:
            for stage in graph.stages:
                target = load_object(stage.spec.target)
                assert not isinstance(stage.spec, OneShot) or issubclass(target, OneShotModule)
            for edge in graph.edges:
                if edge.bridge is not None:
                    assert inspect.isasyncgenfunction(load_object(edge.bridge)), f"{edge.bridge} is no async generator function"

    # ---- what it does

    @claim("coverage")
    def test_the_requests_use_every_stage_and_edge(self) -> None:
        graph = self.deployment.graph
        routes = [graph.route(request.outputs, {part.kind for part in request.payloads()}) for request in self.requests()]
        used = {stage.name for route in routes for stage in route.stages} | {edge.id for route in routes for edge in route.edges}
        missing = {stage.name for stage in graph.stages} | {edge.id for edge in graph.edges}
        assert not missing - used, "override requests() so that these are used too"
        assert len(routes) > 1, "override requests() to give several different ones"

    @claim("streaming")
    def test_bridges_give_the_same_whole_or_in_chunks(self) -> None:
        async def check() -> None:
            for request in self.requests():
                for crossing in await crossings(self.deployment, request):
                    expected = await crossing.cross(crossing.streams)
                    for first, others in product(CUTS, CUTS):  # a join must not rely on its streams being cut alike
                        cuts = [first, *[others] * len(crossing.streams)]
                        streams = {key: cut(chunks) for cut, (key, chunks) in zip(cuts, crossing.streams.items(), strict=False)}
                        got = await crossing.cross(streams)
                        where = f"{crossing.bridge}, {first.__name__} and {others.__name__}"
                        assert_same(by_kind(got), by_kind(expected), self.tolerance, where)
                        if len(got) == len(expected):
                            assert [chunk.meta for chunk in got] == [chunk.meta for chunk in expected], where

        asyncio.run(check())

    @claim("end to end")
    def test_it_runs_end_to_end(self) -> None:
        for request, chunks in zip(self.requests(), self.alone(), strict=True):
            assert set(by_kind(chunks)) == {kind.name for kind in request.outputs}
            for chunk in chunks:
                assert_well_formed(chunk)
            reasons = [chunk.meta.get("finish_reason") for chunk in chunks if chunk.kind == TEXT]
            assert not any(reasons[:-1]), "only the last piece of text may have a finish_reason"

    @claim("repeatable")
    def test_the_same_request_gives_the_same_again(self) -> None:
        self._assert_equal(using(self.model, lambda omni: one_by_one(omni, self.requests())))

    @claim("batch equality")
    def test_a_row_of_a_batch_equals_its_solo_run(self) -> None:
        async def at_once(omni: AsyncOmni) -> list[list[Payload]]:
            return await asyncio.gather(*(collect(omni, request) for request in [*self.requests(), *self.requests()]))

        answers = using(self.model, at_once)
        self._assert_equal(answers[: len(answers) // 2])
        self._assert_equal(answers[len(answers) // 2 :])

    def _assert_equal(self, answers: list[list[Payload]]) -> None:
        for number, (chunks, expected) in enumerate(zip(answers, self.alone(), strict=True)):
            assert_same(by_kind(chunks), by_kind(expected), self.tolerance, f"request {number}")

    @claim("abort")
    def test_abort_frees_everything(self) -> None:
        async def abort(omni: AsyncOmni) -> list[list[Payload]]:
            for received in (1, 2, 3):
                streams = [omni.stream(request) for request in self.requests()]
                for stream in streams:
                    for _ in range(received):
                        await anext(stream, None)
                    await stream.aclose()
                await assert_freed(omni)
            return await one_by_one(omni, self.requests())

        self._assert_equal(using(self.model, abort))

    @claim("refusal")
    def test_an_unknown_parameter_is_refused_by_name(self) -> None:
        request = replace(self.requests()[0], params={"no_such_parameter": 1})
        with pytest.raises(RequestError, match="no_such_parameter") as caught:
            using(self.model, lambda omni: collect(omni, request))
        assert caught.value.param == "no_such_parameter"
