"""How settings are written where there is only text: options of the command line, variables of the environment.

    max_model_len  ->  --max-model-len 8192  ->  RAYPP_MAX_MODEL_LEN=8192

Arguments of an application that Ray Serve starts are text, too. A text becomes a value of its setting's type. A text
that spells no such value stays as it is: validation then says what is expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.config.names import SECTIONS

_VARIABLE_PREFIX = "RAYPP_"
_OTHER_NAMES = {
    ("model", "seed"): "engine_seed",  # a request's is --seed
    ("speculative", "method"): "speculative",
    ("speculative", "model"): "draft_model",
    ("graphs", "mode"): "graphs",
}
"""Options of another name than the setting's: alone, it would not say enough."""
_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """A setting, and what it is called outside of Python."""

    section: str
    name: str
    field: FieldInfo

    @property
    def key(self) -> str:
        """Its name among all settings."""
        return f"{self.section}.{self.name}"

    @property
    def option(self) -> str:
        """Its option of the command line."""
        return "--" + self._written.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its variable of the environment."""
        return _VARIABLE_PREFIX + self._written.upper()

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value may have."""
        return _kinds(self.field.annotation)

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false."""
        return bool in self.kinds

    @property
    def is_list(self) -> bool:
        """Whether it may have several values."""
        return any(get_origin(kind) is list for kind in self.kinds)

    def value_of(self, text: str) -> object:
        """Return the value that a text spells; a text that spells none, unchanged."""
        return value_of(text, self.field.annotation)

    @property
    def _written(self) -> str:
        return _OTHER_NAMES.get((self.section, self.name), self.name)


def _settings_of(section: str, fields: Mapping[str, FieldInfo]) -> tuple[Setting, ...]:
    return tuple(Setting(section, name, field) for name, field in fields.items())


ENGINE_SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    section: _settings_of(section, cls.model_fields) for section, cls in SECTIONS.items()
}
"""By section."""
HTTP_SETTINGS = _settings_of("http", HttpSettings.model_fields)
ADDRESS_SETTINGS = _settings_of("address", HttpAddress.model_fields)
VARIABLES: Mapping[str, Setting] = {
    setting.variable: setting
    for settings in (*ENGINE_SETTINGS.values(), HTTP_SETTINGS, ADDRESS_SETTINGS)
    for setting in settings
}
"""All settings by their variables of the environment."""


def value_of(text: str, annotation: Any) -> object:
    """Return the value of a type that a text spells; a text that spells none, unchanged.

    `none` is None where that is allowed. A list is written as `1,2` or in JSON, a mapping in JSON.
    """
    kinds = _kinds(annotation)
    if NoneType in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        of_kind = _READERS.get(get_origin(kind) or kind)
        if of_kind is not None:
            try:
                return of_kind(text, kind)
            except (KeyError, ValueError):
                return text
    return text


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; of any other type itself."""
    members = get_args(annotation)
    return members if NoneType in members else (annotation,)


def _list_of(text: str, kind: Any) -> object:
    if text.lstrip().startswith("["):
        return json.loads(text)
    [of_entries] = get_args(kind)
    return [value_of(entry.strip(), of_entries) for entry in text.split(",") if entry.strip()]


_READERS: Mapping[Any, Callable[[str, Any], object]] = {
    bool: lambda text, _: _TRUTHS[text.lower()],
    int: lambda text, _: int(text),
    float: lambda text, _: float(text),
    list: _list_of,
    dict: lambda text, _: json.loads(text),
}
