"""Which of the names there are was meant by one that is not among them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LEAST_LIKENESS = 0.7  # a wrong suggestion costs more than none
_MAX_CHARS = 100  # of a name: comparing takes longer than linear time, and clients choose the names of fields
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that another one is probably a misspelling of; None if none is near.

    Capitals, hyphens and underscores do not count: `topP` is `top_p`.
    """
    if len(name) > _MAX_CHARS:
        return None
    by_plain = {_plain(each): each for each in names}
    found = difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=_LEAST_LIKENESS)
    return by_plain[found[0]] if found else None


def _plain(name: str) -> str:
    return _HUMP.sub("_", name).lower().replace("-", "_").strip("_")
