"""The engine's configuration: one frozen object, composed of sections.

    LLM(model, num_stages=2, ...)  --from_flat-->  EngineConfig  <--from_toml--  [parallel] num_stages = 2

A setting has one name in all sections together, so that it can be given flat; but `model`, which flat is the engine's
own, is a draft head's within the section `speculative`. Everything goes through JSON: strict
validation of Python values would refuse what TOML and tuples mean as lists.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

from pydantic import Field, ValidationError, model_validator

from raypp.config.names import SECTION_OF_SETTING, SECTIONS, check_sections, section_of
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
from raypp.errors import ConfigError, page

_MAX_DRAFTS = 16
_FIXED_SECTIONS = ("model", "images", "observability", "faults")
_FIXED_SETTINGS = {
    "cache": ("kv_cache_dtype",),
    "scheduler": ("max_waiting_bytes",),
    "encoder": ("max_waiting_pixel_bytes",),
}
"""The model and what it is multiplied in decide texts; the others are settings of the client, which stays."""


class EngineConfig(Section):
    """Everything that can be set about an engine."""

    model: ModelSection
    cache: CacheSection = Field(default_factory=CacheSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    scheduler: SchedulerSection = Field(default_factory=SchedulerSection)
    speculative: SpeculativeSection = Field(default_factory=SpeculativeSection)
    graphs: GraphsSection = Field(default_factory=GraphsSection)
    images: ImagesSection = Field(default_factory=ImagesSection)
    encoder: EncoderSection = Field(default_factory=EncoderSection)
    observability: ObservabilitySection = Field(default_factory=ObservabilitySection)
    faults: FaultsSection = Field(default_factory=FaultsSection)

    @classmethod
    def from_flat(cls, model: str | os.PathLike[str], **settings: object) -> EngineConfig:
        """Return the configuration for a model and settings given by their names alone.

        Raises:
            ConfigError: an unknown name (the nearest valid one is said), or a value that cannot be.
        """
        return cls.from_sections(_by_section({"model": model, **settings}))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], **settings: object) -> EngineConfig:
        """Return the configuration in a TOML file whose tables are the sections; flat settings win over the file.

        Raises:
            ConfigError: not a readable TOML file, an unknown name, or a value that cannot be.
        """
        try:
            with Path(path).open("rb") as file:
                sections = tomllib.load(file)
        except OSError as error:
            raise ConfigError(
                "the configuration file cannot be read",
                got=error,
                expected="a TOML file that this user may read",
                hint="a relative path counts from the folder in which raypp runs",
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{os.fspath(path)} is not valid TOML",
                got=error,
                expected="tables such as [parallel], and lines such as num_stages = 2 below them",
                hint=f'text is in quotes, as in model = "tiny"; {page("configuration")} shows a file',
            ) from error
        check_sections(sections)
        for section, values in _by_section(settings).items():
            sections.setdefault(section, {}).update(values)
        return cls.from_sections(sections)

    def with_settings(self, **settings: object) -> EngineConfig:
        """Return a copy with some settings, given flat, replaced.

        Raises:
            ConfigError: as `from_flat`.
        """
        sections = self.model_dump(exclude_unset=True)
        for section, values in _by_section(settings).items():
            sections.setdefault(section, {}).update(values)
        return self.from_sections(sections)

    def to_toml(self) -> str:
        """Return what was set, as TOML that `from_toml` reads back; other settings keep following their defaults."""
        return to_toml(self.model_dump(exclude_unset=True, exclude_none=True))

    def to_json(self) -> str:
        """Return the configuration as one JSON object of sections."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_sections(cls, sections: Mapping[str, Mapping[str, object]]) -> EngineConfig:
        """Return the configuration of settings by section, named as the sections have them.

        Raises:
            ConfigError: as `from_flat`.
        """
        if "model" not in sections.get("model", {}):
            raise ConfigError("no model is named", expected="model.model", hint='e.g. "tiny", which ships with raypp')
        try:
            return cls.model_validate_json(json.dumps(sections, default=_plain))
        except ValidationError as error:
            _raise_config_error(error)

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        parallel, scheduler = self.parallel, self.scheduler
        partition = parallel.layer_partition
        if partition is not None and (len(partition) != parallel.num_stages or min(partition, default=0) < 1):
            raise ConfigError(
                "parallel.layer_partition does not fit parallel.num_stages",
                got=f"{partition} for {parallel.num_stages} stages",
                expected="one number of layers, at least 1, per stage",
                hint=f"num_stages = {len(partition)}" if partition and min(partition) >= 1 else None,
            )
        if parallel.transport == "local" and parallel.num_stages > 1:
            raise ConfigError(
                "parallel.transport local works with one stage only",
                got=f"{parallel.num_stages} stages",
                expected="num_stages = 1",
                hint="leave transport at auto",
            )
        max_rows = -(-scheduler.max_num_seqs // parallel.num_stages)
        if scheduler.max_num_batched_tokens < max_rows:
            raise ConfigError(
                "scheduler.max_num_batched_tokens is too small for a full step",
                got=scheduler.max_num_batched_tokens,
                expected=f"at least {max_rows}, for max_num_seqs = {scheduler.max_num_seqs} "
                f"over {parallel.num_stages} stages",
                hint="lower max_num_seqs or raise max_num_batched_tokens",
            )
        if self.cache.cpu_kv_bytes and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "cache.cpu_kv_bytes has no effect without prefix caching, which finds the blocks again",
                got=f"cpu_kv_bytes {self.cache.cpu_kv_bytes}, enable_prefix_caching false",
                expected="cpu_kv_bytes = 0, or enable_prefix_caching = true",
            )
        _check_speculative(self.speculative)
        budgets = self.encoder.token_budgets
        if budgets is not None and (not budgets or min(budgets) < 1):
            raise ConfigError(
                "invalid value for encoder.token_budgets",
                got=budgets,
                expected="positive numbers of tokens, at least one, or none",
            )
        return self


def _check_speculative(given: SpeculativeSection) -> None:
    unsaid = dict(SpeculativeSection())
    if given.method is None and dict(given) != unsaid:
        raise ConfigError(
            "speculative settings without a method",
            got=f"{', '.join(name for name, value in given if value != unsaid[name])}; method is none",
            expected="a method",
            hint='speculative.method = "ngram"; with a draft head\'s model, "auto"',
        )
    needs_model = given.method in ("eagle", "eagle3")
    if needs_model and given.model is None:
        raise ConfigError(
            "speculative.model is required for this method",
            got=f"speculative.method {given.method}, speculative.model {given.model}",
            expected="a head's directory or id",
            hint='speculative={"method": "eagle3", "model": "tiny-eagle3"}, for the model tiny',
        )
    if given.model is not None and not needs_model and given.method != "auto":
        raise ConfigError(
            "speculative.model has no effect with this method",
            got=f"speculative.method {given.method}, speculative.model {given.model}",
            expected="a method that drafts by a head of its own: eagle, eagle3, auto",
        )
    if given.head_weights != "auto" and not given.uses_head:
        raise ConfigError(
            "speculative.head_weights has no effect with this method",
            got=f"speculative.method {given.method}, speculative.head_weights {given.head_weights}",
            expected="a method that drafts by a head: eagle, eagle3, mtp, auto",
        )
    if given.min_n > given.max_n:
        raise ConfigError(
            "speculative.min_n is more than max_n", got=f"{given.min_n} and {given.max_n}", expected="min_n <= max_n"
        )
    ladder = given.draft_ladder
    if ladder is not None and (ladder != sorted(set(ladder)) or ladder[0] < 0 or not 1 <= ladder[-1] <= _MAX_DRAFTS):
        raise ConfigError(
            "invalid value for speculative.draft_ladder",
            got=ladder,
            expected=f"ascending numbers of drafts from 0 to {_MAX_DRAFTS}, at least one above 0",
        )


def _by_section(settings: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return settings by section. They are given flat, or as a whole section: `speculative={"method": "ngram"}`."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in settings.items():
        if name in SECTIONS and isinstance(value, Mapping):
            check_sections({name: value})
            sections.setdefault(name, {}).update(value)
        elif name not in SECTIONS or name in SECTION_OF_SETTING:
            sections.setdefault(section_of(name), {})[name] = value
        elif value is not None:
            raise ConfigError(f"{name} is a section", got=repr(value), expected="a dict of its settings")
    return sections


def _plain(value: object) -> object:
    """Return what JSON can hold of a value that it does not know."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ConfigError(
        "a setting has a value of an unsupported type",
        got=f"{value!r} ({type(value).__name__})",
        expected="numbers, text, true or false, lists of these, or None",
    )


def _raise_config_error(error: ValidationError) -> NoReturn:
    """Raise the first complaint of pydantic as ours, naming the other settings at fault."""
    complaints = error.errors(include_url=False)
    first = complaints[0]
    where = ".".join(str(part) for part in first["loc"])
    others = sorted({".".join(str(part) for part in c["loc"]) for c in complaints[1:]} - {where})
    section, name = str(first["loc"][0]), str(first["loc"][1]) if len(first["loc"]) > 1 else ""
    field: Any = SECTIONS[section].model_fields.get(name)
    found = ConfigError(
        f"invalid value for {where}" + (f" (and for {', '.join(others)})" if others else ""),
        got=repr(first["input"]),
        expected=first["msg"].removeprefix("Input should be ").removeprefix("a valid "),
        hint=f"{name}: {field.description}" if field is not None and field.description else None,
    )
    found.setting = where
    raise found from error


def to_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Return tables of numbers, text, booleans, lists and mappings of these as TOML; empty tables are left out."""
    blocks = (
        "\n".join([f"[{table}]", *(f"{name} = {_value(value)}" for name, value in values.items())])
        for table, values in tables.items()
        if values
    )
    return "\n\n".join(blocks) + "\n"


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        entries = (f"{_value(name)} = {_value(entry)}" for name, entry in value.items() if entry is not None)
        return f"{{ {', '.join(entries)} }}"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # inf, -inf and nan are spelled alike
    return json.dumps(value)


def changed_settings(before: EngineConfig, after: EngineConfig) -> dict[str, tuple[Any, Any]]:
    """Return what differs: `section.setting` with both values."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    return {
        f"{section}.{name}": (value, new[section][name])
        for section, values in old.items()
        for name, value in values.items()
        if value != new[section][name]
    }


def check_change(before: EngineConfig, after: EngineConfig) -> None:
    """Refuse changes under which requests could not go on as they began.

    Raises:
        ConfigError: it names the settings.
    """
    refused = {}
    for name, values in changed_settings(before, after).items():
        section, setting = name.split(".")
        if section in _FIXED_SECTIONS or setting in _FIXED_SETTINGS.get(section, ()):
            refused[name] = values
    if refused:
        raise ConfigError(
            "these settings cannot change while requests run",
            got=", ".join(f"{name}: {old!r} to {new!r}" for name, (old, new) in refused.items()),
            expected="others: of stages, layers and links, KV blocks, graphs, speculation, encoders, rows and tokens",
            hint="start a new engine",
        )
