"""The operator's log on stderr: text for people, or one JSON object per line for a log store."""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys

from ddpjob_operator.failures.redaction import clean, mask

_ABOUT = ("job", "attempt", "pod")


def set_up_log(level: str, log_format: str) -> None:
    """Set up logging for the whole process. log_format: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else Lines("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    if level != "DEBUG":
        for noisy in ("kopf", "asyncio", "aiohttp.access"):
            logging.getLogger(noisy).setLevel(logging.WARNING)


class Lines(logging.Formatter):
    """Text lines, safe to show in a terminal: messages quote texts of users and servers."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record without control characters and credentials."""
        return mask(clean(super().format(record)))


class JsonLines(logging.Formatter):
    """Lines of {"ts", "level", "logger", "msg"}; decisions add "job" (namespace/name), "attempt" and "pod", exceptions
    "stack".
    """

    def format(self, record: logging.LogRecord) -> str:
        at = dt.datetime.fromtimestamp(record.created, dt.timezone.utc)
        line: dict[str, object] = {
            "ts": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": mask(clean(record.getMessage())),
        }
        line |= {name: record.__dict__[name] for name in _ABOUT if name in record.__dict__}
        if record.exc_info:
            line["stack"] = mask(clean(self.formatException(record.exc_info)))
        return json.dumps(line, ensure_ascii=False, default=str)
