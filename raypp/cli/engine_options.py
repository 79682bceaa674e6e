"""The options that say which engine: the same for every command."""

from __future__ import annotations

import argparse
import tomllib

from raypp.config.chat_template import read_chat_template
from raypp.config.engine_config import EngineConfig
from raypp.config.names import SECTION_OF_SETTING, SECTIONS, check_sections, section_of
from raypp.errors import ConfigError


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options from which `engine_config` makes a configuration."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="M", help="tiny, a directory, or a Hugging Face model id")
    group.add_argument("--revision", metavar="R", help="a branch, tag or commit of a Hugging Face model")
    group.add_argument("--chat-template", metavar="FILE", help="a chat template, in place of the model's own")
    group.add_argument("--tool-call-parser", metavar="NAME", help="how the model writes tool calls; auto by default")
    group.add_argument("--reasoning-parser", metavar="NAME", help="how the model writes thoughts; auto by default")
    group.add_argument("--num-stages", metavar="N", type=int, help="pipeline stages")
    group.add_argument("--speculative", metavar="METHOD", help="who proposes drafts: ngram, eagle, eagle3, auto")
    group.add_argument("--draft-model", metavar="M", help="the head of eagle, eagle3 and auto: a directory or an id")
    group.add_argument("--num-speculative-tokens", metavar="K", type=int, help="drafts per step; adaptive by default")
    group.add_argument("--config", metavar="FILE", help="a TOML file; its tables are the sections of the configuration")
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any other setting, e.g. cache.block_size=32; wins over the file; may be repeated",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the configuration that the options describe: the file's, then --set, then the options of their own.

    Raises:
        ConfigError: an unknown setting, or a value that cannot be.
    """
    settings: dict[str, object] = {}
    for text in args.set:
        _add_setting(settings, text)
    options = {
        "model": args.model,
        "revision": args.revision,
        "chat_template": None if args.chat_template is None else read_chat_template(args.chat_template),
        "tool_call_parser": args.tool_call_parser,
        "reasoning_parser": args.reasoning_parser,
        "num_stages": args.num_stages,
        "method": args.speculative,
        "num_speculative_tokens": args.num_speculative_tokens,
    }
    settings |= {name: value for name, value in options.items() if value is not None}
    if args.draft_model is not None:
        _add_to_section(settings, "speculative", "model", args.draft_model)
    if args.config is not None:
        return EngineConfig.from_toml(args.config, **settings)
    if "model" not in settings:
        raise ConfigError("no model is named", expected="--model M", hint="--model tiny ships with raypp")
    return EngineConfig.from_flat(**settings)  # type: ignore[arg-type]


def _add_setting(settings: dict[str, object], text: str) -> None:
    """Add `section.name=value`, `name=value` or `section={...}`; a value that is not TOML is text."""
    key, has_value, raw = text.partition("=")
    section, has_section, name = key.strip().rpartition(".")
    if not has_value or not name:
        raise ConfigError("--set does not have the form of a setting", got=text, expected="section.name=value")
    if has_section:
        check_sections({section: {name: None}})
    elif name not in SECTIONS:
        section_of(name)
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    if has_section and SECTION_OF_SETTING[name] != section:  # a name that another section has too
        _add_to_section(settings, section, name, value)
    else:
        settings[name] = value


def _add_to_section(settings: dict[str, object], section: str, name: str, value: object) -> None:
    whole = settings.setdefault(section, {})
    assert isinstance(whole, dict)
    whole[name] = value
