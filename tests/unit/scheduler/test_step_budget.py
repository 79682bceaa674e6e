"""How much of the waiting prompts a step takes."""

import pytest
from drive import make_limits

from raypp.scheduler.step_budget import (
    RooflineCost,
    StageTimes,
    StepBudget,
    StepPredictor,
    StepWork,
    Waiting,
    prompt_pairs,
    spread_tokens,
)

LIMITS = make_limits(num_stages=4, max_num_batched_tokens=2048, min_prefill_chunk_tokens=512)
TIMES = StageTimes(step=0.2, prompts=0.6, weights=1.8, token=0.001, logit=0.005, kv=2e-5, pair=5e-7)
PREDICTOR = StepPredictor(RooflineCost(180.0), [TIMES, TIMES])
ROWS = StepWork(16, 16, 16 * 700, num_logits=16)
NO_ROWS = StepWork()
ONE_MS = PREDICTOR.ms(StepWork(num_prompt_tokens=1))


def budget_for(
    num_waiting: int,
    *,
    decoding: StepWork = NO_ROWS,
    num_left: int = 2048,
    free_kv_share: float = 1.0,
    any_decodes: bool | None = None,
    some_lack_rows: bool = False,
    predictor: StepPredictor = PREDICTOR,
    **limits,
) -> StepBudget:
    """Return a step's budget; `num_left` are the tokens that its rows leave."""
    settings = {
        "num_stages": 4,
        "min_prefill_chunk_tokens": 512,
        "max_num_batched_tokens": num_left + decoding.num_tokens,
    }
    return StepBudget(
        make_limits(**(settings | limits)),
        predictor,
        decoding,
        Waiting(num_waiting, 0, some_lack_rows),
        free_kv_share=free_kv_share,
        any_decodes=bool(decoding.num_decode_rows) if any_decodes is None else any_decodes,
    )


def step_ms(decoding: StepWork, start: int, num_tokens: int) -> float:
    pairs = prompt_pairs(start, num_tokens)
    return PREDICTOR.ms(decoding._replace(num_prompt_tokens=num_tokens, num_prompt_pairs=pairs))


def test_one_stage_takes_all_that_is_left():
    budget = budget_for(100_000, decoding=ROWS, num_left=1900, num_stages=1, free_kv_share=0.01)
    assert budget.chunk_tokens(0, 100_000) == 1900


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
def test_while_nothing_decodes_waiting_tokens_are_spread_over_the_steps_to_come(num_waiting, num_left, expected):
    assert budget_for(num_waiting, num_left=num_left).chunk_tokens(0, 10**6) == expected


def test_a_lone_prompt_is_cut_into_at_least_four_chunks_per_stage():
    rest, num_chunks = 32_000, 0
    while rest:
        rest -= budget_for(rest).chunk_tokens(32_000 - rest, rest)
        num_chunks += 1
    assert num_chunks >= 16


def test_prompts_slow_down_when_kv_is_short():
    assert [budget_for(32_768, free_kv_share=share).chunk_tokens(0, 32_768) for share in (0.25, 0.2, 0.0)] == [
        2048,
        1536,
        512,
    ]
    few, many = (budget_for(8000, decoding=ROWS, free_kv_share=share).chunk_tokens(0, 8000) for share in (0.05, 1.0))
    assert few < many


@pytest.mark.parametrize(
    ("num_rest", "taken", "expected"),
    [(100, 424, 100), (900, 0, 1024), (900, 512, 512), (900, 513, 0), (424, 600, 424)],
)
def test_no_chunk_is_smaller_than_it_must_be(num_rest, taken, expected):
    budget = budget_for(16_384)
    budget.take(0, taken)
    assert budget.chunk_tokens(0, num_rest) == min(num_rest, expected)


def test_a_full_step_takes_a_chunk_of_any_size():
    budget = budget_for(10**6, num_left=600)
    budget.take(0, 599)
    assert budget.chunk_tokens(0, 900) == 1
    budget.take(0, 1)
    assert not budget.has_room


def test_beside_decode_rows_a_step_takes_what_there_is_time_for():
    sizes = {}
    for num_waiting in (600, 2_000, 8_000, 1_000_000):
        num_tokens = budget_for(num_waiting, decoding=ROWS).chunk_tokens(0, num_waiting)
        sizes[num_waiting] = step_ms(ROWS, 0, num_tokens)
    decode_ms = PREDICTOR.ms(ROWS)
    assert sizes[600] == pytest.approx(decode_ms + 1.75 * ONE_MS, rel=0.1)
    assert sizes[600] <= sizes[2_000] < sizes[8_000] < sizes[1_000_000]
    assert sizes[1_000_000] == pytest.approx(8 * ONE_MS, rel=0.06)


def test_prompts_that_all_have_a_row_are_spread_over_fewer_steps():
    """Somebody waits for each first token; where prompts wait for rows, throughput is all that matters."""
    first_tokens, throughput = (
        budget_for(12_000, decoding=ROWS, some_lack_rows=lack).chunk_tokens(0, 12_000) for lack in (False, True)
    )
    prompts_ms = PREDICTOR.ms(StepWork(num_prompt_tokens=12_000)) - ONE_MS
    for num_tokens, num_steps in ((first_tokens, 2 * 4), (throughput, 4 * 4)):
        beside_ms = step_ms(ROWS, 0, num_tokens) - PREDICTOR.ms(ROWS)
        assert beside_ms == pytest.approx(max(prompts_ms / num_steps, 1.75 * ONE_MS), rel=0.15)
    assert first_tokens > 1.5 * throughput


def test_more_decode_rows_and_longer_contexts_leave_less_for_prompts():
    tokens = [
        budget_for(10**6, decoding=StepWork(rows, rows, rows * context, num_logits=rows)).chunk_tokens(start, 10**6)
        for rows, context, start in ((8, 100, 0), (64, 100, 0), (64, 2000, 0), (64, 2000, 8000), (64, 2000, 30_000))
    ]
    assert tokens == sorted(tokens, reverse=True)
    assert len(set(tokens)) == 5


def test_many_rows_do_not_take_a_whole_step():
    rows = StepWork(1000, 1000, 1_000_000, num_logits=1000)
    num_tokens = budget_for(10**6, decoding=rows, num_left=10_000).chunk_tokens(0, 10**6)
    assert PREDICTOR.ms(rows) > 8 * ONE_MS
    assert step_ms(rows, 0, num_tokens) == pytest.approx(2 * PREDICTOR.ms(rows), rel=0.05)


def test_what_fits_but_for_a_little_is_taken_whole():
    num_tokens = budget_for(10**6, decoding=ROWS).chunk_tokens(0, 10**6)
    assert budget_for(10**6, decoding=ROWS).chunk_tokens(0, num_tokens + 30) == num_tokens + 30
    assert budget_for(10**6, decoding=ROWS).chunk_tokens(0, num_tokens + 300) == num_tokens


@pytest.mark.parametrize("num_decode_rows", [1, 8, 60, 64, 100, 128, 250])
def test_a_step_that_is_cut_by_its_time_has_whole_tiles(num_decode_rows):
    """Libraries multiply tiles of 128 rows; the number of tiles is the one nearest to the time there is."""
    rows = StepWork(num_decode_rows, num_decode_rows, num_decode_rows * 500, num_logits=num_decode_rows)
    for num_waiting in (3_000, 10_000, 30_000, 10**6):
        num_tokens = budget_for(num_waiting, decoding=rows, num_left=8_000).chunk_tokens(0, num_waiting)
        assert (num_tokens + num_decode_rows) % 128 == 0


def test_a_tile_is_not_filled_at_any_price():
    """Deep in a prompt a token takes many times as long; a rest of a few tokens would be a step of its own."""
    for start in (0, 20_000, 100_000, 150_000):
        for num_decode_rows in range(1, 129, 5):
            rows = StepWork(num_decode_rows, num_decode_rows, num_decode_rows * 500, num_logits=num_decode_rows)
            num_tokens = budget_for(10**6, decoding=rows).chunk_tokens(start, 10**6)
            most_ms = 1.15 * max(8 * ONE_MS, 2 * PREDICTOR.ms(rows))
            assert num_tokens == 64 or step_ms(rows, start, num_tokens) <= most_ms
            for num_rest in range(num_tokens + 1, num_tokens + 400, 7):
                taken = budget_for(num_rest, decoding=rows, num_left=8_000).chunk_tokens(start, num_rest)
                assert num_rest - taken not in range(1, 32)


def test_chunks_share_the_time_of_their_step():
    budget, sizes = budget_for(10**6, decoding=ROWS), []
    while budget.has_room and (num_tokens := budget.chunk_tokens(0, 200)):
        budget.take(0, num_tokens)
        sizes.append(num_tokens)
    assert sizes[0] == sizes[1] == 200
    together = ROWS._replace(
        num_prompt_tokens=sum(sizes), num_prompt_pairs=sum(prompt_pairs(0, size) for size in sizes)
    )
    assert PREDICTOR.ms(together) == pytest.approx(8 * ONE_MS, rel=0.06)


def test_short_prompts_share_the_time_of_a_step_where_a_token_is_dear():
    """As on a CPU, where the smallest part of a cut prompt takes more than there is time for."""
    predictor = StepPredictor(RooflineCost(12.0), [TIMES])
    budget, sizes = budget_for(10**6, any_decodes=True, predictor=predictor), []
    while budget.has_room and (num_tokens := budget.chunk_tokens(0, 8)):
        budget.take(0, num_tokens)
        sizes.append(num_tokens)
    assert set(sizes) == {8}
    assert len(sizes) > 5
    one_ms, pairs = predictor.ms(StepWork(num_prompt_tokens=1)), len(sizes) * prompt_pairs(0, 8)
    together_ms = predictor.ms(StepWork(num_prompt_tokens=sum(sizes), num_prompt_pairs=pairs))
    assert together_ms == pytest.approx(8 * one_ms, rel=0.1)
    assert not budget.chunk_tokens(0, 100), "a part of a long one is too small"


def test_the_first_chunk_is_never_nothing():
    deep = budget_for(10**6, decoding=ROWS)
    assert deep.chunk_tokens(20_000_000, 5000) == 512 // 8
    deep.take(20_000_000, 64)
    assert not deep.has_room


def test_the_tokens_of_a_step_bound_its_chunks():
    assert budget_for(10**6, decoding=ROWS, num_left=40).chunk_tokens(0, 500) == 40


def test_rows_of_other_cohorts_count_as_rows_that_decode():
    beside = budget_for(10**6, any_decodes=True).chunk_tokens(0, 10**6)
    assert step_ms(StepWork(), 0, beside) == pytest.approx(8 * ONE_MS, rel=0.06)
    assert spread_tokens(LIMITS, 10**6) > beside


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("decoding", [NO_ROWS, ROWS])
def test_a_bound_on_the_time_between_tokens_is_shared_by_the_steps_of_a_round(num_stages, decoding):
    budget = budget_for(10**6, decoding=decoding, num_stages=num_stages, max_itl_ms=20.0, num_left=10_000)
    num_tokens = budget.chunk_tokens(0, 10**6)
    assert 0.8 * 20.0 < num_stages * step_ms(decoding, 0, num_tokens) <= 20.0


def test_prompts_go_on_where_decode_rows_alone_take_longer_than_they_may():
    budget = budget_for(10**6, decoding=ROWS, max_itl_ms=0.5)
    assert budget.chunk_tokens(0, 10**6) == 512 // 8
    assert budget_for(10**6, decoding=ROWS, max_itl_ms=0.5).chunk_tokens(0, 20) == 20


def test_what_was_learned_changes_no_chunk_but_where_a_wait_is_bounded():
    """In 16 bits another cut is another rounding: the same prompts are cut alike in every life of an engine."""
    begun = StepPredictor(PREDICTOR.roofline, PREDICTOR.stages)
    before = budget_for(10**6, decoding=ROWS, predictor=begun).chunk_tokens(0, 10**6)
    bounded = budget_for(10**6, decoding=ROWS, predictor=begun, max_itl_ms=200.0).chunk_tokens(0, 10**6)
    works = [ROWS._replace(num_prompt_tokens=tokens) for tokens in range(64, 1024, 64)]
    begun.learn(0, works, [3 * PREDICTOR.ms(work) + 1 for work in works])
    assert begun.ms(ROWS) > 2 * PREDICTOR.ms(ROWS)
    assert budget_for(10**6, decoding=ROWS, predictor=begun).chunk_tokens(0, 10**6) == before
    assert budget_for(10**6, decoding=ROWS, predictor=begun, max_itl_ms=200.0).chunk_tokens(0, 10**6) < bounded
