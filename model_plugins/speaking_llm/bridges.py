"""The language model's text -> sentences to say, each as soon as it is certainly whole.

A `Cutter` takes one character at a time, so how the text was cut into chunks cannot matter. It knows where a sentence ends, not how one
is said; but code between fences is left out here, for only here lines are known.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from vllm_omni.api import Job, Payload, text

LATER = (200, 300)
"""From so many characters on a piece ends at the next comma; at so many, at its last one."""
FIRST, GROWTH = 18, 2
"""While less is said, a piece ends before a phrase, too, and no later than at the first blank behind FIRST characters, or GROWTH times as
many as were said before it: a listener waits for the first piece, and the others are made while those before them are heard."""
PHRASE = re.compile(
    r"\s(?=(?:and|or|but|so|because|since|if|which|that|who|when|where|while|with|without|of|in|on|at|for|from|to|by|as|into|than|"
    r"is|are|was|were|has|have|had|can|could|will|would|may|might|should|must|does|do|did)\s)"
)
NUMBER = re.compile(r"\s*\d{1,3}[.)]\s+")
"""Of a list. It is said in no time, and is no piece."""
LONGEST = 300
"""At so many characters a piece ends, at a space if it has one."""
SHORTEST = 20
"""No later cut at a comma or a space leaves fewer characters than this to be said alone."""
TITLES = frozenset(
    "Mr Mrs Ms Dr Prof St Mt Gen Col Capt Lt Sgt Rev Hon Gov Sen Rep Messrs e.g i.e E.g I.e vs cf viz approx incl".split()  # noqa: SIM905
)
"""A dot after one of these never ends a sentence. (Before a small letter no dot does.)"""
NUMBERED = frozenset(
    "no nos fig figs vol ch sec eq p pp ca jan feb mar apr jun jul aug sept sep oct nov dec".split()  # noqa: SIM905
)
"""Nor does one after these, in any case, when a number follows."""
END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]*_`~]*\s+$")
CLAUSE = re.compile(r"[,;:–—][\"'”’)\]*_]*\s|\s[-–—]\s")
FENCE = re.compile(r"\s*(?:(?:>|[-*+]|\d{1,3}[.)])\s*)*(?=[`~])(`{3,}[^`]*|~{3,}[^~]*)")
"""A line that opens code, or may become one."""
LATE_FENCE = re.compile(r"(?:^|\s)(`{3,})[\w.+#-]*\s*$")
"""The end of a line that does, though it began otherwise."""
CLOSING = re.compile(r"\s*(?:>\s*)*(`{3,}|~{3,})\s*")


async def sentences(inputs: dict[str, AsyncIterator[Payload]], job: Job) -> AsyncIterator[Payload]:
    """thinker.text -> sentences, stripped, none of them empty. `goes_on`: without a pause, as no mark ended this piece."""
    cutter = Cutter()
    async for chunk in inputs["thinker.text"]:
        for char in chunk.data:
            if piece := cutter.take(char):
                yield text(piece, goes_on=cutter.goes_on)
    if piece := cutter.rest():
        yield text(piece, goes_on=cutter.goes_on)


class Cutter:
    """One answer: how much of it was `said`, what not yet (`held`), whether that begins a line, and the fence of the code it is in.

    `goes_on`: whether the last piece ended in mid-phrase.
    """

    def __init__(self) -> None:
        self.held = ""
        self.line_start = True
        self.fence = ""
        self.said = 0
        self.goes_on = False

    def take(self, char: str) -> str:
        """One more character; the piece that it shows to be whole, or ""."""
        if char == "\n":
            return self._line_end()
        self.held += char
        if self.fence or (self.line_start and FENCE.fullmatch(self.held)):
            return ""
        if not char.isspace() and (end := END.search(self.held, 0, len(self.held) - 1)) and _ends(self.held[: end.start()], end[0], char):
            return self._cut(len(self.held) - 1)
        return self._cut(self._early())

    def rest(self) -> str:
        """What is left when the text has ended."""
        return self._line_end()

    def _line_end(self) -> str:
        line, line_start = self.held, self.line_start
        self.held, self.line_start, self.goes_on = "", True, False
        if self.fence:
            if (closing := CLOSING.fullmatch(line)) and closing[1].startswith(self.fence):
                self.fence = ""
            return ""
        if line_start and (fence := FENCE.fullmatch(line)):
            self.fence = _run(fence[1])
            return ""
        if (late := LATE_FENCE.search(line)) and line.count("```") % 2:
            self.fence, line = _run(late[1]), line[: late.start(1)]
        return self._said(line)

    def _cut(self, at: int) -> str:
        if not at:
            return ""
        piece, self.held, self.line_start = self.held[:at], self.held[at:], False
        self.goes_on = piece.rstrip()[-1:].isalnum()
        return self._said(piece)

    def _said(self, piece: str) -> str:
        piece = piece.strip()
        self.said += len(piece)
        return piece

    def _limit(self) -> int:
        return max(FIRST, GROWTH * self.said)

    def _opening(self) -> int:
        """Where one of the first pieces is cut; 0: not yet."""
        number, size = NUMBER.match(self.held), len(self.held)
        hard = self._limit() + (number.end() if number else 0)
        soft = hard - self._limit() // 3
        comma, phrase = CLAUSE.search(self.held, soft - 2), PHRASE.search(self.held, soft - 1)
        if comma or phrase:
            return min(found.end() for found in (comma, phrase) if found)
        return size if size >= hard and self.held[-1].isspace() and self.held[-2].isalnum() else 0

    def _early(self) -> int:
        """Where a piece without an end is cut so that sound comes soon; 0: not yet."""
        size, (soft, hard) = len(self.held), LATER
        if self._limit() < soft and (at := self._opening()):
            return at
        if size < soft:
            return 0
        borders = [found.end() for found in CLAUSE.finditer(self.held) if found.end() >= SHORTEST]
        if borders and (borders[-1] == size or size >= hard):
            return borders[-1]
        if size < LONGEST:
            return 0
        space = self.held.rfind(" ") + 1
        return space if space >= SHORTEST else size


def _run(fence: str) -> str:
    """The marks that it begins with."""
    return fence[: len(fence) - len(fence.lstrip(fence[0]))]


def _ends(before: str, mark: str, following: str) -> bool:
    """Whether `mark` (with its blanks) after `before` ends a sentence when a word beginning with `following` comes next."""
    if following.islower():
        return False
    if not mark.startswith(".") or mark.startswith(".."):
        return True
    word = re.split(r"[\s(\[\"'“‘*_]", before)[-1]
    if word in TITLES or (following.isdigit() and word.lower() in NUMBERED):
        return False
    if re.fullmatch(r"(?:[A-Za-z]\.)*[A-Z]", word) and word != "I":
        return False  # initials: J. Smith, the U.S. Senate
    return not re.fullmatch(r"\s*(?:>\s*)*\d+", before)  # "1. First": the number of a list
