"""llm-comply, which checks answers against the official schemas, in its three formats. Run with the address of /v1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NUM_TRIES = 5
"""A toy model may write until the context ends in place of a call."""
WITHOUT_MODEL = "a request without a model is no error here: there is one model"
SUMMARY = "llm-comply asks models of OpenAI's and Anthropic's names alone for summaries of thoughts"
NOT_PASSED: dict[str, dict[str, str]] = {
    "open-responses": {"error-handling": WITHOUT_MODEL, "reasoning-summary": SUMMARY},
    "openai-chat": {"chat-error-handling": WITHOUT_MODEL, "chat-reasoning-summary": SUMMARY},
    "anthropic": {"anth-thinking-display": SUMMARY},
}
"""By format: the checks that fail or are skipped, and why."""
WARNED = {"compact-response"}  # the route is optional, and there is none here


def results(base_url: str, layout: str, *more: str) -> list[dict[str, Any]]:
    """Return what came of each check of a format."""
    command = [str(Path(sys.executable).with_name("llm-comply")), "--json", "--timeout", "120", "--format", layout]
    command += ["--base-url", base_url, "--api-key", "none", "--model", "tiny-vl", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return found


def check(base_url: str, layout: str) -> None:
    """Make all checks of a format; those that fail once more, a few times."""
    found = {result["id"]: result for result in results(base_url, layout)}
    for _ in range(NUM_TRIES - 1):
        failed = [name for name, result in found.items() if result["status"] == "failed"]
        if again := [name for name in failed if name not in NOT_PASSED[layout]]:
            found |= {result["id"]: result for result in results(base_url, layout, "--filter", ",".join(again))}
    not_passed = {name: result for name, result in found.items() if result["status"] != "passed"}
    warned = {name for name, result in found.items() if result.get("warnings")}
    assert not_passed.keys() - WARNED == NOT_PASSED[layout].keys(), not_passed
    assert warned <= WARNED, found


def main(base_url: str) -> None:
    for layout in NOT_PASSED:
        check(base_url, layout)


if __name__ == "__main__":
    main(sys.argv[1])
