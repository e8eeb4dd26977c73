"""The request ID on log records."""

from __future__ import annotations

import logging

from retrysafe.context import request_id, request_id_of_error

__all__ = ["RequestIdFilter"]


class RequestIdFilter(logging.Filter):
    """Sets `record.request_id` on every record; lets every record through; never fails.

    Put it on handlers, so that other libraries' records get it too (a filter on a logger sees only
    what is logged through that very logger):

        handler.addFilter(RequestIdFilter())
        {"filters": {"request_id": {"()": "retrysafe.logging.RequestIdFilter"}}}  # dictConfig

    The value is always a text: the one the record already carries (`extra=`, or set before a
    queue), else the running request's, else that of the request in which the logged exception was
    raised (servers log it after the request's end), else `default`.
    """

    def __init__(self, default: str = "-") -> None:
        super().__init__()
        self.default = default

    def filter(self, record: logging.LogRecord) -> bool:
        """Set the ID. Returns True."""
        carried = getattr(record, "request_id", None)
        if not (isinstance(carried, str) and carried):
            raised = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
            record.request_id = request_id() or request_id_of_error(raised) or self.default
        return True
