"""Requests that are longer than the model's context, said in the words that OpenAI's clients look for."""

from __future__ import annotations

from raypp.errors import ContextLengthError


def check_context_length(
    num_tokens: int, max_model_len: int, *, request_id: str | None = None, param: str | None = None
) -> None:
    """Accept a prompt that leaves room for one output token.

    Args:
        num_tokens: Of the prompt.
        max_model_len: The most tokens of a request, prompt and output together.
        request_id: Whose prompt it is.
        param: The field of the request's body that holds the prompt.

    Raises:
        ContextLengthError: it leaves none.
    """
    if num_tokens < max_model_len:
        return
    raise context_length_error(
        "the prompt leaves no room for a single output token",
        max_model_len,
        got=f"{num_tokens} tokens",
        expected=f"at most max_model_len - 1 = {max_model_len - 1}",
        hint="shorten the prompt or raise max_model_len",
        request_id=request_id,
        param=param,
    )


def context_length_error(
    what: str,
    max_model_len: int,
    *,
    got: str,
    expected: str,
    hint: str,
    request_id: str | None = None,
    param: str | None = None,
) -> ContextLengthError:
    """Return the error. Clients look for its first words, and then shorten the conversation or take another model.

    Args:
        what: What is wrong.
        max_model_len: The most tokens of a request, prompt and output together.
        got: How long it is.
        expected: How long it may be.
        hint: What to do.
        request_id: Whose request it is.
        param: The field of the request's body at fault.
    """
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens: {what}",
        got=got,
        expected=expected,
        hint=hint,
        request_id=request_id,
        param=param,
    )
