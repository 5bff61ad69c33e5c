"""Tokens of any requests, one behind the other, as a forward of the generation tower takes them."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_omni.kit.attention import Spans
from vllm_omni.kit.replay import SHAPES, Replays, bucket

TOKENS = 4096
PROMPTS = 4096
"""Of so many tokens, and tokens of prompts, forwards are recorded. Larger ones keep a device busy anyway."""


@dataclass(slots=True, eq=False)
class Pass:
    """Tokens of one request under one prompt: how many, what is seen of the prompt, and where the tokens are.

    `prompt` is what `Understanding` gives. `moving` [tokens, 1] is 1 where a token is denoised, and 0 where it is a condition; `cos` and
    `sin` are those of `rotary`.
    """

    tokens: int
    prompt: Tensor
    cos: Tensor
    sin: Tensor
    moving: Tensor


class Packed:
    """Passes that share their forwards. The keys of each lie behind those of its prompt.

    With `filled` there are as many tokens, prompts and passes as a bucket has: what is too much is a sequence of its own.
    """

    def __init__(self, passes: Sequence[Pass], *, filled: bool = False) -> None:
        counts, prompts = [each.tokens for each in passes], [each.prompt.shape[2] for each in passes]
        self.count, self.filled = sum(counts), filled
        queries, keys = [*counts], [count + prompt for count, prompt in zip(counts, prompts, strict=True)]
        more = more_prompt = 0
        if filled:
            more, more_prompt = bucket(sum(counts)) - sum(counts), bucket(sum(prompts), 256) - sum(prompts)
            empty = [0] * ((1 << len(passes).bit_length()) - len(passes) - 1)
            queries, keys = [*queries, more, *empty], [*keys, more + more_prompt, *empty]
        of_prompt, own, begin = [], [], 0
        for count, prompt in [*zip(counts, prompts, strict=True), (more, more_prompt)]:
            of_prompt.append(torch.arange(begin, begin + prompt))
            own.append(torch.arange(begin + prompt, begin + prompt + count))
            begin += prompt + count
        device, self.keys = passes[0].cos.device, begin
        self.spans = Spans.of(queries, keys, device)
        self.prompt_places, self.places = torch.cat(of_prompt).to(device), torch.cat(own).to(torch.int32).to(device)
        self.passing = pad(torch.arange(len(passes)).repeat_interleave(torch.tensor(counts)), (0, more)).to(device)
        self.cos, self.sin, self.moving = (
            pad(torch.cat([getattr(each, name) for each in passes]), (0, 0, 0, more)) for name in ("cos", "sin", "moving")
        )
        self.prompts = torch.cat([each.prompt for each in passes], dim=2)
        if more_prompt:
            self.prompts = pad(self.prompts, (0, 0, 0, 0, 0, more_prompt))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Tokens, prompts and sequences: what makes the forwards of two filled packs launch the same."""
        return len(self.places), len(self.prompt_places), len(self.spans.queries)

    @classmethod
    def recordable(cls, passes: Sequence[Pass]) -> bool:
        return sum(each.tokens for each in passes) <= TOKENS and sum(each.prompt.shape[2] for each in passes) <= PROMPTS


class _Still:
    """A filled pack whose tensors stay where they are, whatever they hold, with the tokens and times of a step."""

    def __init__(self, like: Packed, prompts: Tensor, channels: int) -> None:
        self.packed = copy.copy(like)
        for name in ("prompt_places", "places", "passing", "cos", "sin", "moving"):
            setattr(self.packed, name, torch.empty_like(getattr(like, name)))
        self.packed.prompts = prompts[:, :, : like.prompts.shape[2]]
        ends, key_ends = torch.empty_like(like.spans.query_ends), torch.empty_like(like.spans.key_ends)
        most = {"most_queries": len(like.places), "most_keys": like.keys}
        self.packed.spans = replace(like.spans, query_ends=ends, key_ends=key_ends, **most)
        self.tokens = like.cos.new_zeros(len(like.places), channels)
        self.times = like.cos.new_zeros(len(like.spans.queries))

    def hold(self, packed: Packed) -> None:
        for name in ("prompt_places", "places", "passing", "cos", "sin", "moving", "prompts"):
            getattr(self.packed, name).copy_(getattr(packed, name))
        self.packed.spans.query_ends.copy_(packed.spans.query_ends)
        self.packed.spans.key_ends.copy_(packed.spans.key_ends)
        self.packed.spans = replace(self.packed.spans, queries=packed.spans.queries, keys=packed.spans.keys)


class Replayed:
    """A forward, for few tokens: launched as a whole, by recordings of sizes that packs are filled up to."""

    def __init__(self, forward: Callable[[Packed, Tensor, Tensor], Iterator[Tensor | None]], device: str) -> None:
        self._forward, self._replays = forward, Replays(device)
        self._still: OrderedDict[tuple[int, int, int], _Still] = OrderedDict()
        self._prompts: Tensor | None = None
        self._holds: Callable[[], Packed | None] = lambda: None

    def __call__(self, packed: Packed, tokens: Tensor, times: Tensor) -> Tensor:
        """What the forward gives at last, of a pack that is filled up."""
        if self._prompts is None:
            layers, two, _, heads, width = packed.prompts.shape
            self._prompts = packed.prompts.new_empty(layers, two, PROMPTS + 256, heads, width)
        if packed.shape not in self._still:
            self._still[packed.shape] = _Still(packed, self._prompts, tokens.shape[1])
            if len(self._still) > SHAPES:
                self._still.popitem(last=False)
        self._still.move_to_end(packed.shape)
        still = self._still[packed.shape]
        if self._holds() is not packed:
            self._holds = weakref.ref(packed)  # its rows end, and their memory is free
            still.hold(packed)
        still.tokens[: len(tokens)].copy_(tokens)
        still.times[: len(times)].copy_(times)
        found: Tensor = self._replays(still, partial(self._whole, still))[: packed.count]
        return found

    def _whole(self, still: _Still) -> Tensor | None:
        *_, found = self._forward(still.packed, still.tokens, still.times)
        return found
