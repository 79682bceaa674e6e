"""The processor time of every process of an engine, and of its client."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def processor_ms(ids: dict[str, Any]) -> dict[str, float]:
    """Return the processor time that each process has taken so far, and the calling one, ms.

    Args:
        ids: What `LLM.processes` returns.
    """
    names = {os.getpid(): "client", ids["driver"]: "driver"}
    names |= {process_id: f"stage {index}" for index, process_id in enumerate(ids["stages"])}
    names |= {process_id: "grammar" for process_id in _grammar_processes(ids["driver"])}
    spent = dict.fromkeys([*names.values(), "grammar"], 0.0)
    for process_id, name in names.items():
        for thread in Path(f"/proc/{process_id}/task").iterdir():
            with suppress(FileNotFoundError):  # it has just ended
                spent[name] += int((thread / "schedstat").read_text().split()[0]) / 1e6
    return spent


def _grammar_processes(driver: int) -> list[int]:
    """Return the driver's child that follows grammars, if it was started."""
    children = Path(f"/proc/{driver}/task").glob("*/children")
    ids = [int(child) for of_thread in children for child in of_thread.read_text().split()]
    return [child for child in ids if b"raypp.grammar" in Path(f"/proc/{child}/cmdline").read_bytes()]
