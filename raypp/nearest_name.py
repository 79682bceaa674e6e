"""Which of the names there are was meant by one that is not among them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from raypp.errors import RequestError

T = TypeVar("T")

_LEAST_LIKENESS = 0.7  # a wrong suggestion costs more than none
_MAX_CHARS = 100  # of a name: comparing takes longer than linear time, and clients choose the names of fields
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def nearest_name(name: str, names: Iterable[str], least_likeness: float = _LEAST_LIKENESS) -> str | None:
    """Return the name that another one is probably a misspelling or the beginning of; None if none is near.

    Capitals, hyphens and underscores do not count: `topP` is `top_p`.

    Args:
        name: The other one.
        names: Those that there are.
        least_likeness: What a misspelling has in common with what was meant, 0 to 1.
    """
    if len(name) > _MAX_CHARS:
        return None
    plain, by_plain = _plain(name), {_plain(each): each for each in names}
    near = difflib.get_close_matches(plain, by_plain, n=1, cutoff=least_likeness)
    begun = [each for each in by_plain if "_" in plain and each.startswith(f"{plain}_")]  # of one word, too many are
    found = near or begun
    return by_plain[found[0]] if found else None


def refusing_unknown(cls: type[T]) -> type[T]:
    """Let a dataclass of parameters raise RequestError for a name that it does not have, with the nearest one."""
    init: Callable[..., None] = cls.__init__
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        for name in given.keys() - names:
            nearest = nearest_name(name, names)
            raise RequestError(
                f"there is no {cls.__name__}.{name}",
                got=f"{name}={repr(given[name])[:80]}",
                expected="one of " + ", ".join(names) if nearest is None else f"did you mean {nearest}?",
                param=name,
            )
        init(self, *args, **given)

    setattr(cls, "__init__", checked)  # noqa: B010 - an assignment would be another class's to mypy
    return cls


def _plain(name: str) -> str:
    return _HUMP.sub("_", name).lower().replace("-", "_").strip("_")
