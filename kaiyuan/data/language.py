"""Guesses about a document from its characters alone: scripts, language, how prose-like it is.

Rough by intent: good enough to see that a corpus holds what it should, by a sample.
"""

import re
from dataclasses import dataclass

# Letters by script. Ranges of Unicode 16, common blocks only; all else counts as "other".
_SCRIPTS = {
    "Latin": "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff",
    "Han": "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",
    "Kana": "\u3041-\u3096\u30a1-\u30fa",
    "Hangul": "\u1100-\u11ff\uac00-\ud7a3",
    "Cyrillic": "\u0400-\u052f",
    "Greek": "\u0370-\u03ff",
    "Arabic": "\u0620-\u064a\u0671-\u06d3",
    "Devanagari": "\u0904-\u0939",
    "digits": "0-9\uff10-\uff19",
    "spaces": r"\s",
}
_RUNS = {name: re.compile(f"[{ranges}]+") for name, ranges in _SCRIPTS.items()}
_NOT_LETTERS = ("digits", "spaces", "other")
_ENGLISH = {
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "with",
    "as",
    "on",
    "are",
    "it",
}
_CODE_LINE = re.compile(
    r"[;{}]\s*$|^\s*(//|/\*|\*/|#include|#!|import |from \w[\w.]* import |def |class |return\b"
    r"|(if|for|while|switch) ?\(|elif |else:|try:|except\b|@\w+|(public|private|static|const|let"
    r"|var|func|fn|package|using) )|^\s*[\w.\[\]]+ (=|\+=) \S|^\s*[\w.]+\([^ ]*\)\s*$"
)
_SENTENCE_END = tuple(".!?。！？…”\"'）)")
_LOOKED_AT = 20_000  # characters of a document


@dataclass(frozen=True)
class Looks:
    """What a document looks like.

    Attributes:
        scripts: characters by script, with "digits", "spaces" and "other".
        kind: "Chinese", "English", "code", "Japanese", "Korean", "other Latin", "other" or
            "no letters".
        sentences: share of its lines that end like a sentence.
        variety: share of its lines that are not repetitions of an earlier one.
    """

    scripts: dict[str, int]
    kind: str
    sentences: float
    variety: float


def look_at(text: str) -> Looks:
    """Look at the first 20,000 characters of a document."""
    text = text[:_LOOKED_AT]
    scripts = {name: sum(map(len, run.findall(text))) for name, run in _RUNS.items()}
    scripts["other"] = len(text) - sum(scripts.values())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    count = max(len(lines), 1)
    return Looks(
        scripts=scripts,
        kind=_kind(text, scripts),
        sentences=sum(line.endswith(_SENTENCE_END) for line in lines) / count,
        variety=len(set(lines)) / count,
    )


def _kind(text: str, scripts: dict[str, int]) -> str:
    letters = {name: count for name, count in scripts.items() if name not in _NOT_LETTERS}
    total = sum(letters.values())
    if not total:
        return "no letters"
    if _is_code(text):
        return "code"
    # A Han character says about as much as three or four letters, hence the low bounds.
    if letters["Kana"] > 0.1 * total:
        return "Japanese"
    if letters["Hangul"] > 0.2 * total:
        return "Korean"
    if letters["Han"] > 0.2 * total:
        return "Chinese"
    if letters["Latin"] > 0.6 * total:
        words = re.findall(r"[a-z']+", text.lower())
        common = sum(word in _ENGLISH for word in words)
        return "English" if common > 0.12 * len(words) else "other Latin"
    return "other"


def _is_code(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) >= 3 and sum(bool(_CODE_LINE.search(line)) for line in lines) > 0.4 * len(
        lines
    )
