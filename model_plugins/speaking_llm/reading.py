"""How written English is read aloud: a sentence as a model writes it -> words and the marks that shape speech (`,;:.!?`).

Markdown, emoji and web addresses become something one would say, or nothing. Numbers, money, times, units and abbreviations become
words. What has no English reading (other scripts) is left out. It knows no phonemes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable

from vllm_omni_speaking_llm.counting import LONGEST, cardinal, decimal, digits, ordinal, plural, year

Match = re.Match[str]
NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
MONEY = {"$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny"), "¥": ("yen", "sen"), "₹": ("rupee", "paisa")}
PLURALS = {"penny": "pence", "yen": "yen", "sen": "sen", "foot": "feet", "paisa": "paise"}
SCALE = {"k": "thousand", "m": "million", "mn": "million", "b": "billion", "bn": "billion", "t": "trillion"}
SCALE |= {word: word for word in ("thousand", "million", "billion", "trillion")}
UNITS = {
    "km": "kilometer", "m": "meter", "cm": "centimeter", "mm": "millimeter", "nm": "nanometer", "mi": "mile", "ft": "foot",
    "kg": "kilogram", "g": "gram", "mg": "milligram", "lb": "pound", "lbs": "pound", "oz": "ounce", "l": "liter", "L": "liter",
    "ml": "milliliter", "mL": "milliliter", "s": "second", "sec": "second", "ms": "millisecond", "min": "minute", "h": "hour",
    "hr": "hour", "hrs": "hour", "KB": "kilobyte", "kB": "kilobyte", "MB": "megabyte", "GB": "gigabyte", "TB": "terabyte",
    "GiB": "gibibyte", "MiB": "mebibyte", "Hz": "hertz", "kHz": "kilohertz", "MHz": "megahertz", "GHz": "gigahertz", "W": "watt",
    "kW": "kilowatt", "kWh": "kilowatt hour", "V": "volt", "cal": "calorie", "kcal": "kilocalorie", "km²": "square kilometer",
    "m²": "square meter", "m³": "cubic meter",
}  # fmt: skip
RATES = {"mph": "miles per hour", "km/h": "kilometers per hour", "kph": "kilometers per hour", "m/s": "meters per second"}
RATES |= {"°C": "degrees Celsius", "°F": "degrees Fahrenheit", "°": "degrees", "%": "percent", "fps": "frames per second"}
ALWAYS = {
    "Mr.": "mister", "Mrs.": "missus", "Ms.": "miz", "Dr.": "doctor", "Prof.": "professor", "Jr.": "junior", "Sr.": "senior",
    "Gen.": "general", "Capt.": "captain", "Lt.": "lieutenant", "Col.": "colonel", "Sgt.": "sergeant", "Rev.": "reverend",
    "Gov.": "governor", "Sen.": "senator", "Rep.": "representative", "Mt.": "mount", "Ave.": "avenue", "Blvd.": "boulevard",
    "Rd.": "road", "Inc.": "incorporated", "Ltd.": "limited", "Corp.": "corporation", "Dept.": "department", "Univ.": "university",
    "e.g.": "for example", "i.e.": "that is", "etc.": "et cetera", "vs.": "versus", "vs": "versus", "approx.": "approximately",
    "est.": "estimated", "Fig.": "figure", "fig.": "figure", "vol.": "volume", "Vol.": "volume", "dept.": "department", "cf.": "compare",
    "ca.": "circa", "w/o": "without", "w/": "with", "b/c": "because", "and/or": "and or", "AT&T": "A T and T", "C#": "C sharp",
    "F#": "F sharp", "et al.": "and others", "a.k.a.": "also known as", "ft.": "feet",
    "Jan.": "January", "Feb.": "February", "Aug.": "August", "Sept.": "September", "Oct.": "October", "Nov.": "November",
}  # fmt: skip
"""Said in full wherever they stand. `No.`, `St.`, `Mar.` and `Dec.` need a look at what follows."""
MONTHS = {"Mar": "March", "Apr": "April", "Jun": "June", "Jul": "July", "Dec": "December"}
ENDS = {"etc.", "Inc.", "Ltd.", "Corp.", "Jr.", "Sr.", "ft.", "Ave.", "Blvd.", "Rd.", "et al."}
"""Those that often stand at the end of a sentence: there the dot stays a full stop."""
SIGNS = {
    "&": " and ", "+": " plus ", "=": " equals ", "≠": " is not equal to ", "≈": " is about ", "≤": " is at most ", "≥": " is at least ",
    "×": " times ", "÷": " divided by ", "±": " plus or minus ", "√": " the square root of ", "∞": " infinity ", "π": " pi ",
    "→": " to ", "@": " at ", "%": " percent ", "°": " degrees ", "©": " copyright ", "™": " ", "®": " ", "§": " section ",
    "…": "... ", "–": " - ", "—": ", ", "―": ", ", "•": " ", "·": " ",
}  # fmt: skip
FRACTIONS = {"1/2": "one half", "1/4": "one quarter", "3/4": "three quarters", "24/7": "twenty four seven", "9/11": "nine eleven"}
ROMAN = {"II": 2, "III": 3, "IV": 4, "VI": 6, "VII": 7, "VIII": 8, "IX": 9, "XI": 11, "XII": 12, "XIV": 14, "XVI": 16}
MARKS = ",;:.!?"


def spoken(text: str) -> str:
    """The words of `text` as they are said, with the marks between them; "" when there is nothing to say."""
    text = _letters(_markup(_addresses(text)))
    for pattern, say in RULES:
        text = pattern.sub(say, text)
    for sign, said in SIGNS.items():
        text = text.replace(sign, said)
    text = re.sub(r"(?<=\w)/(?=\w)", " slash ", text)
    text = re.sub(r"\s-+\s", ", ", text)
    text = re.sub(r"(?<![A-Za-z])'(?!(?:em|tis|twas|til|cause)\b)|'(?![A-Za-z])", " ", text)
    text = re.sub(r"[()\[\]{}|]", ", ", text)
    text = re.sub(r"[^A-Za-z',;:.!?\s]", " ", text)
    return _marks(text)


def _letters(text: str) -> str:
    """Plain quotes, Latin letters without accents, Greek letters by name; emoji and other scripts are blanks."""
    text = text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2010: "-", 0x2011: "-", 0x2012: "-", 0x2212: "-"})
    text = re.sub(r"(?<![\d.])(\d*)([¼-¾⅐-⅞])", lambda m: f"{m[1]} and {_vulgar(m[2])}" if m[1] else _vulgar(m[2]), text)
    return "".join(map(_letter, text))


def _vulgar(sign: str) -> str:
    return unicodedata.normalize("NFKC", sign).replace("\u2044", "/")


def _letter(char: str) -> str:
    if char.isascii() or char in SIGNS or char in MONEY or char in "²³":
        return char
    name = unicodedata.name(char, "")
    if name.startswith("GREEK"):
        return f" {name.split(' WITH ')[0].split()[-1].lower()} "
    plain = "".join(part for part in unicodedata.normalize("NFKD", char) if part.isascii())
    return {"ß": "ss", "æ": "ae", "Æ": "Ae", "ø": "o", "Ø": "O", "œ": "oe", "Œ": "Oe", "ł": "l", "Ł": "L", "đ": "d"}.get(char, plain or " ")


def _addresses(text: str) -> str:
    """Links are their words, and a bare address is its host: nobody wants to hear a path."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*(?:\s+\"[^\"]*\")?\)", r"\1", text)
    text = re.sub(r"<((?:https?://|mailto:)[^>\s]+)>", r" \1 ", text)
    text = re.sub(r"\b(?:https?|ftp)://(?:www\.)?([\w.-]*\w)\S*?(?=[.,;:!?)\"']*(?:\s|$))", lambda m: _dotted(m[1]), text)
    text = re.sub(r"\bwww\.([\w.-]*\w)(?:/\S*?(?=[.,;:!?)\"']*(?:\s|$)))?", lambda m: _dotted(m[1]), text)
    return re.sub(r"\b(?:mailto:)?([\w.+-]+)@([\w-]+(?:\.[\w-]+)+)", lambda m: f"{_dotted(m[1])} at {_dotted(m[2])}", text)


def _dotted(name: str) -> str:
    return re.sub(r"[-_+]", " ", name.replace(".", " dot "))


def _markup(text: str) -> str:
    text = re.sub(r"^\s*(?:`{3,}|~{3,}).*$", " ", text, flags=re.M)
    text = re.sub(r"</?[A-Za-z][^<>]*>", " ", text)
    text = re.sub(r"^\s*(?:>\s*)*(?:#{1,6}\s+|[-*+•]\s+(?:\[[ xX]\]\s+)?)?", "", text, flags=re.M)
    text = re.sub(r"^(\d+)[.)]\s+", r"\1, ", text, flags=re.M)
    text = re.sub(r"\*+(?=\S)(.*?)(?<=\S)\*+(?!\w)|(?<!\w)_+(?=\S)(.*?)(?<=\S)_+(?!\w)", lambda m: m[1] or m[2] or "", text)
    return re.sub(r"[`~*]{2,}|`|(?<=\w)_+(?=\w)|_{2,}", " ", text)


def _marks(text: str) -> str:
    """Marks behind their word, the strongest one of a run, none at the start."""
    text = re.sub(r"\s+([,;:.!?])", r"\1", text)
    text = re.sub(r"[,;:.!?](?:\s*[,;:.!?])+", _strongest, text)
    text = re.sub(r"([,;:.!?])(?=[A-Za-z'])", r"\1 ", text)
    return re.sub(r"\s+", " ", text).lstrip(" ,;:.!?'").rstrip()


def _strongest(match: Match) -> str:
    return next(mark for mark in "?!.:;," if mark in match[0])


def _number(text: str) -> str:
    text = text.replace(",", "")
    whole = text.partition(".")[0]
    if "." in text:
        return decimal(text) if len(whole) <= LONGEST else f"{digits(whole)} point {digits(text.partition('.')[2])}"
    if (len(text) > 1 and text.startswith("0")) or len(text) > LONGEST:
        return digits(text)
    return cardinal(int(text))


def _many(word: str, amount: str) -> str:
    return word if amount == "1" or word.endswith("hertz") else PLURALS.get(word, f"{word}s")


def _money(match: Match) -> str:
    sign, amount, scale = match[1], match[2], match[3]
    unit, cent = MONEY[sign]
    if scale:
        return f"{_number(amount)} {SCALE[scale.strip().lower()]} {_many(unit, '')}"
    whole, _, part = amount.replace(",", "").partition(".")
    if len(part) != 2:
        return f"{_number(amount)} {_many(unit, amount)}"
    said = [] if int(whole) == 0 and int(part) else [f"{_number(whole)} {_many(unit, whole)}"]
    if int(part):
        said.append(f"{cardinal(int(part))} {_many(cent, str(int(part)))}")
    return " and ".join(said)


def _time(match: Match) -> str:
    hour, minute, half = int(match[1]), int(match[2]), match[3]
    said = "" if minute == 0 and half else "o'clock" if minute == 0 else f"oh {cardinal(minute)}" if minute < 10 else cardinal(minute)
    return f"{cardinal(hour)} {said} {_half(half) if half else ''}"


def _half(text: str) -> str:
    return "A M" if text.strip().lower().startswith("a") else "P M"


def _year(match: Match) -> str:
    said = year(int(match[1]))
    return plural(said) if match[2] else said


def _range(match: Match) -> str:
    both = [int(match[1]), int(match[2])]
    if all(1100 <= number <= 2099 for number in both):
        return f"{year(both[0])} to {year(both[1])}"
    return f"{_number(match[1])} to {_number(match[2])}" if both[0] < both[1] else f"{_number(match[1])} {_number(match[2])}"


def _measure(match: Match) -> str:
    amount, unit = match[1], match[2]
    return f"{_number(amount)} {RATES.get(unit) or _many(UNITS[unit], amount)}"


def _fraction(match: Match) -> str:
    if match[0] in FRACTIONS:
        return FRACTIONS[match[0]]
    above, below = int(match[1]), int(match[2])
    if below in (0, 1, 2) or above >= below or below > 20:
        return f"{_number(match[1])} over {_number(match[2])}"
    return f"{cardinal(above)} {ordinal(below)}{'s' if above > 1 else ''}"


def _version(match: Match) -> str:
    return " point ".join(_number(part) for part in match[0].split("."))


def _shortened(match: Match) -> str:
    said = ALWAYS[match[0]]
    return said + "." if match[0] in ENDS and not match.string[match.end() :].strip() else said


def _initials(match: Match) -> str:
    return " ".join(match[0].replace(".", " ").upper().split()) + " "


def _any_of(words: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


def _rule(pattern: str, say: Callable[[Match], str] | str) -> tuple[re.Pattern[str], Callable[[Match], str] | str]:
    return re.compile(pattern), say


RULES = (
    _rule(rf"([{''.join(MONEY)}])\s?({NUMBER})(\s(?:thousand|million|billion|trillion)\b|(?:mn|bn|[kKMmBbTt])\b)?", _money),
    _rule(r"\b(\d{1,2}):(\d{2})(?::\d{2})?(\s?[AaPp]\.?[Mm]\b\.?)?", _time),
    _rule(r"(?<=\d)(\s?[AaPp]\.?[Mm])\b\.?", lambda m: f" {_half(m[1])} "),
    _rule(r"\b([AaPp]\.[Mm]\.)", lambda m: f"{_half(m[1])} "),
    _rule(r"\b(?:\d{3}-)?\d{3}-\d{4}\b", lambda m: ", ".join(map(digits, m[0].split("-")))),
    _rule(r"\b(\d\d?)/(\d\d?)/(\d{4})\b", lambda m: f"{cardinal(int(m[1]))}, {cardinal(int(m[2]))}, {year(int(m[3]))}"),
    _rule(r"\b(\d{4})-(\d\d)-(\d\d)\b", lambda m: f"{year(int(m[1]))}, {cardinal(int(m[2]))}, {cardinal(int(m[3]))}"),
    _rule(r"\b\d+(?:\.\d+){2,}\b", _version),
    _rule(r"\bNo\.\s?(?=\d)|#(?=\d)", "number "),
    _rule(r"\bpp?\.\s?(?=\d)", "page "),
    _rule(rf"\b({_any_of(MONTHS)})\.(?=\s\d)", lambda m: MONTHS[m[1]]),
    _rule(r"\bSt\.(?=\s[A-Z])", "saint"),
    _rule(r"\bSt\.", "street"),
    _rule(rf"(?<![\w.])(?:{_any_of(ALWAYS)})(?![\w])", _shortened),
    _rule(r"\b(?:[A-Za-z]\.){2,}", _initials),
    _rule(r"\b([A-HJ-Z])\.(?=\s+[A-Z])", r"\1"),
    _rule(rf"(?<=[a-z] )({_any_of(ROMAN)})\b", lambda m: cardinal(ROMAN[m[1]])),
    _rule(r"(?<![\d.,])(\d+)\s?[-–]\s?(\d+)(?![\d-])", _range),
    _rule(r"\b(1[1-9]\d0|20[1-9]0)('?s)\b", _year),
    _rule(r"(?i:(?<=the )|(?<=early )|(?<=late )|(?<=mid-)|(?<=mid )|(?<='))(\d0)'?s\b", lambda m: plural(cardinal(int(m[1])))),
    _rule(rf"(?<![A-Za-z\d])({NUMBER})\s?({_any_of([*UNITS, *RATES])})(?![A-Za-z\d²³'])", _measure),
    _rule(r"\b(\d+)/(\d+)\b(?!/)", _fraction),
    _rule(r"(?<![\d.,$])\b(1[1-9]\d\d|20\d\d)()\b(?![.,]\d|\s?%)", _year),
    _rule(r"\b(\d+)(?:st|nd|rd|th)\b", lambda m: ordinal(int(m[1]))),
    _rule(r"(?<=\d)\s?[*x]\s?(?=\d)", " times "),
    _rule(r"(?<=\d)x\b", " times"),
    _rule(r"(?<=[\d)])\s-\s(?=[\d(])", " minus "),
    _rule(r"(?<![\w)])-(?=\d)", "minus "),
    _rule(r"(?<=\d)\^2\b|(?<=\w)²", " squared"),
    _rule(r"(?<=\d)\^3\b|(?<=\w)³", " cubed"),
    _rule(r"(?<=\w)\^(?=\w)", " to the power of "),
    _rule(r"~(?=\d)", "about "),
    _rule(r"(?<=\d)\s?<\s?(?=\d)", " is less than "),
    _rule(r"(?<=\d)\s?>\s?(?=\d)", " is greater than "),
    _rule(r"(?<=[A-Za-z\d])\.(?=[a-z]{1,5}\b)", " dot "),
    _rule(rf"(?:{NUMBER})", lambda m: f" {_number(m[0])} "),
)  # fmt: skip
"""In this order: what is written with more signs comes before what is written with fewer."""
