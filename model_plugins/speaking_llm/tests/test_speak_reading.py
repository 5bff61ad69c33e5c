"""How written English is read: words for what is no word, and phonemes that Kokoro knows."""

from __future__ import annotations

import json
import random
import re

import pytest

from vllm_omni_speaking_llm.counting import cardinal, ordinal, year
from vllm_omni_speaking_llm.phonemes import English
from vllm_omni_speaking_llm.reading import spoken
from vllm_omni_speaking_llm.weights import kokoro_data


@pytest.fixture(scope="module")
def english() -> English:
    return English()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("In 1969, 2 of 20 won.", "In nineteen sixty nine, two of twenty won."),
        ("1,234,567 and 100,000", "one million two hundred thirty four thousand five hundred sixty seven and one hundred thousand"),
        ("pi is 3.14, -5 is cold", "pi is three point one four, minus five is cold"),
        ("$3.50, $1, £0.99", "three dollars and fifty cents, one dollar, ninety nine pence"),
        ("€2.5 million, $20M", "two point five million euros, twenty million dollars"),
        ("at 10:30 a.m. or 7 p.m. or 12:00", "at ten thirty A M or seven P M or twelve o'clock"),
        ("the 1990s, 1905, 2007, 1800", "the nineteen nineties, nineteen oh five, two thousand seven, eighteen hundred"),
        ("on May 5th, the 22nd, 3rd", "on May fifth, the twenty second, third"),
        ("50% of 3/4, 1/2, 2/3, 1½", "fifty percent of three quarters, one half, two thirds, one and one half"),
        ("5 km/h, 20°C, 16GB", "five kilometers per hour, twenty degrees Celsius, sixteen gigabytes"),
        ("1 kg, 10 kg, 3 GHz", "one kilogram, ten kilograms, three gigahertz"),
        ("Dr. Smith, e.g. Mr. J. Jones etc.", "doctor Smith, for example mister J Jones et cetera."),
        ("2+2=4, 3 x 4, 5-10, 2^10", "two plus two equals four, three times four, five to ten, two to the power of ten"),
        ("call 555-123-4567 or 007", "call five five five, one two three, four five six seven or zero zero seven"),
        ("version 0.32.0", "version zero point thirty two point zero"),
        ("World War II", "World War two"),
        ("AT&T and R&D, C++", "A T and T and R and D, C plus plus"),
        ("**Bold**, _it_, `code_x`, [a link](https://x.y/z)", "Bold, it, code x, a link"),
        ("# Title", "Title"), ("- item", "item"), ("* item", "item"), ("3. third", "three, third"),
        ("> said", "said"), ("- [x] done", "done"),
        ("See https://www.example.com/a/b?c=1. Mail bob@ex.org!", "See example dot com. Mail bob at ex dot org!"),
        ("| a | b |", "a, b,"), ("|---|:-:|", ""), ("---", ""), ("```python", ""), ("***", ""), ("😀🎉", ""), ("...", ""),
        ("日本語", ""), ("", ""),
        ("Hello 😀! It’s “café” – naïve…", "Hello! It's cafe, naive."),
        ("'Why?' The dogs' ears.", "Why? The dogs ears."),
        ("9" * 25, " ".join(["nine"] * 25)),
        ("\ud800 lone \x00 null", "lone null"),
    ],
)  # fmt: skip
def test_what_is_written_and_what_is_said(written: str, said: str) -> None:
    assert spoken(written) == said


@pytest.mark.parametrize("number", [0, 7, 13, 20, 21, 99, 100, 101, 110, 999, 1000, 1001, 12_345, 1_000_000, 10**15 + 5, -3])
def test_a_number_in_words_is_that_number(number: int) -> None:
    assert value(cardinal(number)) == number


def value(words: str) -> int:
    """The number that English words say: counted the other way round from `cardinal`."""
    names = (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
    )
    units = {name: at for at, name in enumerate(names.split())}
    units |= {name: 10 * at for at, name in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)}
    scales = {name: 1000**at for at, name in enumerate(["thousand", "million", "billion", "trillion", "quadrillion"], 1)}
    total = group = 0
    for word in words.removeprefix("minus ").split():
        if word in units:
            group += units[word]
        elif word == "hundred":
            group *= 100
        else:
            total, group = total + group * scales[word], 0
    return (total + group) * (-1 if words.startswith("minus") else 1)


def test_ordinals_and_years() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 12, 20, 21, 100)] == [
        "first",
        "second",
        "third",
        "twelfth",
        "twentieth",
        "twenty first",
        "one hundredth",
    ]
    assert [year(n) for n in (1066, 1900, 1905, 2000, 2010)] == [
        "ten sixty six", "nineteen hundred", "nineteen oh five", "two thousand", "twenty ten",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_written_becomes_words_and_phonemes_of_kokoro(seed: int, english: English) -> None:
    dice = random.Random(seed)
    signs = [chr(dice.choice((dice.randrange(32, 127), dice.randrange(32, 127), dice.randrange(160, 0x3000), 0x1F600))) for _ in range(300)]
    said = spoken("".join(sign if dice.random() < 0.8 else " " for sign in signs))
    assert re.fullmatch(r"[A-Za-z',;:.!? ]*", said), said
    known = set(json.loads(kokoro_data("vocab.json").read_text(encoding="utf-8"))["vocab"])
    assert set(english(said)) <= known


@pytest.mark.parametrize(
    ("sentence", "phonemes"),
    [
        ("The end. The start.", "ði ˈɛnd. ðə stˈɑɹt."),
        ("I will read it.", "ɹˈid"),
        ("She has read it.", "ɹˈɛd"),
        ("They record a song.", "ɹɪkˈɔɹd"),
        ("It is a new record.", "ɹˈɛkəɹd"),
        ("water", "wˈɔɾəɹ"),
        ("A cat", "ɐ kˈæt"),
        ("vitamin A", "ˈA"),
        ("the USA", "ðə ˌjuˌɛsˈA"),
        ("between US and them", "ˌjuˈɛs"),
        ("NASA", "nˈæsə"),
        ("vLLM", "ˌɛlˌɛlˈɛm"),
        ("PyTorch", "pˈI tˈɔɹʧ"),
        ("googled", "ɡˈuɡᵊld"),
        ("smartwatches", "smˈɑɹtwˌɔʧɪz"),
    ],
)
def test_how_words_sound(sentence: str, phonemes: str, english: English) -> None:
    assert phonemes in english(sentence)


@pytest.mark.parametrize("word", ["zyxqorian", "blorptastic", "Kubernetes", "qwrt", "Fritzenheimer", "xkcd", "o'Flarn"])
def test_unknown_words_are_said(word: str, english: English) -> None:
    assert re.search(r"[ˈˌ]", english(word))
