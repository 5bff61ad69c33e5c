"""Numbers in English words, as they are said: amounts, ordinals, years, decimals, digits one by one."""

from __future__ import annotations

SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen",
    "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = ("", "thousand", "million", "billion", "trillion", "quadrillion")
LONGEST = 3 * len(SCALES)
"""A number of more digits than this is said digit by digit."""
ODD_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth",
}  # fmt: skip


def cardinal(number: int) -> str:
    """`1234` -> "one thousand two hundred thirty four"."""
    if number < 0:
        return f"minus {cardinal(-number)}"
    if len(str(number)) > LONGEST:
        return digits(str(number))
    groups: list[str] = []
    scale = 0
    while number or not groups:
        number, group = divmod(number, 1000)
        if group or (not number and not groups):
            groups.append(f"{_below_thousand(group)} {SCALES[scale]}".strip())
        scale += 1
    return " ".join(reversed(groups))


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    words = [SMALL[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        words.append(TENS[rest // 10])
        rest %= 10
    if rest or not words:
        words.append(SMALL[rest])
    return " ".join(words)


def ordinal(number: int) -> str:
    """`21` -> "twenty first"."""
    *before, last = cardinal(number).split()
    regular = last.removesuffix("y") + ("ieth" if last.endswith("y") else "th")
    return " ".join([*before, ODD_ORDINALS.get(last, regular)])


def year(number: int) -> str:
    """`1984` -> "nineteen eighty four"; `2007` -> "two thousand seven"; `1905` -> "nineteen oh five"."""
    century, rest = divmod(number, 100)
    if century % 10 == 0 and rest < 10:
        return cardinal(number)
    if rest == 0:
        return f"{cardinal(century)} hundred"
    return f"{cardinal(century)} {'oh ' if rest < 10 else ''}{cardinal(rest)}"


def decimal(text: str) -> str:
    """`"3.05"` -> "three point zero five"."""
    whole, _, fraction = text.partition(".")
    said = cardinal(int(whole or "0"))
    return f"{said} point {digits(fraction)}" if fraction else said


def digits(text: str) -> str:
    """`"007"` -> "zero zero seven"."""
    return " ".join(SMALL[int(digit)] for digit in text)


def plural(words: str) -> str:
    """`"nineteen eighty"` -> "nineteen eighties"."""
    *before, last = words.split()
    return " ".join([*before, f"{last[:-1]}ies" if last.endswith("y") else f"{last}es" if last == "six" else f"{last}s"])
