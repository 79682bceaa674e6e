"""What callers give once for all requests, once per request, or not at all: as a list with one entry per request."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from raypp.api.running_request import COMPLETION_SEPARATOR
from raypp.errors import RequestError
from raypp.types import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None

_NO_PRIORITY = "left out, it is 0"


def check_listed(given: object, expected: str) -> None:
    """Refuse what is not a list of things.

    Raises:
        RequestError: it is not.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(
            "not a list",
            got=f"{repr(given)[:80]} ({type(given).__name__})",
            expected=expected,
            hint="a single one goes into a list, too",
        )


def request_ids(given: Sequence[str] | None, num_requests: int) -> list[str]:
    """Return an id per request, made up when none are given.

    Raises:
        RequestError: they are not that many different names.
    """
    if given is None:
        return [f"req-{uuid.uuid4().hex}" for _ in range(num_requests)]
    check_listed(given, "a list of names")
    ids = list(given)
    for request_id in ids:
        if not isinstance(request_id, str) or not request_id or COMPLETION_SEPARATOR in request_id:
            raise RequestError(
                "a request_id is not a name",
                got=repr(request_id)[:80],
                expected="a non-empty str without NUL characters",
                hint="leave it out, and one is generated",
            )
    if len(ids) != num_requests or len(set(ids)) != num_requests:
        raise RequestError(
            "request_ids do not fit the prompts",
            got=repr(ids)[:80],
            expected=f"{num_requests} different ones",
            hint="leave them out, and they are generated",
        )
    return ids


def params_per_request(params: Params, num_requests: int, default: SamplingParams) -> list[SamplingParams]:
    """Return parameters per request, `default` when none are given.

    Raises:
        RequestError: they are of another kind, or not as many.
    """
    listed: Iterable[SamplingParams]
    if params is None or isinstance(params, SamplingParams):
        listed = [params or default] * num_requests
    elif isinstance(params, Sequence):
        listed = params
    else:
        listed = [params]
    result = list(listed)
    for param in result:
        if not isinstance(param, SamplingParams):
            raise RequestError(
                "sampling parameters of the wrong type",
                got=repr(param)[:80],
                expected="SamplingParams",
                hint="SamplingParams(**values) makes them of a dict",
            )
    if len(result) != num_requests:
        raise RequestError(
            "sampling parameters do not fit the prompts",
            got=f"{len(result)} for {num_requests} prompts",
            expected="one SamplingParams for all, or one per prompt",
            hint="a single SamplingParams, not in a list, serves all",
        )
    return result


def priorities(given: Priority, num_requests: int) -> list[int]:
    """Return a priority per request, 0 when none are given.

    Raises:
        RequestError: they are no numbers, or not as many.
    """
    expected = "an integer from -2**31 to 2**31 - 1 for all, or one per prompt; smaller is served first"
    listed = [given or 0] * num_requests if given is None or isinstance(given, int) else given
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) != num_requests:
        raise RequestError(
            "priorities do not fit the prompts", got=repr(given)[:80], expected=expected, hint=_NO_PRIORITY
        )
    for priority in listed:
        if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**31) <= priority < 2**31:
            raise RequestError(
                "a priority is not a number", got=repr(priority)[:80], expected=expected, hint=_NO_PRIORITY
            )
    return list(listed)
