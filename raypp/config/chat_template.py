"""The chat template that replaces a model's own: a file, or the template itself."""

from __future__ import annotations

from pathlib import Path

from raypp.errors import ConfigError

_MARKS = ("{{", "{%")


def read_chat_template(given: str) -> str:
    """Return the template, in Jinja.

    Args:
        given: The template, which can be told by its braces, or the path of a file with one.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    if any(mark in given for mark in _MARKS):
        return given
    try:
        return Path(given).expanduser().read_text()
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, or a path that cannot be one
        raise ConfigError(
            "the chat template cannot be read",
            got=f"{given[:200]!r}: {type(error).__name__}",
            expected="a file with a template in Jinja, or the template itself",
            hint="the model's own is beside it, as chat_template.jinja or in tokenizer_config.json: begin with a copy",
        ) from error
