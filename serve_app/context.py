"""What the routes share: one engine, and the parts of the app around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from raypp.api.async_llm import AsyncLLM
from raypp.config.http_settings import HttpSettings
from raypp.openai_api.body_preparer import BodyPreparer
from serve_app.error_answers import UnknownModelError
from serve_app.live import LiveFeed
from serve_app.metrics import EngineMetrics
from serve_app.runner import Admission, RequestRunner

Question = Literal["exposition", "load", "reset_prefix_cache"]
"""What a replica asks of all: see `OwnAnswers`."""


class Siblings(Protocol):
    """The replicas behind the same address, this one included."""

    async def ask(self, question: Question) -> list[Any]:
        """Return every replica's answer."""


@dataclass(frozen=True)
class AppContext:
    """One engine, and what the routes need to serve it."""

    llm: AsyncLLM
    settings: HttpSettings
    metrics: EngineMetrics
    admission: Admission
    runner: RequestRunner
    preparer: BodyPreparer
    live: LiveFeed
    siblings: Siblings
    model_names: tuple[str, ...]
    takes_images: bool = False
    created_s: int = field(default=0)  # when the engine was started, seconds since the epoch

    @property
    def model_name(self) -> str:
        """The model's name in answers."""
        return self.model_names[0]

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request, prompt and output together."""
        return int(self.llm.model_info["max_model_len"])

    def check_model(self, name: str | None) -> None:
        """Accept the model's names, and none.

        Raises:
            UnknownModelError: another name.
        """
        if name is not None and name not in self.model_names:
            raise UnknownModelError(name, self.model_names)
