"""A stranger's text, made fit to be kept and shown: repaired, stripped, redacted, then clipped.

In that order (S1): cut first, and half a path or URL is left that no pattern knows any more.
"""

from __future__ import annotations

import re

__all__ = ["sanitize"]

_BREAKS = re.compile(r"[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")

# Controls; what changes the direction of text (UAX #9); what is invisible: it hides in the middle
# of a word from whoever, or whatever pattern, looks for it.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

_SLASH = r"[/\u2044\u2215\u29f8\uff0f]"
_BACK = r"[\\\u29f5\u29f9\ufe68\uff3c]"
_EITHER = rf"(?:{_SLASH}|{_BACK})"
# Each begins where a word does, or after a bracket, quote or the like: no pattern is tried twice on
# the same characters, so the time grows with the text and no faster.
_OPENING = r"(?<![^\s\"'`<>()\[\]{}=,;|])"
_SCHEME = rf"(?<![A-Za-z0-9+.\-])[A-Za-z][A-Za-z0-9+.\-]{{1,30}}:{_EITHER}"
_LOGIN = rf"{_OPENING}[^\s:@\"'`<>()=,;|]{{1,128}}:[^\s@]{{1,128}}@[^\s@]"
_DRIVE = rf"(?<![A-Za-z])[A-Za-z]:{_EITHER}"
_SHARE = rf"{_BACK}{{1,4}}[^\s\\]"
_ROOT = rf"(?<![\w.]){_SLASH}{{1,8}}[^\s]"
_HERE = r"(?<![\w.~])(?:~[\w\-]{0,64}|\.{1,2}|%\w{1,64}%|\$\w{1,64}|\$\{\w{1,64}\})" + _EITHER
_PART = r"[^\s\"'`<>()=,;|/\\]{1,255}"
_DEEP = rf"{_OPENING}{_PART}{_EITHER}{{1,4}}{_PART}{_EITHER}"
_FOLDER = rf"{_OPENING}{_PART}{_BACK}{{1,4}}\w"

_START = rf"(?:{_SCHEME}|{_LOGIN}|{_DRIVE}|{_SHARE}|{_ROOT}|{_HERE}|{_DEEP}|{_FOLDER})"
# Between quotes a path may hold spaces; else it ends with the word, but for a Windows path: its
# folders often hold spaces, and a later backslash says that it goes on.
_QUOTED = re.compile(rf"(?P<quote>[\"'`])(?={_START})(?:(?!(?P=quote)).){{1,4096}}(?P=quote)")
_WINDOWS = re.compile(
    rf"(?:{_DRIVE}|{_SHARE})(?:[^\s\\/]{{1,255}}(?: [^\s\\/]{{1,255}}){{0,8}}{_BACK}){{0,64}}\S*"
)
_URL = re.compile(rf"(?:{_SCHEME}|{_LOGIN})\S*")
_PATH = re.compile(rf"(?:{_DEEP}|{_FOLDER}|{_ROOT}|{_HERE}|{_SHARE})\S*")

_ENDING = re.compile(r"[.,;:!?)\]}\"'`>]+$")
_NUMBERS = re.compile(r"[\d/.,:;]+")
_SPACES = re.compile(r" {2,}")
_MOST = 64 * 1024


def sanitize(text: str | bytes, limit: int = 2000) -> str:
    """Text of at most `limit` characters that names no internal path or URL, in whole or in part,
    and holds no control, invisible or bidirectional character.

    text: what was received; bytes are read as UTF-8, broken parts become U+FFFD.
    limit: characters, 1 or more. What is cut off is marked by an ellipsis.
    Paths are POSIX, Windows and UNC ones, relative ones too where they are plain as such; URLs of
    any scheme, with their credentials. When in doubt a word is redacted. Of a text above 64 KiB
    only whole words of the beginning are looked at. Raises ValueError for another limit,
    TypeError for what is no text. Source: S1.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit takes a number of characters, 1 or more, not {limit!r}")
    if isinstance(text, (bytes, bytearray, memoryview)):
        text = bytes(text[: 4 * _MOST + 4]).decode("utf-8", "replace")
    elif not isinstance(text, str):
        raise TypeError(f"sanitize takes text or bytes, not {type(text).__name__}")
    text = _repaired(text[: _MOST + 1])
    clipped = len(text) > _MOST
    text = _UNSEEN.sub("", _BREAKS.sub(" ", text))
    if clipped:  # the last word may be half a path
        text = text[:_MOST].rpartition(" ")[0]
    text = _QUOTED.sub(_redact_quoted, text)
    text = _URL.sub(_redact_url, text)
    text = _WINDOWS.sub(_redact_path, text)
    text = _PATH.sub(_redact_path, text)
    text = _SPACES.sub(" ", text).strip()
    if len(text) <= limit and not clipped:
        return text
    return text[: limit - 1].rstrip() + "…"


def _repaired(text: str) -> str:
    """Lone surrogates can't be written out as UTF-8."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _redact_quoted(found: re.Match[str]) -> str:
    quote = found["quote"]
    what = "url" if _URL.match(found[0], 1) else "path"
    return f"{quote}[{what}]{quote}"


def _redact_url(found: re.Match[str]) -> str:
    return "[url]" + _ending(found[0])


def _redact_path(found: re.Match[str]) -> str:
    if _NUMBERS.fullmatch(found[0]):
        return found[0]  # a date, or so many of so many
    return "[path]" + _ending(found[0])


def _ending(redacted: str) -> str:
    """The punctuation after a path is the sentence's."""
    found = _ENDING.search(redacted)
    return found[0] if found else ""
