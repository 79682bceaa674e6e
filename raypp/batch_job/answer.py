"""From a line of the input to the line of the output that answers it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from pydantic_core import to_json

from raypp.api.async_llm import AsyncLLM
from raypp.batch_job.job_settings import JobSettings
from raypp.batch_job.line import BadLineError, Body, Line, request_of
from raypp.errors import EncoderDiedError, NonFiniteLogitsError, QueueFullError, RayppError, RequestError
from raypp.openai_api.body_preparer import BodyPreparer
from raypp.openai_api.chat_request import ChatRequest
from raypp.openai_api.error_bodies import ErrorObject, ErrorResponse, describe_error, model_not_found
from raypp.openai_api.from_outputs import Prepared, ResponseHead, usage_of
from raypp.openai_api.request_fields import OpenAIModel, naming_form
from raypp.openai_api.response_answer import PreparedResponse
from raypp.openai_api.response_request import ResponseRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is written for a line, and what it cost."""

    record: bytes  # the output's line, without its newline
    is_error: bool = False  # then it belongs into the error file
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class LineError(ErrorObject):
    """What went wrong with a line."""

    line: int
    """Of the input, from 1: the answer to a line without a `custom_id` of its own has no other name."""


class Answerer:
    """Runs lines on an engine."""

    def __init__(self, llm: AsyncLLM, settings: JobSettings) -> None:
        self._llm = llm
        self._settings = settings
        self._num_running = 0
        self._preparer = BodyPreparer(
            llm.tokenizer,
            llm.pictures,
            max_model_len=llm.max_model_len,
            sampling_defaults=llm.sampling_defaults,
            tool_call_parser=settings.config.model.tool_call_parser,
            reasoning_parser=settings.config.model.reasoning_parser,
        )

    async def answer(self, line: Line) -> Answer:
        """Run a line; what is wrong with it is its answer.

        Raises:
            RayppError: the engine cannot answer; that says nothing about the line.
        """
        request_id = _request_id()
        try:
            request = request_of(line, self._settings.defaults)
            if request.model is not None and request.model not in self._served:
                return _error_answer(
                    line.index, line.custom_id, request_id, *model_not_found(request.model, self._served)
                )
            return await self._run_when_there_is_room(line, request, request_id)
        except (RequestError, QueueFullError, NonFiniteLogitsError, EncoderDiedError) as error:
            return _error_answer(line.index, line.custom_id, request_id, *describe_error(error))
        except RayppError:
            raise
        except Exception as error:  # a fault of raypp's own must not keep the other lines from their answers
            logger.exception("line %d, custom_id %r", line.index + 1, line.custom_id)
            return _error_answer(line.index, line.custom_id, request_id, *describe_error(error))

    @property
    def _served(self) -> Sequence[str]:
        return self._settings.served_model_names

    async def _run_when_there_is_room(self, line: Line, request: Body, request_id: str) -> Answer:
        """Run a line again while it is refused for the sake of others: these are the job's own, and end."""
        while True:
            self._num_running += 1
            try:
                return await self._run(line, request, request_id)
            except QueueFullError as error:
                if self._num_running == 1:
                    raise
                retry_after_s = error.retry_after_s
            finally:
                self._num_running -= 1
            await asyncio.sleep(retry_after_s)

    async def _run(self, line: Line, request: Body, request_id: str) -> Answer:
        if request.seed is None:
            request = request.model_copy(update={"seed": self._seed_of(line)})
        prepared, prefix = await self._prepared(request)
        num_prompts = len(prepared.prompts)
        request_ids = [request_id] if num_prompts == 1 else [f"{request_id}-{i}" for i in range(num_prompts)]
        with naming_form(request.form_param):
            outputs = await self._llm.complete(
                prepared.prompts, prepared.params, request_ids, priority=request.priority or 0
            )
        head = ResponseHead.new(prefix, request.model or self._served[0], request.request_id)
        response, usage = prepared.response(head, outputs), usage_of(outputs)
        return Answer(
            _record(line.custom_id, request_id, 200, response),
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
        )

    async def _prepared(self, request: Body) -> tuple[Prepared | PreparedResponse, str]:
        """Return what a body becomes, and what the id of its response begins with."""
        if isinstance(request, ResponseRequest):
            return await self._preparer.response(request), "resp_"
        return await self._preparer.prepare(request), "chatcmpl-" if isinstance(request, ChatRequest) else "cmpl-"

    def _seed_of(self, line: Line) -> int:
        """Return a seed that follows from a line's name: its text is the same in whatever run it falls."""
        key = f"{self._settings.config.model.seed}:{line.custom_id}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


def refusal(index: int, error: BadLineError) -> Answer:
    """Return the answer to a line that cannot be run.

    Args:
        index: The line's, 0-based.
        error: What is wrong with it.
    """
    return _error_answer(index, error.custom_id, _request_id(), *describe_error(error))


def _error_answer(index: int, custom_id: str | None, request_id: str, status: int, body: ErrorResponse) -> Answer:
    """Say it twice, as readers differ: some look at the status, some at `error`."""
    error = LineError(**body.error.model_dump(), line=index + 1)
    return Answer(_record(custom_id, request_id, status, body, error), is_error=True)


def _record(
    custom_id: str | None, request_id: str, status: int, body: OpenAIModel, error: LineError | None = None
) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": body}
    name = f"batch_req_{uuid.uuid4().hex}"
    return to_json({"id": name, "custom_id": custom_id, "response": response, "error": error})


def _request_id() -> str:
    return f"req-{uuid.uuid4().hex}"
