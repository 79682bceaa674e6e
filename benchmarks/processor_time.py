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
    spent = dict.fromkeys(names.values(), 0.0)
    for process_id, name in names.items():
        for thread in Path(f"/proc/{process_id}/task").iterdir():
            with suppress(FileNotFoundError):  # it has just ended
                spent[name] += int((thread / "schedstat").read_text().split()[0]) / 1e6
    return spent
