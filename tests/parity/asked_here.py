"""What a start asks transformers in a process of its own, asked in this one: another takes seconds to start."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from raypp.models import config as config_module
from raypp.models.transformers_probe import answer


def ask_here(patch: pytest.MonkeyPatch) -> None:
    """Let starts ask in this process."""
    patch.setattr(config_module, "asked", lambda _, path, *given, **options: answer_of(path, *given, **options))


def answer_of(path: Path, num_members: str = "1", *, trusts_code: bool = False) -> dict[str, Any]:
    """Return the answer about a model that does not change: it is asked once, though each start asks."""
    return _answer(path, num_members, trusts_code)


@cache
def _answer(path: Path, num_members: str, trusts_code: bool) -> dict[str, Any]:
    return answer(path, num_members, trusts_code=trusts_code)
