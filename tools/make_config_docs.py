"""Write docs/configuration.md from the docstrings of the configuration's sections.

python tools/make_config_docs.py            writes it
python tools/make_config_docs.py --check    exits 1 if it is not current
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from raypp.config.names import SECTIONS

PATH = Path(__file__).parents[1] / "docs" / "configuration.md"

_HEAD = """\
# Configuration

Written by `tools/make_config_docs.py` from the docstrings in `raypp/config/sections.py`; change it there.

A setting is given by its name alone, `LLM("tiny", num_stages=2)`; in a TOML file under its section,

```toml
[parallel]
num_stages = 2
```

read by `EngineConfig.from_toml("engine.toml")` and `raypp generate --config engine.toml`; or on the command line,
`--set parallel.num_stages=2`. The command line wins over the file. Unknown names are refused, and so are types that do
not fit: `"2"` is not a number.

The environment holds one variable: `RAYPP_LOG_LEVEL` (`DEBUG`, `INFO`, `WARNING`, `ERROR`, `CRITICAL`; default
`WARNING`). Other variables named `RAYPP_...` are ignored with a warning: Kubernetes sets some beside a Service of
that name.
"""


def render() -> str:
    """Return the page."""
    return _HEAD + "".join(_section(name) for name in SECTIONS)


def _section(name: str) -> str:
    cls = SECTIONS[name]
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
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(repr, get_args(annotation)))
    return inspect.formatannotation(annotation).replace("None", "none")


def _limit(item: object) -> str:
    symbols = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return " and ".join(f"{symbol} {getattr(item, name)}" for name, symbol in symbols.items() if hasattr(item, name))


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if the page is not current")
    if parser.parse_args().check:
        is_current = PATH.exists() and PATH.read_text(encoding="utf-8") == render()
        print(f"{PATH.name} is {'current' if is_current else 'not current: run python tools/make_config_docs.py'}")
        return 0 if is_current else 1
    PATH.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
