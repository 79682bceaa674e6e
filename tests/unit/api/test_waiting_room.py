"""What requests count while there is no engine."""

from __future__ import annotations

import numpy as np
import pytest

from raypp.api.frontend import WaitingRoom
from raypp.api.running_request import PreparedRequest, RunningRequest
from raypp.config.engine_config import EngineConfig
from raypp.errors import QueueFullError
from raypp.request import REQUEST_BYTES, Request
from raypp.types import FinishReason, SamplingParams

PROMPT = np.ones(4, np.int32)
MAX_BYTES = 1 << 20
ROOM = MAX_BYTES // (REQUEST_BYTES + PROMPT.nbytes)
"""Continuations."""


def running(name: str, num_continuations: int = 1) -> RunningRequest:
    prepared = PreparedRequest(Request(name, PROMPT, SamplingParams(n=num_continuations), seed=0))
    return RunningRequest(prepared, range(num_continuations), None, stream=False, on_change=lambda _: None)


def test_continuations_that_have_ended_take_no_room() -> None:
    request = running("old", 5)
    for completion in request.completions[1:]:
        completion.update([1], FinishReason.LENGTH, -1, None)
    room = WaitingRoom(EngineConfig.from_flat("tiny", max_waiting_bytes=MAX_BYTES), [request])
    room.enter([running(f"r{index}") for index in range(ROOM - 1)])
    with pytest.raises(QueueFullError):
        room.enter([running("one more")])
    room.leave(request)
    room.enter([running("another")])
