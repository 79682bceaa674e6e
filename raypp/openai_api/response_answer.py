"""What a body of `/v1/responses` becomes: a chat for the engine, and the response that is made of its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypp.openai_api.from_outputs import ResponseHead
from raypp.openai_api.logprob_answers import chat_logprobs
from raypp.openai_api.prepared import RetoldChat
from raypp.openai_api.response_items import ResponseItems
from raypp.openai_api.response_object import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFault,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from raypp.openai_api.response_request import ResponseRequest
from raypp.openai_api.response_tools import callable_tools, own_names
from raypp.types import CompletionOutput, RequestOutput

_STATUSES: dict[str, ResponseStatus] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "cancelled",
    "error": "failed",
}
"""By why the engine ended the text."""


@dataclass(frozen=True)
class PreparedResponse(RetoldChat):
    """A conversation to be answered by a response."""

    request: ResponseRequest

    def response(self, head: ResponseHead, outputs: Sequence[RequestOutput]) -> ResponseObject:
        """Return the response of the finished output."""
        [output] = outputs
        [completion] = output.outputs
        items = self.items()
        delta = self.chat.make_parser().feed(completion.text, is_last=True)
        for _ in items.add(delta, self.logprobs(completion)):
            pass
        for _ in items.end(is_complete=completion.finish_reason == "stop"):
            pass
        return self.ended(head, items, output)

    def items(self) -> ResponseItems:
        """Return the items of the response, none so far."""
        return ResponseItems(own_names(self.request.tools))

    def logprobs(self, completion: CompletionOutput, num_told: int = 0) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens behind the first `num_told`; nothing if none were asked for."""
        if completion.logprobs is None:
            return []
        token_ids, logprobs = completion.token_ids[num_told:], completion.logprobs[num_told:]
        told = chat_logprobs(token_ids, logprobs, self.params.logprobs or 0, self.chat.names)
        entries: list[dict[str, Any]] = told.model_dump()["content"]
        return entries

    def begun(self, head: ResponseHead) -> ResponseObject:
        """Return the response before there is anything in it."""
        return self._object(head, status="in_progress", output=[])

    def ended(self, head: ResponseHead, items: ResponseItems, output: RequestOutput) -> ResponseObject:
        """Return the response with all its items.

        Args:
            head: Its name.
            items: Ended.
            output: The engine's, finished.
        """
        [completion] = output.outputs
        status = _STATUSES[completion.finish_reason or "stop"]
        return self._object(
            head,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            output=list(items.items),
            usage=self._usage(output),
        )

    def failed(self, head: ResponseHead, items: ResponseItems, fault: ResponseFault) -> ResponseObject:
        """Return the response that an error ended.

        Args:
            head: Its name.
            items: What there was before it, ended.
            fault: What went wrong.
        """
        return self._object(head, status="failed", output=list(items.items), error=fault)

    def _object(self, head: ResponseHead, **fields: Any) -> ResponseObject:
        request = self.request
        choice = request.tool_choice or "auto"
        wanted, reasoning = request.text_format, request.reasoning
        return ResponseObject(
            id=head.id,
            created_at=head.created,
            model=head.model,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            presence_penalty=self.params.presence_penalty,
            frequency_penalty=self.params.frequency_penalty,
            top_logprobs=self.params.logprobs or 0,
            tools=[tool.model_dump() for tool in callable_tools(request.tools)],
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            text={"format": wanted.model_dump(exclude_none=True, by_alias=True)},
            reasoning={"effort": reasoning and reasoning.effort, "summary": None},
            metadata=request.metadata or {},
            user=request.user,
            safety_identifier=request.safety_identifier,
            prompt_cache_key=request.prompt_cache_key,
            **fields,
        )

    def _usage(self, output: RequestOutput) -> ResponseUsage:
        usage = self.chat.usage([output])
        cached, details = usage.prompt_tokens_details, usage.completion_tokens_details
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached.cached_tokens if cached else 0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=details.reasoning_tokens if details else 0),
            total_tokens=usage.total_tokens,
        )
