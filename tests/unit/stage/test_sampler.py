"""The sampler's rows against the plain twin: any parameters beside any others, over steps, drafts and reused rows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import reference_ops as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_plans import VOCAB_SIZE, choose, commit, sampler_of, spec, start, start_plan
from sizes import sized
from transformers import TopPLogitsWarper

from raypp.ops.row_tokens import StepTokens
from raypp.ops.sample.token_choice import draw_scores
from raypp.request import Request
from raypp.row_params import Needs
from raypp.scheduler.request_state import end_token_ids
from raypp.starting_rows import StartingRows
from raypp.types import SamplingParams

EVERYTHING = Needs(127)
token_ids = st.integers(0, VOCAB_SIZE - 1)


def some(strategy: st.SearchStrategy, neutral: object) -> st.SearchStrategy:
    return st.just(neutral) | strategy


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Return a request in the middle of its life; few different tokens, so that what they do is met often."""
    few = st.integers(0, 9)
    prompt = draw(st.lists(few, min_size=1, max_size=12))
    output = draw(st.lists(few, max_size=12))
    temperature = draw(st.sampled_from([0.0, 0.7, 1.3]))
    params = SamplingParams(
        max_tokens=30,
        min_tokens=draw(some(st.integers(0, 14), 0)),
        temperature=temperature,
        top_k=draw(some(st.integers(1, 20), 0)),
        top_p=draw(some(st.floats(0.1, 1.0), 1.0)),
        min_p=draw(some(st.floats(0.0, 0.5), 0.0)),
        presence_penalty=draw(some(st.floats(-2, 2), 0.0)),
        frequency_penalty=draw(some(st.floats(-2, 2), 0.0)),
        repetition_penalty=draw(some(st.floats(0.5, 2), 1.0)),
        logit_bias=draw(some(st.dictionaries(token_ids, st.floats(-5, 5), max_size=9), {})),
        allowed_token_ids=draw(some(st.lists(token_ids, min_size=1, max_size=9), None)),
        stop_token_ids=draw(st.lists(token_ids, max_size=3)),
        ignore_eos=draw(st.booleans()),
    )
    words = draw(some(st.lists(st.lists(few, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple), ()))
    seed = draw(st.integers(-(2**63), 2**63 - 1))
    request = Request("r", np.array(prompt, np.int32), params, seed, frozenset({1}), bad_word_token_ids=words)
    request.output_token_ids = output
    return request


CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Logarithms differ in their last bits between devices; on a CPU the twin computes exactly the same.
TOLERANCE = {"cpu": 0.0, "cuda": 1e-4}


def check_token(token_id: int, request: Request, logits: torch.Tensor, output: list[int], device: str) -> None:
    """Assert that the twin chooses this token after `output`; on a GPU a near-tie may go either way."""
    scores = expected_scores(request, logits.cpu(), output)
    assert scores[token_id] >= scores.max() - TOLERANCE[device]
    assert TOLERANCE[device] or token_id == scores.argmax()


def expected_scores(request: Request, logits: torch.Tensor, output: list[int]) -> torch.Tensor:
    """Return what the twin takes the largest of, [V], for the token after `output`."""
    params = request.params
    ends = end_token_ids(request) if len(output) < params.min_tokens else ()
    changed = reference.changed_logits(
        logits,
        request.prompt_token_ids.tolist(),
        output,
        bias=params.logit_bias,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        early_end_token_ids=ends,
        bad_words=request.bad_word_token_ids,
        allowed=params.allowed_token_ids,
    )
    position = len(request.prompt_token_ids) + len(output)
    truncation = (torch.tensor([params.top_k]), torch.tensor([params.top_p]), torch.tensor([params.min_p]))
    return draw_scores(
        changed.unsqueeze(0),
        torch.tensor([params.temperature]),
        torch.tensor([request.seed]),
        torch.tensor([position]),
        truncation,
    )[0]


def lengths(some_requests: list[Request]) -> list[int]:
    return [len(r.prompt_token_ids) + len(r.output_token_ids) for r in some_requests]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=sized(25, 80), deadline=None)
@given(st.lists(requests(), min_size=1, max_size=6), st.integers(0, 2**32), st.integers(1, 6))
def test_rows_with_any_parameters_share_steps(device, some_requests, seed, num_steps):
    sampler, generator = sampler_of(spec(), torch.device(device)), torch.Generator().manual_seed(seed)
    rows = random.Random(seed).sample(range(8), len(some_requests))
    # Previous owners of the rows must leave nothing behind.
    start(sampler, some_requests[::-1], rows)
    start(sampler, some_requests, rows)
    needs = sampler.rows.needs(np.array(rows))
    for _ in range(num_steps):
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator).to(device) * 2
        given_logits, positions = logits.clone(), lengths(some_requests)
        chosen = choose(sampler, logits, rows, positions)
        assert torch.equal(logits, given_logits), "the model's logits were changed"
        assert chosen == choose(sampler, logits, rows, positions, EVERYTHING), "what nobody needs is not neutral"
        for request, token_id, row_logits in zip(some_requests, chosen, logits, strict=True):
            check_token(token_id, request, row_logits, request.output_token_ids, device)
            request.output_token_ids.append(token_id)
        commit(sampler, rows, positions, [[token_id] for token_id in chosen], needs)


def test_a_row_without_end_tokens_keeps_token_0_beside_one_that_has_some():
    params = {"min_tokens": 9, "max_tokens": 9, "temperature": 0.0}
    without = Request("a", np.array([3], np.int32), SamplingParams(ignore_eos=True, **params), 0, frozenset({5}))
    with_some = Request("b", np.array([3], np.int32), SamplingParams(**params), 0, frozenset({5}))
    sampler, logits = sampler_of(spec(), torch.device("cpu")), torch.zeros(2, VOCAB_SIZE)
    logits[:, 0], logits[:, 5], logits[:, 7] = 2.0, 3.0, 1.0
    start(sampler, [without, with_some], [0, 1])
    assert choose(sampler, logits, [0, 1], [1, 1]) == [5, 0]
    logits[:, 5] = 0.0
    assert choose(sampler, logits, [0, 1], [1, 1]) == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=sized(15, 50), deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4), st.integers(0, 2**32), st.integers(1, 5))
def test_drafts_count_for_the_positions_after_them_alone(device, some_requests, seed, num_drafts):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sampler = sampler_of(spec(max_drafts=num_drafts), torch.device(device))
    rows = rng.sample(range(8), len(some_requests))
    start(sampler, some_requests, rows)
    needs = sampler.rows.needs(np.array(rows))
    width = 1 + num_drafts
    flat_rows = [row for row in rows for _ in range(width)]
    for _ in range(4):
        positions = lengths(some_requests)
        drafts = [[rng.randrange(10) for _ in range(num_drafts)] for _ in rows]
        flat_positions = [position + offset for position in positions for offset in range(width)]
        columns = (torch.tensor(values, device=device) for values in (rows, positions, drafts))
        sampler.remember(StepTokens(*columns), counts=False)
        logits = torch.randn(len(flat_rows), VOCAB_SIZE, generator=generator).to(device) * 2
        chosen = choose(sampler, logits, flat_rows, flat_positions)
        kept = []
        for index, (request, draft) in enumerate(zip(some_requests, drafts, strict=True)):
            for offset in range(width):
                at = index * width + offset
                output = request.output_token_ids + draft[:offset]
                check_token(chosen[at], request, logits[at], output, device)
            kept.append(rng.randint(1, width))
        new = [chosen[index * width : (index + 1) * width] for index in range(len(rows))]
        commit(sampler, rows, positions, new, needs, kept)
        for request, tokens, count in zip(some_requests, new, kept, strict=True):
            request.output_token_ids += tokens[:count]


def test_counts_are_not_kept_before_somebody_needs_them():
    sampler = sampler_of(spec(), CPU)
    start(sampler, [Request("r", np.array([1, 2], np.int32), SamplingParams(temperature=0.5, top_k=3), 0)], [0])
    assert sampler.history._counts is None
    assert sampler.rows.needs(np.array([0])) == Needs.DRAW | Needs.TRUNCATE
    start(sampler, [Request("r", np.array([1, 2], np.int32), SamplingParams(presence_penalty=0.5), 0)], [1])
    assert sampler.history._counts is not None
    assert sampler.rows.needs(np.array([0])) == Needs.DRAW | Needs.TRUNCATE, "the neighbours' needs are not its own"


def test_greedy_rows_need_nothing():
    sampler = sampler_of(spec(), CPU)
    start(sampler, [Request("r", np.array([1], np.int32), SamplingParams(temperature=0.0, top_k=3, top_p=0.5), 0)], [0])
    assert sampler.rows.needs(np.array([0])) == Needs.GREEDY
    lists = StartingRows(start_plan([Request("r", np.array([1], np.int32), SamplingParams(), 0)], [0]), CPU).lists
    assert lists is None


@pytest.mark.parametrize("num_entries", [1, 3, 64])
def test_rows_with_few_and_many_biases_share_a_step(num_entries):
    sampler, logits = sampler_of(spec(), CPU), torch.zeros(2, VOCAB_SIZE)
    greedy = {"temperature": 0.0}
    start(
        sampler, [Request("r", np.array([1], np.int32), SamplingParams(logit_bias={0: 5.0, 7: 6.0}, **greedy), 0)], [3]
    )
    wide = {t: 0.1 for t in range(num_entries)} | {69: 9.0}
    start(sampler, [Request("r", np.array([1], np.int32), SamplingParams(logit_bias=wide, **greedy), 0)], [5])
    assert choose(sampler, logits, [3, 5], [1, 1]) == [7, 69]


def test_a_long_bad_word_is_found_across_prompt_and_output():
    word = tuple(range(64))
    request = Request(
        "r", np.arange(60, dtype=np.int32), SamplingParams(temperature=0.0), 0, bad_word_token_ids=(word,)
    )
    sampler = sampler_of(spec(), CPU)
    start(sampler, [request], [2])
    needs = sampler.rows.needs(np.array([2]))
    for position in range(60, 64):
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, position], logits[0, 68] = 2.0, 1.0
        (token_id,) = choose(sampler, logits, [2], [position])
        assert token_id == (68 if position == 63 else position)
        commit(sampler, [2], [position], [[token_id]], needs)


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device():
    """Whatever the step's rows need: a wait would be an error here."""
    sampler, rows = sampler_of(spec(max_num_seqs=64, max_drafts=3), torch.device("cuda")), list(range(64))
    everything = SamplingParams(
        temperature=0.8,
        top_k=9,
        min_tokens=3,
        presence_penalty=0.5,
        logit_bias={3: 1.0},
        allowed_token_ids=[3, 4, 5],
        stop_token_ids=[4],
    )
    some_requests = [
        Request("r", np.array([1, 2], np.int32), everything, row, bad_word_token_ids=((1, 2),)) for row in rows
    ]
    start(sampler, some_requests, rows)
    needs = sampler.rows.needs(np.array(rows))
    assert needs == EVERYTHING
    on_device, positions = torch.tensor(rows, device="cuda"), torch.full((64,), 2, device="cuda")
    logits, drafts = torch.randn(64, VOCAB_SIZE, device="cuda"), torch.ones(64, 3, dtype=torch.int64, device="cuda")
    sampler.choose(logits, on_device, positions, needs)  # what is made once is made
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.remember(StepTokens(on_device, positions, drafts), counts=False)
        chosen = sampler.choose(logits, on_device, positions, needs)
        kept = StepTokens(on_device, positions, chosen.unsqueeze(1), torch.ones_like(chosen))
        sampler.remember(kept, counts=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


NUM_DRAWS = 20_000


def test_draws_with_everything_have_the_distribution_that_is_left():
    """20,000 draws of one row, each at another position; the history is the same for all of them."""
    from scipy import stats  # which takes seconds

    params = SamplingParams(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.4,
        frequency_penalty=0.6,
        presence_penalty=-0.3,
        logit_bias={t: (t % 7 - 3) / 2 for t in range(0, VOCAB_SIZE, 3)},
        allowed_token_ids=list(range(5, VOCAB_SIZE)),
    )
    request = Request("r", np.array([5, 6, 7, 8], np.int32), params, 77, bad_word_token_ids=((9,),))
    request.output_token_ids = [12, 12, 13, 40, 10]
    sampler, logits = sampler_of(spec(), CPU), torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(4)) * 1.5
    start(sampler, [request], [3])
    changed = reference.changed_logits(
        logits,
        request.prompt_token_ids.tolist(),
        request.output_token_ids,
        bias=params.logit_bias,
        repetition=1.4,
        frequency=0.6,
        presence=-0.3,
        early_end_token_ids=(),
        bad_words=[(9,)],
        allowed=params.allowed_token_ids,
    )
    left = TopPLogitsWarper(0.95)(None, (changed / 0.9).unsqueeze(0))[0].softmax(-1)
    positions = list(range(1000, 1000 + NUM_DRAWS))
    counts = np.bincount(
        choose(sampler, logits.expand(NUM_DRAWS, -1), [3] * NUM_DRAWS, positions), minlength=VOCAB_SIZE
    )
    expected = left.double().numpy() * NUM_DRAWS
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    some = expected > 0
    assert stats.chisquare(counts[some], expected[some] / expected.sum() * NUM_DRAWS).pvalue > 1e-4
    wrong = (logits / 0.9).softmax(-1).double().numpy() * NUM_DRAWS
    assert stats.chisquare(counts + 1, (wrong + 1) / (wrong + 1).sum() * (NUM_DRAWS + VOCAB_SIZE)).pvalue < 1e-4
