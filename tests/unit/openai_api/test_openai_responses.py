"""Outputs become OpenAI's responses."""

from __future__ import annotations

from raypp.openai_api.from_outputs import PreparedChat, PreparedCompletion, ResponseHead, TokenNames
from raypp.types import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams

HEAD = ResponseHead("id-1", 17, "tiny")


class Letters:
    """Token 1 is `a`, 2 is `b`, and so on; 8 is a part of a character, 9 has no text."""

    special_token_ids = frozenset[int]()

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        return {7: b"x", 8: b"\xf0\x9f", 9: b""}.get(token_id, bytes([0x60 + token_id - (token_id > 3)]))

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


NAMES = TokenNames(Letters())


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
    assert PreparedChat([], SamplingParams()).response(HEAD, [output("p", "a")]).model_dump(exclude_none=True) == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 17,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a", "annotations": []},
                "finish_reason": "stop",
                "stop_reason": "x",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_a_message_without_calls_has_no_null_in_their_place() -> None:
    response = PreparedChat([], SamplingParams()).response(HEAD, [output("p", "a")])
    message = response.model_dump()["choices"][0]["message"]
    assert message.keys() == {"role", "content", "refusal", "annotations", "reasoning_content", "reasoning"}


def test_choices_of_several_prompts_are_numbered_through() -> None:
    prepared = PreparedCompletion([], SamplingParams(), echo=True)
    response = prepared.response(HEAD, [output("p", "a", "b"), output(None, "c", "d")])
    assert [(choice.index, choice.text) for choice in response.choices] == [(0, "pa"), (1, "pb"), (2, "c"), (3, "d")]
    assert response.usage is not None
    assert response.usage.total_tokens == 2 * 3 + 4 * 2


def with_logprobs() -> RequestOutput:
    result = output("ab", "cd")
    result.prompt_token_ids = [1, 2]
    result.prompt_logprobs = [None, {2: Logprob(-0.5, 1, "b")}]
    result.outputs[0].logprobs = [
        {4: Logprob(-2.0, 3, "c"), 7: Logprob(-0.1, 1, "x"), 8: Logprob(-1.0, 2, "\ufffd")},
        {5: Logprob(-0.2, 1, "d"), 9: Logprob(-3.0, 2, None)},
    ]
    return result


def test_logprobs_of_a_message() -> None:
    prepared = PreparedChat([], SamplingParams(logprobs=2), names=NAMES)
    (choice,) = prepared.response(HEAD, [with_logprobs()]).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    first, second = choice.logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("c", -2.0, [99])
    assert [(top.token, top.bytes) for top in first.top_logprobs] == [("x", [120]), ("\ufffd", [0xF0, 0x9F])]
    assert [(top.token, top.logprob) for top in second.top_logprobs] == [("d", -0.2), ("token_id:9", -3.0)]


def test_logprobs_of_a_text() -> None:
    prepared = PreparedCompletion([], SamplingParams(logprobs=1), NAMES)
    (choice,) = prepared.response(HEAD, [with_logprobs()]).choices
    assert choice.logprobs is not None
    assert choice.logprobs.model_dump() == {
        "tokens": ["c", "d"],
        "token_logprobs": [-2.0, -0.2],
        "top_logprobs": [{"x": -0.1, "c": -2.0}, {"d": -0.2}],
        "text_offset": [0, 1],
    }
    assert choice.prompt_logprobs is not None
    assert [at and {k: v.logprob for k, v in at.items()} for at in choice.prompt_logprobs] == [None, {"2": -0.5}]


def test_logprobs_of_an_echoed_text_begin_with_the_prompt() -> None:
    prepared = PreparedCompletion([], SamplingParams(logprobs=0), NAMES, echo=True)
    (choice,) = prepared.response(HEAD, [with_logprobs()]).choices
    assert choice.text == "abcd"
    assert choice.logprobs is not None
    assert choice.logprobs.model_dump() == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -0.5, -2.0, -0.2],
        "top_logprobs": None,
        "text_offset": [0, 1, 2, 3],
    }


def test_new_heads_differ() -> None:
    assert ResponseHead.new("cmpl-", "tiny").id != ResponseHead.new("cmpl-", "tiny").id
