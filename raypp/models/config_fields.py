"""Reads a JSON object field by field, with errors that name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypp.errors import ModelLoadError


class ConfigFields:
    """One JSON object's entries, typed, with errors that name the file and the field."""

    def __init__(self, file: Path, values: Mapping[str, Any], path: str = "") -> None:
        """Take an object of a file; below a `path`, such as `rope_scaling.`, which errors put before a field's name."""
        self.file = file
        self.values = values
        self.path = path

    def error(self, name: str, got: object, expected: str, hint: str | None = None) -> ModelLoadError:
        """Return the error of a field."""
        return ModelLoadError(
            f"{self.file}: field {self.path + name!r} is not usable", got=got, expected=expected, hint=hint
        )

    def section(self, name: str) -> ConfigFields:
        """Return the fields of an object inside of this one."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "nothing" if value is None else repr(value), "an object")
        return ConfigFields(self.file, value)

    def get(self, name: str) -> Any:
        """Return the field, None when absent."""
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer of at least `least`; without a default the field must be there."""
        value = self.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            allowed = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self.error(name, "nothing" if value is None else repr(value), allowed)
        return value

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return a list of as many numbers as the default has."""
        value = self.get(name)
        if value is None:
            return default
        if (
            not isinstance(value, list)
            or len(value) != len(default)
            or any(isinstance(x, bool) or not isinstance(x, int | float) for x in value)
        ):
            raise self.error(name, repr(value), f"a list of {len(default)} numbers")
        return tuple(map(float, value))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number; without a default the field must be there."""
        value = self.get(name)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(name, "nothing" if value is None else repr(value), "a positive number")
        return float(value)

    def flag(self, name: bool | str) -> bool:
        """Return what a field says, False when absent; or what is given, when that is fixed."""
        if isinstance(name, bool):
            return name
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, repr(value), "true or false")
        return bool(value)


def read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ModelLoadError(
            f"{file.parent} is not a model directory",
            got=f"no {file.name}" if file.parent.is_dir() else "no such directory",
            expected="a directory in Hugging Face layout: config.json, *.safetensors, tokenizer files; or in Mistral's "
            "own form: params.json, consolidated*.safetensors, tekken.json",
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not JSON", got=str(error)) from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file} is not a JSON object", got=type(values).__name__)
    return values
