import pytest
from drive import make_limits

from raypp.scheduler.prefill import chunk_tokens, prefill_budget

LIMITS = make_limits(num_stages=4, max_num_batched_tokens=2048, min_prefill_chunk_tokens=512)


def test_one_stage_takes_all_that_is_left():
    limits = make_limits(num_stages=1, max_num_batched_tokens=2048)
    assert prefill_budget(limits, 100_000, 1900, 0.01) == 1900


@pytest.mark.parametrize(
    ("num_waiting", "num_left", "expected"),
    [
        (16_384, 2048, 1024),  # spread over 4 * 4 steps
        (13_000, 2048, 1024),  # to the nearest multiple of the least chunk
        (12_000, 2048, 512),
        (100, 2048, 512),  # never below the least chunk
        (16_384, 300, 300),  # but within the step
        (10**6, 2048, 2048),
    ],
)
def test_waiting_tokens_are_spread_over_the_steps_to_come(num_waiting, num_left, expected):
    assert prefill_budget(LIMITS, num_waiting, num_left, 1.0) == expected


def test_a_lone_prompt_is_cut_into_at_least_four_chunks_per_stage():
    rest, num_chunks = 32_000, 0
    while rest:
        rest -= chunk_tokens(rest, prefill_budget(LIMITS, rest, 2048, 1.0), 512, False)
        num_chunks += 1
    assert num_chunks >= 16


def test_prompts_slow_down_when_kv_is_short():
    assert prefill_budget(LIMITS, 32_768, 2048, 0.25) == 2048
    assert prefill_budget(LIMITS, 32_768, 2048, 0.2) == 1536
    assert prefill_budget(LIMITS, 32_768, 2048, 0.0) == 512


@pytest.mark.parametrize(
    ("num_rest", "num_left", "step_is_full", "expected"),
    [
        (100, 600, False, 100),
        (900, 600, False, 600),
        (900, 500, False, 0),
        (900, 500, True, 500),
        (500, 500, False, 500),
    ],
)
def test_no_chunk_is_smaller_than_it_must_be(num_rest, num_left, step_is_full, expected):
    assert chunk_tokens(num_rest, num_left, 512, step_is_full) == expected
