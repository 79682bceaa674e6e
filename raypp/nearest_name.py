"""Which of the names there are was meant by one that is not among them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LEAST_LIKENESS = 0.7  # a wrong suggestion costs more than none
_MAX_CHARS = 100  # of a name: comparing takes longer than linear time, and clients choose the names of fields
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that another one is probably a misspelling or the beginning of; None if none is near.

    Capitals, hyphens and underscores do not count: `topP` is `top_p`.
    """
    if len(name) > _MAX_CHARS:
        return None
    plain, by_plain = _plain(name), {_plain(each): each for each in names}
    near = difflib.get_close_matches(plain, by_plain, n=1, cutoff=_LEAST_LIKENESS)
    begun = [each for each in by_plain if "_" in plain and each.startswith(f"{plain}_")]  # of one word, too many are
    found = near or begun
    return by_plain[found[0]] if found else None


def _plain(name: str) -> str:
    return _HUMP.sub("_", name).lower().replace("-", "_").strip("_")
