"""The chat template that replaces a model's own: a file, or the template itself."""

from __future__ import annotations

from pathlib import Path

from raypp.errors import ConfigError

_MARKS = ("{{", "{%")
_HINT = "the model's own is beside it, as chat_template.jinja or in tokenizer_config.json: begin with a copy"


def read_chat_template(given: str) -> str:
    """Return the template, in Jinja.

    Args:
        given: The template itself if there is a `{{` or a `{%` in it, else the path of a file with one.

    Raises:
        ConfigError: there is no such file, it cannot be read, or holds no template.
    """
    if _is_template(given):
        return given
    try:
        text = Path(given).expanduser().read_text()
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, or a path that cannot be one
        raise ConfigError(
            "the chat template cannot be read",
            got=f"{given[:200]!r}: {type(error).__name__}",
            expected="a file with a template in Jinja, or the template itself",
            hint=_HINT,
        ) from error
    if not _is_template(text):
        raise ConfigError(
            "the file of the chat template holds none",
            got=f"{given[:200]!r}: {repr(text[:80]) if text.strip() else 'nothing'}",
            expected="a template in Jinja, which writes the messages: {{ or {% is in it",
            hint=_HINT,
        )
    return text


def _is_template(text: str) -> bool:
    return any(mark in text for mark in _MARKS)
