"""Write docs/configuration.md from the docstrings of the configuration's sections.

python tools/make_config_docs.py            writes it
python tools/make_config_docs.py --check    exits 1 if it is not current
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

from generated_pages import write_or_check
from pydantic.fields import FieldInfo

from raypp.config.http_settings import HttpAddress, HttpSettings
from raypp.config.names import SECTIONS
from raypp.config.options import VARIABLES
from raypp.config.other_engines import OF_LLAMA_CPP, OF_SGLANG, OF_VLLM
from raypp.config.sections import Section

PATH = Path(__file__).parents[1] / "docs" / "configuration.md"

_HEAD = """\
# Configuration

Written by `tools/make_config_docs.py` from the docstrings in `raypp/config/sections.py` and
`raypp/config/http_settings.py`; change it there.

A setting is given by its name alone, `LLM("tiny", num_stages=2)`; in a TOML file under its section (the server's,
[HTTP settings](#http-settings) and [address](#address), are in no file),

```toml
[parallel]
num_stages = 2
```

read by `EngineConfig.from_toml("engine.toml")` and `raypp generate --config engine.toml`; as an option of the `raypp`
command, `--num-stages 2`; or in its environment, `RAYPP_NUM_STAGES=2`. An option wins over its variable, and both win
over the file. Unknown names are refused, and so are types that do not fit: `"2"` is not a number in Python or TOML.

Options and variables are text. A switch is `--enable-prefix-caching` or `--no-enable-prefix-caching`, and `true` or
`false` in the environment. A list is `19,17`; an option that takes a list may be repeated. `none` means None. These
have other names, since their own would not say enough alone:

OTHER_NAMES

`RAYPP_LOG_LEVEL` is `DEBUG`, `INFO`, `WARNING` (the default), `ERROR` or `CRITICAL`. Variables named `RAYPP_...` that
raypp does not have are ignored with a warning: Kubernetes sets some beside a Service of that name.

`serve run` and `serve deploy`, Ray Serve's own commands, take the settings of the engine and of HTTP by their names
alone. The sections of the engine come first, those of the server last.
"""


def render() -> str:
    """Return the page."""
    others = [setting for setting in VARIABLES.values() if setting.option != "--" + setting.name.replace("_", "-")]
    rows = [f"| `{setting.key}` | `{setting.option}` | `{setting.variable}` |" for setting in others]
    head = _HEAD.replace("OTHER_NAMES", "\n".join(["| setting | option | variable |", "|---|---|---|", *rows]))
    sections = {**SECTIONS, "HTTP settings": HttpSettings, "address": HttpAddress}
    return head + "".join(_section(name, cls) for name, cls in sections.items()) + _other_engines()


def _other_engines() -> str:
    lines = ["\n## Names of other engines\n", "What errors say of these, too. Settings are written as options.\n"]
    options = {setting.key: setting.option for setting in VARIABLES.values()}
    for engine, names in (("vLLM", OF_VLLM), ("SGLang", OF_SGLANG), ("llama.cpp", OF_LLAMA_CPP)):
        lines += [f"| of {engine} | with raypp |", "|---|---|"]
        for name, own in names.items():
            option = None if own.setting is None else f"`{options[own.setting]}`"
            lines.append(f"| `--{name.replace('_', '-')}` | {own.text(option)} |")
        lines.append("")
    return "\n".join(lines)


def _section(name: str, cls: type[Section]) -> str:
    rows = [_row(field, info) for field, info in cls.model_fields.items()]
    return "\n".join(
        [f"\n## {name}\n", f"{cls.__doc__}\n", "| setting | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _row(name: str, info: FieldInfo) -> str:
    limits = [text for item in info.metadata if (text := _limit(item))]
    cells = [
        f"`{name}`",
        _type_name(info.annotation) + (f", {' and '.join(limits)}" if limits else ""),
        "required" if info.is_required() else "none" if info.default is None else f"`{json.dumps(info.default)}`",
        " ".join((info.description or "").split()),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type_name(annotation: object) -> str:
    members = get_args(annotation)
    if NoneType in members:
        return " | ".join([*(_type_name(member) for member in members if member is not NoneType), "none"])
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(repr, members))
    return inspect.formatannotation(annotation).replace("typing.", "")


def _limit(item: object) -> str:
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return " and ".join(f"{symbol} {getattr(item, name)}" for name, symbol in symbols.items() if hasattr(item, name))


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, {PATH: lambda _: render()}))
