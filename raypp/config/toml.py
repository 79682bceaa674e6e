"""Writing TOML, which Python only reads: tables of plain values, which is all that a configuration is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping


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
