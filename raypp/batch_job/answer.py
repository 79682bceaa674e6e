"""From a line of the input to the line of the output that answers it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from pydantic_core import to_json

from raypp.batch_job.engine import BatchEngine
from raypp.batch_job.line import Line, request_of
from raypp.batch_job.settings import JobSettings
from raypp.errors import QueueFullError, RayppError, RequestError
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.completion_request import CompletionRequest
from raypp.openai_api.errors import ErrorResponse, describe_error, model_not_found
from raypp.openai_api.from_outputs import ResponseHead
from raypp.openai_api.request_fields import naming_form
from raypp.openai_api.responses import ChatCompletion, Completion
from raypp.types import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is written for a line, and what it cost."""

    record: bytes  # the output's line, without its newline
    is_error: bool = False
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class Answerer:
    """Runs lines on an engine."""

    def __init__(self, llm: BatchEngine, settings: JobSettings) -> None:
        self._llm = llm
        self._settings = settings
        self._preparer = BodyPreparer(
            llm.tokenizer, llm.pictures, max_model_len=llm.max_model_len, sampling_defaults=llm.sampling_defaults
        )

    async def answer(self, line: Line) -> Answer:
        """Run a line; what is wrong with it is its answer.

        Raises:
            RayppError: the engine cannot answer; that says nothing about the line.
        """
        request_id = f"req-{uuid.uuid4().hex}"
        try:
            request = request_of(line, self._settings.defaults)
            if request.model is not None and request.model not in self._settings.served_model_names:
                return _error_answer(line, request_id, *model_not_found(request.model, self._served))
            response = await self._run(line, request, request_id)
        except (RequestError, QueueFullError) as error:
            return _error_answer(line, request_id, *describe_error(error))
        except RayppError:
            raise
        except Exception as error:  # a fault of raypp's own must not keep the other lines from their answers
            logger.exception("line %d, custom_id %r", line.index + 1, line.custom_id)
            return _error_answer(line, request_id, *describe_error(error))
        assert response.usage is not None
        return Answer(
            _record(line, {"status_code": 200, "request_id": request_id, "body": response}, None),
            num_prompt_tokens=response.usage.prompt_tokens,
            num_output_tokens=response.usage.completion_tokens,
        )

    @property
    def _served(self) -> Sequence[str]:
        return self._settings.served_model_names

    async def _run(
        self, line: Line, request: ChatRequest | CompletionRequest, request_id: str
    ) -> ChatCompletion | Completion:
        prepared = await self._preparer.prepare(request)
        prepared = replace(prepared, params=self._seeded(prepared.params, line))
        num_prompts = len(prepared.prompts)
        request_ids = [request_id] if num_prompts == 1 else [f"{request_id}-{i}" for i in range(num_prompts)]
        with naming_form(request.form_param):
            outputs = await self._llm.complete(
                prepared.prompts, prepared.params, request_ids, priority=request.priority or 0
            )
        prefix = "chatcmpl-" if isinstance(request, ChatRequest) else "cmpl-"
        return prepared.response(ResponseHead.new(prefix, request.model or self._served[0]), outputs)

    def _seeded(self, params: SamplingParams, line: Line) -> SamplingParams:
        """Give a line without a seed one that follows from its name: its text is the same in whatever run it falls."""
        if params.seed is not None:
            return params
        key = f"{self._settings.seed}:{line.custom_id}".encode()
        return replace(params, seed=int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1)


def _error_answer(line: Line, request_id: str, status: int, body: ErrorResponse) -> Answer:
    """Say it twice, as readers differ: some look at the status, some at `error`."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return Answer(_record(line, response, body.error), is_error=True)


def _record(line: Line, response: dict[str, Any], error: object) -> bytes:
    name = f"batch_req_{uuid.uuid4().hex}"
    return to_json({"id": name, "custom_id": line.custom_id, "response": response, "error": error})
