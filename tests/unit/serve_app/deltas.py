"""What streams are made of, from outputs as a whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace

from raypp.types import CompletionOutput, RequestOutput


async def deltas_of(outputs: Iterable[RequestOutput]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield what is new in each of a prompt's outputs, which are cumulative."""
    before: dict[int, CompletionOutput] = {}
    for output in outputs:
        new = []
        for one in output.outputs:
            old = before.get(one.index, CompletionOutput(index=one.index, text="", token_ids=[]))
            num_old = len(old.token_ids)
            logprobs = None if one.logprobs is None else one.logprobs[num_old:]
            new.append(
                replace(one, text=one.text[len(old.text) :], token_ids=one.token_ids[num_old:], logprobs=logprobs)
            )
            before[one.index] = one
        yield 0, replace(output, outputs=new)
