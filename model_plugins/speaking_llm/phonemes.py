"""English words -> Kokoro's phonemes (General American, in misaki's symbols, which Kokoro was trained on).

A word is looked up in gruut's lexicon, then as an ending on a known word, then as two known words in one; letters that make no word are
spelled; what remains is guessed by gruut's letter-to-sound model. gruut's tagger picks between readings that are spelled alike
("I read it", "to read"). Of gruut only the data are used (`gruut-lang-en`, MIT): its code brings six packages, one of them LGPL.
"""

from __future__ import annotations

import re
import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from string import punctuation
from typing import Any

VOWELS = "AIOWYaeiouæɑɐɔəɛɜɪʊʌᵊᵻ"
KOKORO = {"oʊ": "O", "eɪ": "A", "aɪ": "I", "aʊ": "W", "ɔɪ": "Y", "d͡ʒ": "ʤ", "t͡ʃ": "ʧ"}
TAP = re.compile(r"(?<=[AIOWYiuæɑɔəɛɜɪɹʊʌ])t(?=[əɪiAO])")
"""An American t between a vowel and an unstressed one: water, thirty."""
SYLLABIC = re.compile(rf"əl(?![{VOWELS}ˈˌ])")
MARKS = frozenset(",;:.!?")
WEAK = frozenset(
    "and at or you your it its is are be been were they their there when which what have has had this these those from by would him her "  # noqa: SIM905
    "could should some as in into do so with my me we he she our us if but not on of will i".split()
)
"""Words that are stressed in a lexicon and seldom in a sentence, unless they end it."""
SPELLED = frozenset("AI US IT ID OS UN HR IP EU AC DC AM PM AD ER ET PI IM DM".split())  # noqa: SIM905
"""Initials that are words, too, when they are not all capitals."""
OURS = {"py": "pˈI", "ok": "ˌOkˈA", "o'clock": "əklˈɑk", "emoji": "imˈOʤi", "used": "jˈuzd", "chatbot": "ʧˈætbˌɑt"}
"""What the lexicon lacks or has for another word."""
SUFFIXES = (
    ("ly", "li"),
    ("ness", "nəs"),
    ("less", "ləs"),
    ("ful", "fᵊl"),
    ("ment", "mənt"),
    ("able", "əbᵊl"),
    ("er", "əɹ"),
    ("ers", "əɹz"),
)
PREFIXES = (("non", "nˌɑn"), ("un", "ˌʌn"), ("re", "ɹˌi"), ("pre", "pɹˌi"), ("mis", "mˌɪs"), ("over", "ˌOvəɹ"), ("anti", "ˌænti"))
SHORTEST = 3
"""Letters that a part of a compound has at least: shorter ones are found in too many words that are none."""


class English:
    """The lexicon and the models, loaded once."""

    def __init__(self) -> None:
        import pycrfsuite

        data = Path(str(files("gruut_lang_en")))
        self.readings: dict[str, dict[str, str]] = {}
        with closing(sqlite3.connect(f"{(data / 'lexicon.db').as_uri()}?mode=ro", uri=True)) as lexicon:
            for word, sounds, role in lexicon.execute("SELECT word, phonemes, role FROM word_phonemes ORDER BY pron_order, id"):
                self.readings.setdefault(word, {}).setdefault(role.removeprefix("gruut:"), sounds)
        self.tagger, self.guesser = pycrfsuite.Tagger(), pycrfsuite.Tagger()
        self.tagger.open(str(data / "pos" / "model.crf"))
        self.guesser.open(str(data / "g2p" / "model.crf"))
        self.guess = lru_cache(4096)(self._guess)

    def __call__(self, spoken: str) -> str:
        """Phonemes of words and marks as `reading.spoken` gives them."""
        tokens = re.findall(r"[A-Za-z]+(?:'[A-Za-z]+)*|'[A-Za-z]+|[,;:.!?]", spoken)
        tags = self.tagger.tag([_word_features(tokens, at) for at in range(len(tokens))])
        said = ""
        for at in reversed(range(len(tokens))):  # from the end: how "the" is said depends on the next sound
            if tokens[at] in MARKS:
                said = f"{tokens[at]} {said}"
            else:
                follows = tokens[at + 1] if at + 1 < len(tokens) else ""
                said = f"{self.word(tokens[at], tags[at], follows, said)}{'' if follows in MARKS else ' '}{said}"
        return said.strip()

    def word(self, word: str, tag: str = "", follows: str = "", sound: str = "") -> str:
        """Phonemes of one word of part of speech `tag` (Penn Treebank) before the word `follows` of phonemes `sound`."""
        small, final = word.lower(), not follows or follows in MARKS
        before_vowel = not final and sound.lstrip("ˈˌ")[:1] in VOWELS
        if small == "the":
            return "ði" if before_vowel else "ðə"
        if small == "to":
            return "tu" if final else "tʊ" if before_vowel else "tə"
        if small == "a":
            return "ɐ" if word == "a" or follows[:1].islower() else "ˈA"
        if small == "used" and follows == "to" and tag != "VBN":
            return "jˈust"
        if word in SPELLED:
            return self.spelled(word)
        known = self.known(small, tag)
        if small.partition("'")[0] in WEAK:
            return known if final else known.replace("ˈ", "")
        return known or self._unknown(word, tag)

    def known(self, word: str, tag: str = "") -> str:
        """Phonemes of a word in small letters from the lexicon; "" without an entry."""
        if word in OURS:
            return OURS[word]
        readings = self.readings.get(word, {})
        for role in ("VBD" if tag == "VBN" else tag, tag[:2], "", *readings):
            if role in readings:
                return kokoro(readings[role].split())
        return ""

    def _unknown(self, word: str, tag: str) -> str:
        if (word.isupper() and len(word) <= 5) or not re.search(r"[aeiou]" if len(word) <= 4 else r"[aeiouy]", word.lower()):
            return self.spelled(word)
        parts = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z']+|[A-Z]+", word)
        if len(parts) > 1:
            return " ".join(self.word(part, tag) for part in parts)
        small = word.lower()
        return next(self._endings(small, tag), "") or next(self._compounds(small), "") or self.guess(small)

    def _endings(self, word: str, tag: str) -> Iterator[str]:
        for ending, sounds in (
            ("'s", _s),
            ("s'", _s),
            ("es", _s),
            ("s", _s),
            ("'d", _ed),
            ("ed", _ed),
            ("d", _ed),
            ("ing", _ing),
            ("in'", _ing),
        ):
            if word.endswith(ending) and len(word) >= len(ending) + 2:
                for stem in _stems(word.removesuffix(ending), ending):
                    if known := self.known(stem, tag):
                        yield sounds(known)
        for ending, sound in SUFFIXES:
            stem = word.removesuffix(ending)
            if SHORTEST <= len(stem) < len(word) and (known := self.known(stem) or self.known(f"{stem}e")):
                yield known + sound
        for prefix, sound in PREFIXES:
            rest = word.removeprefix(prefix)
            if SHORTEST < len(rest) < len(word) and (known := self.known(rest) or next(self._endings(rest, tag), "")):
                yield sound + known

    def _compounds(self, word: str) -> Iterator[str]:
        for at in range(len(word) - SHORTEST, SHORTEST - 1, -1):
            first, second = self.known(word[:at]), self.known(word[at:])
            if first and second:
                yield first + second.replace("ˈ", "ˌ")

    def spelled(self, word: str) -> str:
        """The names of the letters, the last one stressed."""
        names = [re.sub("[ˈˌ]", "", self.known(letter)) if letter != "a" else "A" for letter in word.lower() if letter.isalpha()]
        return "".join(f"{'ˈ' if at == len(names) - 1 else 'ˌ'}{name}" for at, name in enumerate(names))

    def _guess(self, word: str) -> str:
        coded = self.guesser.tag([_letter_features(word, at) for at in range(len(word))])
        return kokoro([sound for code in coded for sound in b64decode(code).decode().split("|") if sound != "_"])


def kokoro(sounds: list[str]) -> str:
    """gruut's phonemes in Kokoro's symbols."""
    said = ""
    for sound in sounds:
        stress, bare = (sound[0], sound[1:]) if sound[0] in "ˈˌ" else ("", sound)
        said += stress + KOKORO.get(bare, bare if bare != "ɚ" else "ɜɹ" if stress else "əɹ")
    return SYLLABIC.sub("ᵊl", TAP.sub("ɾ", said))


def _stems(stem: str, ending: str) -> Iterator[str]:
    """Words that `stem` may be after it lost `ending`: carri -> carry, stopp -> stop, mak -> make."""
    yield stem
    if ending in ("es", "ed", "d") and stem.endswith("i"):
        yield f"{stem[:-1]}y"
    if ending in ("ing", "ed", "in'"):
        yield f"{stem}e"
        if len(stem) > 3 and stem[-1] == stem[-2]:
            yield stem[:-1]


def _s(stem: str) -> str:
    return stem + ("s" if stem[-1] in "ptkfθ" else "ᵻz" if stem[-1] in "szʃʒʧʤ" else "z")


def _ed(stem: str) -> str:
    return TAP.sub("ɾ", f"{stem}ɪd") if stem[-1] in "td" else stem + ("t" if stem[-1] in "pkfθʃsʧ" else "d")


def _ing(stem: str) -> str:
    return TAP.sub("ɾ", f"{stem}ɪŋ")


def _coded(text: str) -> str:
    return b64encode(text.encode()).decode()


def _letter_features(word: str, at: int) -> dict[str, Any]:
    """What gruut's letter-to-sound model was trained on: a letter and three on each side."""
    features: dict[str, Any] = {"bias": 1.0, "grapheme": _coded(word[at])}
    if at == 0:
        features["begin"] = True
    for step in (1, 2, 3):
        if at >= step:
            features[f"grapheme-{step}"] = _coded(word[at - step])
        if at + step < len(word):
            features[f"grapheme+{step}"] = _coded(word[at + step])
    if at == len(word) - 1:
        features["end"] = True
    return features


def _word_features(words: list[str], at: int) -> dict[str, Any]:
    """What gruut's tagger was trained on: a word and two on each side."""
    features: dict[str, Any] = {}
    for step in (0, -1, -2, 1, 2):
        if not 0 <= at + step < len(words):
            continue
        word, prefix = words[at + step], f"{step:+d}:" if step else ""
        features |= {
            f"{prefix}bias": 1.0, f"{prefix}word": _coded(word), f"{prefix}len(word)": len(word),
            f"{prefix}word.ispunctuation": word in punctuation, f"{prefix}word.isdigit()": word.isdigit(),
            f"{prefix}word[:2]": word[:2], f"{prefix}word[:3]": word[:3], f"{prefix}word[-2:]": word[-2:], f"{prefix}word[-3:]": word[-3:],
        }  # fmt: skip
    if at == 0:
        features["BOS"] = True
    if at == len(words) - 1:
        features["EOS"] = True
    return features
