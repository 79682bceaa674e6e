"""The options that say which engine: the same for every command, one for each setting."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal, get_args, get_origin

from raypp.config.chat_template import read_chat_template
from raypp.config.engine_config import EngineConfig
from raypp.config.env import read_environment
from raypp.config.names import SECTIONS
from raypp.config.options import ENGINE_SETTINGS, Setting
from raypp.errors import ConfigError

_MODEL = "model.model"
_MOST_USED = (
    "parallel.num_stages",
    "model.max_model_len",
    "scheduler.max_num_seqs",
    "cache.gpu_memory_utilization",
    "cache.kv_cache_dtype",
    "model.quantization",
    "speculative.method",
    "parallel.device",
)
"""Settings that `--help` shows before all others."""
_SETTINGS = {setting.key: setting for setting in chain.from_iterable(ENGINE_SETTINGS.values())}
"""By `section.name`."""
_METAVARS = {
    int: "N",
    float: "X",
    list[int]: "N,N",
    list[str]: "TEXT",
    dict[str, float]: "JSON",
    dict[str, Any]: "JSON",
}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the model and the options from which `engine_config` makes a configuration."""
    parser.usage = f"{parser.prog} MODEL [options]"
    parser.epilog = (
        "Each setting is also a variable of the environment: --max-model-len is RAYPP_MAX_MODEL_LEN. An option "
        "wins over its variable, and both win over the file."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="tiny, a directory, or a Hugging Face model id")
    parser.add_argument("--config", metavar="FILE", help="a TOML file whose tables are sections of settings")
    add_setting_options(parser.add_argument_group("most used settings"), map(_SETTINGS.__getitem__, _MOST_USED))
    for section, settings in ENGINE_SETTINGS.items():
        group = parser.add_argument_group(f"{section} settings", SECTIONS[section].__doc__)
        add_setting_options(group, (setting for setting in settings if setting.key not in (_MODEL, *_MOST_USED)))


def add_setting_options(group: argparse._ArgumentGroup, settings: Iterable[Setting]) -> None:
    """Add an option for each setting, with the setting's own documentation."""
    for setting in settings:
        about = f"{setting.field.description} (default: {_default(setting)})".replace("%", "%%")
        if setting.is_switch:
            group.add_argument(setting.option, dest=setting.key, action=argparse.BooleanOptionalAction, help=about)
        else:
            group.add_argument(
                setting.option,
                dest=setting.key,
                metavar=_metavar(setting),
                action="append" if setting.is_list else "store",
                help=about,
            )


def given_settings(args: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, object]:
    """Return the values of those settings that an option gives, or else a variable of the environment, by name."""
    variables = read_environment().settings
    given = dict[str, object]()
    for setting in settings:
        texts = getattr(args, setting.key, None)
        if texts is None:
            texts = variables.get(setting.variable)
        if texts is None:
            continue
        if not isinstance(texts, list):
            given[setting.name] = texts if isinstance(texts, bool) else setting.value_of(texts)
        else:
            values = [setting.value_of(text) for text in texts]
            lists = [value for value in values if isinstance(value, list)]
            given[setting.name] = list(chain(*lists)) if len(lists) == len(values) else values[-1]
    return given


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the configuration: the file's, then what the environment says, then the options.

    Raises:
        ConfigError: an unknown setting, or a value that cannot be.
    """
    try:
        return _engine_config(args)
    except ConfigError as error:
        if (source := _source(args, error.setting)) is not None:
            error.got = f"{error.got}, from {source}"
        said = f"{error.message} {error.expected or ''} {error.hint or ''}"
        options = [f"{key} is {setting.option}" for key, setting in _SETTINGS.items() if key in said.split()]
        error.hint = "; ".join(filter(None, (error.hint, *options))) or None
        raise


def _source(args: argparse.Namespace, key: str | None) -> str | None:
    """Return what gave a setting its value: an option, a variable or a file."""
    # Of what is in a list or a mapping, the setting is the first two parts.
    if (setting := _SETTINGS.get(".".join((key or "").split(".")[:2]))) is None:
        return None
    if getattr(args, setting.key, None) is not None:
        return setting.option
    if setting.variable in read_environment().settings:
        return setting.variable
    return None if args.config is None else f"[{setting.section}] of {args.config}"


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    sections = {section: given_settings(args, settings) for section, settings in ENGINE_SETTINGS.items()}
    of_model = sections["model"]
    if args.model is not None:
        of_model["model"] = args.model
    if isinstance(template := of_model.get("chat_template"), str):
        of_model["chat_template"] = read_chat_template(template)
    if args.config is not None:
        return EngineConfig.from_toml(args.config, **sections)
    if "model" not in of_model:
        raise ConfigError("no model is named", expected="raypp COMMAND MODEL", hint="the model tiny comes with raypp")
    return EngineConfig.from_sections(sections)


def _metavar(setting: Setting) -> str:
    """Return what stands for the value in `--help`: what there is to choose from, or the kind of value."""
    for kind in setting.kinds:
        if get_origin(kind) is Literal:
            return "{" + ",".join(get_args(kind)) + "}"
    return next((_METAVARS[kind] for kind in setting.kinds if kind in _METAVARS), "TEXT")


def _default(setting: Setting) -> str:
    default = setting.field.get_default(call_default_factory=True)
    if isinstance(default, list):
        return ",".join(map(str, default)) or "none"
    return "none" if default in (None, {}) else str(default).lower() if isinstance(default, bool) else str(default)
