"""`Retry-After` (RFC 9110, 10.2.3): seconds, or an HTTP date."""

from __future__ import annotations

import re
from datetime import UTC, datetime

__all__ = ["LARGEST", "parse"]

# A wait of any number of digits is a wait: one that no policy's `max_retry_after` lets pass.
LARGEST = 1e300

# The RFC has whole seconds; fractions are sent in the field and mean what they say.
_SECONDS = re.compile(r"\d+(\.\d+)?", re.ASCII)
_TIME = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
_ZONE = r"(?: (?:GMT|UTC|[+-]0000))?"
_DATES = tuple(
    re.compile(form, re.ASCII)
    for form in (
        # Sun, 06 Nov 1994 08:49:37 GMT
        rf"[A-Za-z]{{3}}, (?P<day>\d\d?) (?P<month>[A-Za-z]{{3}}) (?P<year>\d{{4}}) {_TIME}{_ZONE}",
        # Sunday, 06-Nov-94 08:49:37 GMT
        rf"[A-Za-z]{{6,9}}, (?P<day>\d\d)-(?P<month>[A-Za-z]{{3}})-(?P<year>\d\d) {_TIME}{_ZONE}",
        # Sun Nov  6 08:49:37 1994
        rf"[A-Za-z]{{3}} (?P<month>[A-Za-z]{{3}}) +(?P<day>\d\d?) {_TIME} (?P<year>\d{{4}})",
    )
)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


def parse(text: str | bytes | None, now: float) -> float | None:
    """The wait in seconds, 0 or more and finite; None for what isn't one.

    Takes digits, with a decimal fraction or not, and the three date forms of RFC 9110. `now` is
    the time of day in Unix seconds; a date in the past is 0; HTTP dates are UTC, also where they
    don't say so. Signs, exponents, units, NaN, lists and other digits than ASCII's are no waits:
    the ordinary backoff goes on.
    """
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if not isinstance(text, str):
        return None
    text = text.strip(" \t")
    if _SECONDS.fullmatch(text):
        return min(float(text), LARGEST)
    for form in _DATES:
        if match := form.fullmatch(text):
            moment = _moment(match, now)
            return None if moment is None else max(0.0, moment - now)
    return None


def _moment(match: re.Match[str], now: float) -> float | None:
    month = match["month"].lower()
    if month not in _MONTHS:
        return None
    year = int(match["year"])
    if year < 100:
        # RFC 9110, 5.6.7: more than 50 years ahead means the last century.
        this_year = datetime.fromtimestamp(now, UTC).year
        year += this_year - this_year % 100
        if year > this_year + 50:
            year -= 100
    try:
        return datetime(
            year,
            _MONTHS.index(month) + 1,
            int(match["day"]),
            int(match["hour"]),
            int(match["minute"]),
            min(int(match["second"]), 59),  # a leap second
            tzinfo=UTC,
        ).timestamp()
    except ValueError:
        return None
