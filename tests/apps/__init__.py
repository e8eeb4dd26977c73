"""Small apps that the server tests start, and what they and the tests must agree on."""

from __future__ import annotations

# The streamed report of `tests.apps.shop`: so many pieces of so many bytes, A, B, C...
PIECES = 20
PIECE = 64 * 1024
