"""A producer's text: what is kept, what never is, at any length."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrysafe.sanitize import sanitize

WORDS = st.text(st.characters(categories=("Ll", "Lu")), min_size=1, max_size=8)
PART = st.from_regex(r"[a-z]{3}q[a-z0-9_]{1,6}", fullmatch=True)
PARTS = st.lists(PART, min_size=2, max_size=4)


def _posix(parts: list[str]) -> str:
    return "/" + "/".join(parts)


SECRETS = st.one_of(
    PARTS.map(_posix),
    PARTS.map(lambda p: "~/" + "/".join(p)),
    PARTS.map(lambda p: "../" + "/".join(p)),
    PARTS.map(lambda p: "C:\\" + "\\".join(p)),
    PARTS.map(lambda p: "D:/" + "/".join(p)),
    PARTS.map(lambda p: "C:\\Program Files\\" + "\\".join(p)),
    PARTS.map(lambda p: "\\\\" + "\\".join(p)),
    PARTS.map(lambda p: "\\\\?\\C:\\" + "\\".join(p)),
    PARTS.map(lambda p: f"https://{p[0]}:{p[1]}@{p[-1]}.internal:8080/{p[0]}?k={p[1]}#{p[-1]}"),
    PARTS.map(lambda p: f"postgres://{p[0]}:{p[1]}@{p[-1]}/{p[0]}"),
    PARTS.map(lambda p: f"file:///{p[0]}/{p[1]}"),
    PARTS.map(lambda p: f"s3://{p[0]}/{p[1]}"),
)
# What hides in the middle of a word from whoever looks for it.
HIDDEN = st.sampled_from(["\x00", "\u200b", "\u202e", "\u2066", "\ufeff", "\x7f", "\xad", "\x1b"])
BEFORE = st.sampled_from(
    ["", "open ", "(", "'", '"', "path=", "[", "error: ", "at\n", "<", "`", ","]
)
AFTER = st.sampled_from(["", " not found", ")", "'", '"', ": denied", "]", ".", ", line 3", ">"])


@settings(max_examples=400)
@given(st.data(), BEFORE, AFTER, SECRETS, st.integers(1, 120))
def test_at_no_length_does_anything_redactable_survive(
    data: st.DataObject, before: str, after: str, secret: str, limit: int
) -> None:
    hidden = secret
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(1, len(hidden) - 1))
        hidden = hidden[:at] + data.draw(HIDDEN) + hidden[at:]
    text = " ".join(data.draw(st.lists(WORDS, max_size=3))) + " " + before + hidden + after
    shown = sanitize(text, limit)
    assert len(shown) <= limit
    for n in range(len(secret) - 3):
        fragment = secret[n : n + 4]
        if "q" in fragment and fragment.isascii():  # a word of the path's own
            assert fragment not in shown, (text, shown)


@settings(max_examples=300)
@given(st.one_of(st.text(), st.binary(), st.text(st.characters(codec=None))), st.integers(1, 50))
def test_whatever_comes_the_text_is_short_and_plain(text: str | bytes, limit: int) -> None:
    shown = sanitize(text, limit)
    assert len(shown) <= limit
    shown.encode("utf-8")
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs")]
    assert not [c for c in shown if unicodedata.bidirectional(c) in ("RLO", "LRO", "RLE", "RLI")]


@given(st.text())
def test_what_is_clean_stays_as_it_is(text: str) -> None:
    once = sanitize(text)
    assert sanitize(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried 20.00 GiB (GPU 0; 39.5 GiB total)",
        "I/O error after 3/4 of it, 12 km/h and/or N/A",
        "余额不足",
        "due on 2026/12/02",
        "expected \"a\" or 'b': got <c>",
    ],
)
def test_a_producers_own_words_are_kept(text: str) -> None:
    assert sanitize(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("open /srv/models/llama.bin: No such file", "open [path]: No such file"),
        ("see https://bob:pw@db:5432/x, please", "see [url], please"),
        ("File '/app/my file.py', line 3", "File '[path]', line 3"),
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        ("a\x00b\r\nc\u202e", "ab c"),
        ("half \ud800", "half \ufffd"),
    ],
)
def test_C85_repair_strip_redact_then_clip(text: str | bytes, shown: str) -> None:
    assert sanitize(text) == shown


@pytest.mark.parametrize(
    "unit", ["/a ", "C:\\", "a/", "\\\\", '"', "a:b", "=a", '"a:', "~", "(1", "a@"]
)
def test_the_time_grows_with_the_text_and_no_faster(unit: str) -> None:
    assert len(sanitize(unit * 200_000, 100)) <= 100


def test_of_a_long_text_no_half_path_is_left_at_its_cut() -> None:
    text = "x " * 32_766 + "/srvq/secretq"
    assert "srv" not in sanitize(text, 100_000)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, None])
def test_a_limit_that_is_none_is_refused(limit: object) -> None:
    with pytest.raises(ValueError, match="limit takes"):
        sanitize("x", limit)  # type: ignore[arg-type]
