"""What a job needs of an engine; `AsyncLLM` is one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from raypp.api.picture_prompts import EncodedPrompt
from raypp.api.tokenizer import Tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.pictures.reader import PictureReader
from raypp.types import Prompt, RequestOutput, SamplingParams


class BatchEngine(Protocol):
    """Answers requests, many at once, on one event loop."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request, prompt and output together."""

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of `SamplingParams` that hold where a request says nothing."""

    @property
    def pictures(self) -> PictureReader | None:
        """Reads the images of the model's prompts; None for a model that takes text alone."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None without one."""

    async def complete(
        self,
        prompts: Sequence[Prompt | EncodedPrompt],
        params: SamplingParams | None = None,
        request_ids: Sequence[str] | None = None,
        *,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Continue prompts; return the finished outputs in order."""

    async def __aenter__(self) -> BatchEngine: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop it."""


OpenEngine = Callable[[EngineConfig], Awaitable[BatchEngine]]
"""Starts an engine. It may be called again after that engine's death."""
