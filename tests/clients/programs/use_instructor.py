"""Instructor: instances by tools, JSON schema and responses, whole, in parts, refused. Run with /v1's address."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field, field_validator


class Trip(BaseModel):
    """A trip."""

    title: Annotated[str, Field(max_length=12)]
    kind: Literal["walk", "ride"]


class Stop(BaseModel):
    """A stop of a trip."""

    name: Annotated[str, Field(max_length=6)]


class Picky(BaseModel):
    """Takes the second answer only: what is wrong with the first one is sent back."""

    kind: Literal["walk", "ride"]

    @field_validator("kind")
    @classmethod
    def check(cls, kind: str) -> str:
        seen.append(kind)
        if len(seen) % 2:
            raise ValueError("ask me again")
        return kind


seen: list[str] = []


def use(client: instructor.Instructor) -> None:
    """Ask for an instance, its parts, and one that is refused at first; go on with the conversation."""
    messages: list[Any] = [{"role": "user", "content": "Plan a trip."}]
    trip, raw = client.chat.completions.create_with_completion(messages=messages, response_model=Trip, **GIVEN)
    assert isinstance(trip, Trip)
    answer = raw.choices[0].message
    messages += [answer.model_dump()]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in answer.tool_calls or []]
    messages += [{"role": "user", "content": "Another one."}]
    assert isinstance(client.chat.completions.create(messages=messages, response_model=Trip, **GIVEN), Trip)
    assert isinstance(
        client.chat.completions.create(messages=messages, response_model=Picky, **GIVEN, max_retries=2), Picky
    )
    *_, last = client.chat.completions.create_partial(messages=messages, response_model=Trip, **GIVEN)
    Trip.model_validate(last.model_dump())


def use_responses(client: instructor.Instructor) -> None:
    """Ask for an instance, and for one that is refused at first."""
    given = {**GIVEN, "max_output_tokens": GIVEN["max_tokens"]}
    del given["max_tokens"]
    ask: list[Any] = [{"role": "user", "content": "Plan a trip."}]
    assert isinstance(client.responses.create(input=ask, response_model=Trip, **given), Trip)
    assert isinstance(client.responses.create(input=ask, response_model=Picky, **given, max_retries=2), Picky)


GIVEN: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 80,
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
}


def main(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            use(instructor.from_openai(client, mode=mode))
        use_responses(instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS))
        text = client.chat.completions.create(messages=[{"role": "user", "content": "hello"}], stream=True, **GIVEN)
        assert list(text)[-1].choices[0].finish_reason is not None


if __name__ == "__main__":
    main(sys.argv[1])
