"""What is measured of a request, and how its sequences are counted: whole, streamed, left and failed."""

from __future__ import annotations

import time

import pytest
from test_status_routes import series

from raypp.types import CompletionOutput, RequestMetrics, RequestOutput
from serve_app.metrics import EngineMetrics, RequestWatch

FINISHED = "raypp_requests_finished_total|reason="


def output_of(*reasons: str | None, num_tokens: int = 5) -> RequestOutput:
    """Return outputs of continuations with these ends: first token after 2 s, 0.25 s a token, 3 s in all."""
    times = RequestMetrics(arrival_time_s=1000.0, ttft_s=2.0, tpot_s=0.25, queue_s=0.5, finish_time_s=1003.0)
    outputs = [
        CompletionOutput(index=index, text="", token_ids=[7] * num_tokens, finish_reason=reason)  # type: ignore[arg-type]
        for index, reason in enumerate(reasons)
    ]
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        outputs=outputs,
        finished=all(reasons),
        metrics=times,
    )


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("tiny", "a")


def ends(metrics: EngineMetrics) -> dict[str, float]:
    seen = series(metrics.exposition({}))
    return {name.removeprefix(FINISHED): count for name, count in seen.items() if name.startswith(FINISHED)}


def test_whole_outputs_are_measured_from_the_requests_arrival(metrics: EngineMetrics) -> None:
    watch = RequestWatch(metrics, started_s=50.0, num_sequences=2)
    watch.see_whole(output_of("length", "stop"), submitted_s=50.5)
    watch.close()
    seen = series(metrics.exposition({}))
    for name, total in (
        ("time_to_first_token_seconds", 2.5),
        ("time_per_output_token_seconds", 0.25),
        ("request_seconds", 3.5),
        ("queue_seconds", 0.5),
        ("request_prompt_tokens", 3),
    ):
        assert (seen[f"raypp_{name}_count"], seen[f"raypp_{name}_sum"]) == (1, total), name
    assert seen["raypp_request_output_tokens_sum"] == 10
    assert ends(metrics) == {"length": 1, "stop": 1}


def test_streamed_outputs_are_measured_as_they_come(metrics: EngineMetrics) -> None:
    watch = RequestWatch(metrics, time.monotonic() - 4.0, num_sequences=1)
    watch.see(output_of(None, num_tokens=1))
    watch.see(output_of(None, num_tokens=2))
    watch.see(output_of("stop", num_tokens=2))
    watch.close()
    seen = series(metrics.exposition({}))
    for name, count in (
        ("time_to_first_token_seconds", 1),
        ("inter_token_seconds", 2),
        ("time_per_output_token_seconds", 1),
        ("request_seconds", 1),
    ):
        assert seen[f"raypp_{name}_count"] == count, name
    assert seen["raypp_time_to_first_token_seconds_sum"] >= 4.0
    assert seen["raypp_time_per_output_token_seconds_sum"] == 0.25
    assert ends(metrics) == {"stop": 1}


def test_every_sequence_ends_once_and_for_one_reason(metrics: EngineMetrics) -> None:
    RequestWatch(metrics, 0.0, num_sequences=3).close()
    assert ends(metrics) == {"abort": 3}
    RequestWatch(metrics, 0.0, num_sequences=2).close("error")
    assert ends(metrics) == {"abort": 3, "error": 2}
    left = RequestWatch(metrics, 0.0, num_sequences=2)
    left.see(output_of("stop", None))
    left.close()
    assert ends(metrics) == {"abort": 4, "error": 2, "stop": 1}
