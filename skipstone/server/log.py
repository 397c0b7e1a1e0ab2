"""The server's log: one line an event, as key=value pairs or as JSON, on standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a record says, in the order of writing."""
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
    return fields | {name: value for name, value in vars(record).items() if name not in _STANDARD}


class PairsFormatter(logging.Formatter):
    """time=... level=... event=...; values with spaces or quotes are written as JSON strings."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, then the traceback if there is one."""
        line = " ".join(f"{name}={_value(value)}" for name, value in fields_of(record).items())
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """An object a line, the traceback as one of its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields = fields_of(record)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = isinstance(value, (int, float)) or (text.isprintable() and not any(sign in text for sign in ' "='))
    return text if plain and text else json.dumps(text, ensure_ascii=False)


def set_up(log_format: str) -> None:
    """Send the loggers of this program, and the HTTP library's warnings, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else PairsFormatter())
    for name, level in (("skipstone", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
