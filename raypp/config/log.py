"""Where log lines of raypp go in a process of its own: a command, the driver, a replica."""

from __future__ import annotations

import logging
import re

from raypp.config.env import read_environment

_LOGGERS = ("raypp", "serve_app")
_LINE = re.compile(rf"\d{{4}}-\d\d-\d\d [\d:,]+ [A-Z]+ (?:{'|'.join(_LOGGERS)})[.:]")


def log_to_stderr() -> None:
    """Write what raypp and its server log, from the level of RAYPP_LOG_LEVEL on, to stderr."""
    level = read_environment().log_level
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)


def is_log_line(line: str) -> bool:
    """Return whether a line is one that `log_to_stderr` has written, in whatever process."""
    return _LINE.match(line) is not None
