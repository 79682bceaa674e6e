"""The names of sections and settings, and what to say about one that does not exist."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.config.other_engines import OF_OTHER_ENGINES
from raypp.config.sections import (
    CacheSection,
    EncoderSection,
    FaultsSection,
    GraphsSection,
    ImagesSection,
    ModelSection,
    ObservabilitySection,
    ParallelSection,
    SchedulerSection,
    Section,
    SpeculativeSection,
)
from raypp.errors import ConfigError, nearest_name, page

SECTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {
        "model": ModelSection,
        "cache": CacheSection,
        "parallel": ParallelSection,
        "scheduler": SchedulerSection,
        "speculative": SpeculativeSection,
        "graphs": GraphsSection,
        "images": ImagesSection,
        "encoder": EncoderSection,
        "observability": ObservabilitySection,
        "faults": FaultsSection,
    }
)

SECTION_OF_SETTING: Mapping[str, str] = MappingProxyType(
    # Where two sections have a name, it is the first one's: `model` alone is the engine's.
    {name: section for section, cls in reversed(list(SECTIONS.items())) for name in cls.model_fields}
)


OF_THE_SERVER = HttpSettings.model_fields | HttpAddress.model_fields

_TABLES = {name: f" under [{section}]" for name, section in SECTION_OF_SETTING.items()}
_PLACES = {name: f" (section {section})" for name, section in SECTION_OF_SETTING.items()}


def section_of(name: str) -> str:
    """Return the section of a setting given by its name alone.

    Raises:
        ConfigError: there is no such setting; the nearest one is named.
    """
    try:
        return SECTION_OF_SETTING[name]
    except KeyError:
        raise unknown_name("setting", name, _PLACES) from None


def check_sections(sections: Mapping[str, object]) -> None:
    """Refuse tables and settings that do not exist.

    Raises:
        ConfigError: the first of them, with the nearest valid name.
    """
    for section, values in sections.items():
        if section in SECTION_OF_SETTING and not isinstance(values, Mapping):
            raise ConfigError(
                f"the setting {section} is outside of its table",
                got=f"{section} at the top level",
                expected=f"{section} under [{SECTION_OF_SETTING[section]}]",
            )
        if section not in SECTIONS:
            if isinstance(values, Mapping):
                raise unknown_name("section", section, dict.fromkeys(SECTIONS, ""))
            raise unknown_name("setting", section, _TABLES)  # what is no table is rather a setting
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section} is a section", got=repr(values), expected=f"a table [{section}]")
        for name in values:
            if name not in SECTIONS[section].model_fields:
                raise unknown_name(f"setting in [{section}]", name, _PLACES)


def unknown_name(kind: str, name: str, valid: Mapping[str, str]) -> ConfigError:
    """Return the error for a name that does not exist.

    Args:
        kind: What it should have been the name of.
        name: What was given.
        valid: The names there are, and what to say after each about where it belongs.
    """
    if name in OF_THE_SERVER:
        return ConfigError(
            f"there is no {kind} of this name",
            got=name,
            expected=f"one that belongs here: {page('configuration')} lists them",
            hint=f"it is an option of the server: raypp serve --{name.replace('_', '-')}",
        )
    if (own := OF_OTHER_ENGINES.get(name)) is not None:
        section, _, setting = (own.setting or "").partition(".")
        place = "raypp serve" if section == "http" else f"section {section}"
        return ConfigError(
            f"there is no {kind} of this name",
            got=name,
            expected=f"a name that {page('configuration')} lists",
            hint=own.text(None if own.setting is None else f"{setting} of {place}"),
        )
    best = nearest_name(name, valid)
    if best is None:
        return ConfigError(f"there is no {kind} of this name", got=name, expected="one of " + ", ".join(sorted(valid)))
    hint = f"did you mean {best}?" if best != name else "it exists, but elsewhere"
    return ConfigError(f"there is no {kind} of this name", got=name, expected=f"{best}{valid[best]}", hint=hint)
