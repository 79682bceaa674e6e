"""Outputs become OpenAI's responses."""

from __future__ import annotations

from raypp.openai_api.from_outputs import ResponseHead, chat_completion, completion
from raypp.types import CompletionOutput, RequestMetrics, RequestOutput

HEAD = ResponseHead("id-1", 17, "tiny")


def output(prompt: str | None, *texts: str) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=prompt,
        prompt_token_ids=[1, 2, 3],
        outputs=[
            CompletionOutput(index=i, text=text, token_ids=[4, 5], finish_reason="stop", stop_reason="x")
            for i, text in enumerate(texts)
        ],
        finished=True,
        metrics=RequestMetrics(arrival_time_s=0.0, num_cached_tokens=2),
    )


def test_chat() -> None:
    assert chat_completion(HEAD, output("p", "a")).model_dump(exclude_none=True) == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 17,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a"},
                "finish_reason": "stop",
                "stop_reason": "x",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_choices_of_several_prompts_are_numbered_through() -> None:
    response = completion(HEAD, [output("p", "a", "b"), output(None, "c", "d")], echo=True)
    assert [(choice.index, choice.text) for choice in response.choices] == [(0, "pa"), (1, "pb"), (2, "c"), (3, "d")]
    assert response.usage is not None
    assert response.usage.total_tokens == 2 * 3 + 4 * 2


def test_new_heads_differ() -> None:
    assert ResponseHead.new("cmpl", "tiny").id != ResponseHead.new("cmpl", "tiny").id
