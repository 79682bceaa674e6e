"""Where log lines of raypp go in a process of its own: a command, the driver."""

from __future__ import annotations

import logging

from raypp.config.env import read_environment


def log_to_stderr() -> None:
    """Write what is logged under "raypp", from the level of RAYPP_LOG_LEVEL on, to stderr."""
    logger = logging.getLogger("raypp")
    logger.setLevel(read_environment().log_level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
