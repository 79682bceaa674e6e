"""What tests run on the first node of a bed: one engine, told what to do by lines of JSON, and answering in such.

{"do": "start", "engine": {...}, "fake_ms": 2}      {} or, as any task, {"error": ..., "kind": ...}
{"do": "generate", "max_tokens": 24}                {"token_ids": [[...], ...]}
{"do": "submit", ...}, later {"do": "collect"}      the same, and something may happen between
{"do": "look"}, {"do": "close"}                     {"stats": {...}}, as all answers; {}
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raypp import LLM, SamplingParams
from raypp.errors import RayppError
from raypp.testing.fake_stage import FakeModel

PROMPTS = ["def main(", "import "]


@dataclass(frozen=True)
class CheckedStage:
    """A fake stage that starts only where an environment variable of its node's process has the value that it must."""

    step_ms: float
    variables: dict[str, str]

    def __call__(self, spec: Any, config: Any) -> FakeModel:
        """Return the model of one stage."""
        found = {name: os.environ.get(name) for name in self.variables}
        assert found == self.variables, found
        return FakeModel(self.step_ms / 1e3, config.vocab_size)


def main() -> None:
    """Answer until the input ends."""
    llm: LLM | None = None
    with ThreadPoolExecutor(1) as pool:
        pending: Any = None
        for line in sys.stdin:
            task = json.loads(line)
            begun, answer = time.monotonic(), {}
            try:
                if task["do"] == "start":
                    settings = dict(task["engine"])
                    if "fake_ms" in task:
                        settings["stage_factory"] = CheckedStage(task["fake_ms"], task.get("variables", {}))
                        settings["skip_tokenizer_init"] = True
                    llm = LLM(**{"model": "tiny", **settings})
                elif task["do"] == "close":
                    assert llm is not None
                    llm.close()
                else:
                    assert llm is not None
                    if task["do"] in ("generate", "submit"):
                        params = SamplingParams(max_tokens=task["max_tokens"], temperature=0.0, ignore_eos=True)
                        prompts: Any = task.get("prompts", PROMPTS)
                        pending = pool.submit(llm.generate, prompts, params)
                    if task["do"] in ("generate", "collect"):
                        answer = {"token_ids": [output.outputs[0].token_ids for output in pending.result()]}
                answer["stats"] = llm.stats() if llm is not None and task["do"] != "close" else {}
            except RayppError as error:
                answer = {"error": str(error), "kind": type(error).__name__}
            answer["seconds"] = time.monotonic() - begun
            print(json.dumps(answer, default=str), flush=True)
    if llm is not None:
        llm.close()


if __name__ == "__main__":
    main()
