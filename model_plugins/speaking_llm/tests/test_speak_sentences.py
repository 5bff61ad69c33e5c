"""The bridge from the language model to the voice: where sentences end, and that chunks do not matter."""

from __future__ import annotations

import asyncio
import itertools
import random
import re

import pytest

from vllm_omni.api import AUDIO, Job, Payload, text
from vllm_omni.testing.chunks import replay
from vllm_omni_speaking_llm.bridges import LONGEST, SHORTEST, Cutter, sentences

STORY = (
    """Sure! Here's what Dr. Smith (e.g. at St. Mary's) said on Jan. 5: "It's 3.5 times more, i.e. a lot..." Then he left.

1. **First**, open the file. 2. Then close it.
- A bullet, *without* a stop
> Quoted. Twice!
```python
print("Not. Said.")  # ever
```
Prof. J. R. R. Tolkien lived in the U.K. from Dec. 1895 to 1973. Was it No. 7? No. It wasn’t… Really?! "Why?" he asked. See fig. 3, vol. 2.
~~~
also code
~~~
This sentence goes on, and on, and it never seems to stop, because whoever wrote it, and we do not know who did, loved commas, and clauses,
dashes – like these – and semicolons; """
    + "and more words without any mark " * 15
    + "x" * 400
    + " 🎉 the end"
)


def bridged(chunks: list[str]) -> list[str]:
    async def collect() -> list[Payload]:
        return [piece async for piece in sentences({"thinker.text": replay([text(chunk) for chunk in chunks])}, Job("r", {}, (AUDIO,)))]

    return [piece.data for piece in asyncio.run(collect())]


def chopped(story: str, seed: int) -> list[str]:
    dice, chunks = random.Random(seed), []
    while story:
        size = dice.choice((0, 1, 1, 2, 3, 5, 8, 40, 300))
        chunks.append(story[:size])
        story = story[size:]
    return chunks


@pytest.mark.parametrize("seed", range(40))
def test_how_the_text_was_cut_does_not_matter(seed: int) -> None:
    assert bridged(chopped(STORY, seed)) == bridged([STORY])


@pytest.mark.parametrize("seed", range(40))
def test_nothing_but_code_is_lost_or_doubled_in_any_text(seed: int) -> None:
    dice = random.Random(seed)
    words = [
        "Dr.",
        "a",
        "Word",
        "end.",
        "3.5",
        "so,",
        "–",
        "\n",
        "what?!",
        '"quoted."',
        "x" * 70,
        "e.g.",
        "🎉",
        "1.",
        "`",
        "#",
        "etc.",
        "日本語。",
    ]
    story = " ".join(dice.choices(words, k=200))
    pieces = bridged([story])
    assert re.sub(r"\s", "", "".join(pieces)) == re.sub(r"\s", "", story)
    assert all(piece and piece == piece.strip() and len(piece) <= LONGEST for piece in pieces)


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Dr. Smith met Mrs. J. R. Jones. They spoke.", ["Dr. Smith met Mrs. J. R. Jones.", "They spoke."]),
        ("Use fruit, e.g. Apples or 3.5 pears. Stir.", ["Use fruit, e.g. Apples or 3.5 pears.", "Stir."]),
        ("No. 5 is alive. No. It is not.", ["No. 5 is alive.", "No.", "It is not."]),
        ("In the U.S. Senate. So do I. Then go.", ["In the U.S. Senate.", "So do I.", "Then go."]),
        ('"Why?" he asked. "No." She left.', ['"Why?" he asked.', '"No."', "She left."]),
        ("Cats, dogs, etc. are pets. Cats, dogs, etc. They bark.", ["Cats, dogs, etc. are pets.", "Cats, dogs, etc.", "They bark."]),
        ("Wait... what? Well… Yes.", ["Wait... what?", "Well…", "Yes."]),
        ("1. One thing\n2. Another. And more", ["1. One thing", "2. Another.", "And more"]),
        ("A title\n\nA line\r\n", ["A title", "A line"]),
        ("Look:\n```py\nx = 1. Or 2.\n```\nDone. Bye.", ["Look:", "Done.", "Bye."]),
        ("````\n```\nstill code\n````\nDone.", ["Done."]),
        ("```\nnever closed. Not said.", []),
        ("An example: ```python\nprint(1)\n```\nIt is said. This, too.", ["An example:", "It is said.", "This, too."]),
        ("1. ```bash\n   ls\n   ```\n2. Then say this.", ["2. Then say this."]),
        ("```\nx\n```python\ny\n```\nDone.", ["Done."]),
        ("~~~hello~~~ is gone.\nThis is not.", ["~~~hello~~~ is gone.", "This is not."]),
        ("Write ```x``` for code.\nSee ```y```\nDone.", ["Write ```x``` for code.", "See ```y```", "Done."]),
        ("```x``` is code. More.", ["```x``` is code.", "More."]),
        ("", []),
        (" \n\n ", []),
    ],
)
def test_where_sentences_end(story: str, expected: list[str]) -> None:
    opening = "Well.\n" * 20  # behind it a sentence is not cut early
    assert bridged([opening + story])[20:] == expected == bridged(list(opening + story))[20:]


def test_a_sentence_leaves_with_the_first_letter_of_the_next_one() -> None:
    cutter = Cutter()
    assert [cutter.take(char) for char in "It is so. T"] == [""] * 10 + ["It is so."]
    assert [cutter.take(char) for char in "hen\n"] == ["", "", "", "Then"]


SAID = "{}, which goes round the Earth and is lit by the sun. It pulls the water of all the seas behind it, so there are tides each day."


@pytest.mark.parametrize(
    ("beginning", "first"),
    [
        ("The moon is a ball of rock", "The moon is a ball"),
        ("The old moon is a ball of rock", "The old moon"),
        ("Let me see, the moon is a ball of rock", "Let me see,"),
        ("1. The old moon is a ball of rock", "1. The old moon"),
        ("Moonlight comes surprisingly late from a ball of rock", "Moonlight comes surprisingly"),
        ("J. R. R. T. U. V. W. Tolkien saw a ball of rock", "J. R. R. T. U. V. W. Tolkien"),
        ("Yes. The moon is a ball of rock", "Yes."),
    ],
)
def test_the_first_pieces_are_short_and_grow(beginning: str, first: str) -> None:
    """Each is made while the one before it is heard."""
    pieces = bridged([SAID.format(beginning)])
    assert pieces[0] == first
    before = [0, *itertools.accumulate(map(len, pieces[:-1]))]
    assert all(len(piece) < max(2 * said, 18) + 12 for said, piece in zip(before, pieces, strict=True)), "a word may be longer"


def test_only_what_is_cut_in_mid_phrase_goes_on() -> None:
    async def collect() -> list[tuple[str, bool]]:
        inputs = {
            "thinker.text": replay(
                [text(SAID.format("So the old moon has surprisingly brightly lit hemispheres, a ball of rock") + "\n- An item\nThe end")]
            )
        }
        return [(piece.data, piece.meta.get("goes_on", False)) async for piece in sentences(inputs, Job("r", {}, (AUDIO,)))]

    goes_on = dict(asyncio.run(collect()))
    told = [piece for piece, said in goes_on.items() if said]
    assert told[:2] == ["So the old moon", "has surprisingly brightly lit"]
    assert all(piece[-1].isalpha() for piece in told)
    assert {"- An item", "The end"} <= goes_on.keys() - set(told)


def test_a_long_sentence_ends_at_a_comma_less_readily_later() -> None:
    clause = "and then we walked on for a while, "
    *_, last = bridged(["Well.\n" * 30 + clause * 7])[:31]
    assert last == (clause * 6).strip()


@pytest.mark.parametrize("unit", ["word ", "x", "a, ", "longer words, "])
def test_text_without_an_end_is_cut_at_a_border_if_it_has_one(unit: str) -> None:
    pieces = bridged([unit * 700])
    assert len(pieces) > 2
    assert all(SHORTEST <= len(piece) <= LONGEST for piece in pieces[6:-1])
    assert all(unit.strip() == piece.split()[-1] or unit == "x" or piece.endswith(unit.strip()) for piece in pieces)


def test_marks_without_end_take_no_time() -> None:
    """What took time grew with the square of their number: here it would be minutes."""
    assert "".join(bridged(["!" * 60_000 + " Yes."])).count("!") == 60_000
