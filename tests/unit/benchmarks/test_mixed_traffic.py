"""Traffic of all lengths, and where the seconds of its steps go."""

import argparse
import asyncio
import random
import statistics

import mixed_traffic
import pytest
from device_speed import DeviceSpeed
from simulated_traffic import Hosts, simulate, times_of
from stage_limit import StageLimit
from step_breakdown import breakdown, merged, table
from traffic import TRAFFIC, Lengths, Traffic, parse_traffic
from traffic_page import request_table, seconds_table

from raypp import AsyncLLM
from raypp.api.timeline import Forward
from raypp.messages import BlockGroup, StepForm
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.step_budget import RooflineCost, StageTimes, StepPredictor, StepWork, amounts, step_ms
from raypp.testing import launch_in_threads


@pytest.mark.parametrize("text", ["512", "uniform:16:3000", "lognormal:400:1.2:3000"])
def test_lengths_are_what_their_text_says(text):
    lengths, rng = Lengths.parse(text), random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(2000)]
    assert str(lengths) == text
    assert max(drawn) <= lengths.most
    if text.startswith("lognormal"):
        assert 350 < statistics.median(drawn) < 450
        assert max(drawn) > 2500
    else:
        assert min(drawn) >= lengths.first


@pytest.mark.parametrize("text", ["", "0", "uniform:5:4", "uniform:5", "lognormal:4:5", "normal:1:2:3", "3000:16"])
def test_other_lengths_are_refused(text):
    with pytest.raises(ValueError, match="no lengths"):
        Lengths.parse(text)


def test_traffic_is_named_changed_or_made_up():
    assert parse_traffic("offline") == Traffic()
    assert parse_traffic("online-16,requests=3").requests == 3
    made = parse_traffic("rate=8,input=512,shared=0.5,turns=2,sampling=qwen3")
    assert (made.rate, made.input.most, made.shared, made.turns, made.sampling) == (8.0, 512, 0.5, 2, "qwen3")
    for each in TRAFFIC.values():
        assert parse_traffic(each.as_text()) == each
    for text, error in (("onlin", "no traffic"), ("offline,speed=3", "has no 'speed'")):
        with pytest.raises(ValueError, match=error):
            parse_traffic(text)


def test_prompts_share_their_beginnings():
    traffic = parse_traffic("requests=40,input=100,shared=0.9,output=3")
    prompts = [turn.token_ids for (turn,) in traffic.conversations(1000, 0)]
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt[:90]) for prompt in prompts}) <= 8
    assert len({tuple(prompt[90:]) for prompt in prompts}) == 40
    assert traffic.conversations(1000, 0) == traffic.conversations(1000, 0)


def test_shared_beginnings_count_once():
    traffic = parse_traffic("requests=40,input=100,shared=0.9,output=3,turns=2")
    # Of each conversation 10 tokens of its own, the second prompt, two answers; and of at most 8 beginnings 90.
    own = 40 * (10 + 100 + 2 * 3)
    assert own + 90 <= traffic.num_distinct_tokens(1000, 0) <= own + 8 * 90
    alone = parse_traffic("requests=4,input=100,output=3")
    assert 400 <= alone.num_distinct_tokens(1000, 0) <= 412


def test_a_share_of_the_kv_holds_one_request_at_least():
    args = argparse.Namespace(
        traffic={"a": parse_traffic("requests=100,input=160,output=8")}, seed=0, kv_share=0.5, max_model_len=400
    )
    assert 500 <= mixed_traffic.kv_blocks(args) <= 1 + 100 * 168 // 2 // 16 + 1
    args.kv_share = 0.001
    assert mixed_traffic.kv_blocks(args) == 1 + 25


def _forward(stage_index, step_id, start_us, end_us, decode_rows=0, prompt_tokens=0, form=StepForm.EAGER):
    work = StepWork(decode_rows, decode_rows, 10 * decode_rows, prompt_tokens, prompt_tokens, 0, 1)
    return Forward(stage_index, step_id, start_us, end_us, 0, 1, work.num_tokens, form, work)


def test_every_second_is_somewhere():
    model, speed = load_model_config(resolve_model_path("tiny")), DeviceSpeed(1e12, 1e12)
    limits = [StageLimit(model, 0, 2, False, 4, speed), StageLimit(model, 2, 4, True, 4, speed)]
    forwards = [
        _forward(0, 0, 0, 100, prompt_tokens=9),
        _forward(0, 1, 100, 200, decode_rows=2, prompt_tokens=9),
        _forward(0, 2, 500, 600, decode_rows=3, form=StepForm.FULL_GRAPH),
        _forward(1, 0, 100, 300, prompt_tokens=9),
        _forward(1, 1, 300, 400, decode_rows=2, prompt_tokens=9),
        _forward(1, 2, 650, 700, decode_rows=3, form=StepForm.FULL_GRAPH),
    ]
    figures = breakdown(forwards, limits)
    first, last = figures["stages"]
    assert figures["seconds"] == pytest.approx(700e-6)
    for stage, computing, beside, idle in ((first, 300, 250, 150), (last, 350, 200, 150)):
        assert stage["computing_s"] == pytest.approx(computing / 1e6)
        assert stage["waiting_beside_another_s"] == pytest.approx(beside / 1e6)
        assert stage["waiting_with_all_s"] == pytest.approx(idle / 1e6)
        assert sum(of["seconds"] for of in stage["steps"].values()) == pytest.approx(computing / 1e6)
        assert set(stage["steps"]) == {"prompts, eager", "mixed, eager", "decode, full graph"}
    assert figures["slowest_stages_s"] == pytest.approx(400e-6)
    assert figures["bubble_fraction"] == pytest.approx(1 - (200 + 300) / 1000)
    assert len(table(figures)) == 1 + 2 * 4
    rows = list(seconds_table({"some": [{"steps": figures}]}))
    assert len(rows) == 2 + 2 * (3 + 2 + 1)
    assert len({row.count("|") for row in rows}) == 1
    assert rows[2].startswith("| some | 0 | decode, full graph | 1 | 0.00 | 0.1 (0.1) | 3.0 | 0 |")
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


@pytest.mark.full
def test_an_engine_is_measured(capsys):
    texts = ["requests=6,input=uniform:3:40,output=uniform:2:9", "rate=80,requests=4,input=9,output=4,turns=2"]
    args = argparse.Namespace(traffic={text: parse_traffic(text) for text in texts}, runs=1, seed=0)

    async def run():
        async with await AsyncLLM.create(
            "tiny", launch=launch_in_threads, skip_tokenizer_init=True, num_stages=2, max_num_seqs=8
        ) as llm:
            return await mixed_traffic.measure_engine(args, llm)

    found = asyncio.run(run())
    (offline,), (online,) = found[texts[0]], found[texts[1]]
    assert (offline["requests"], online["requests"]) == (6, 8)
    assert "itl_ms" in online
    assert "itl_ms" not in offline
    assert online["num_prefix_hit_tokens"] >= 0
    for figures in (offline, online):
        works = {forward.step_id: forward.work for forward in figures["forwards"]}
        assert figures["ttft_ms"]["median"] < figures["e2e_ms"]["median"]
        assert sum(work.num_prompt_tokens for work in works.values()) <= figures["prompt_tokens"]
        assert {forward.stage_index for forward in figures["forwards"]} == {0, 1}
    rows = list(request_table(found))
    assert len(rows) == 4
    assert len({row.count("|") for row in rows}) == 1
    num_first = sum(work.num_logits for work in {f.step_id: f.work for f in offline["forwards"]}.values())
    assert num_first >= offline["output_tokens"]


HOSTS = Hosts(0.5)


def _simulated(text="requests=120,input=uniform:16:3000,output=uniform:16:128", hosts=HOSTS, **limits):
    times = [StageTimes(0.3, 0.6, 1.7, 0.001, 0.005, 2e-5, 5e-7)] * 2
    settings = {
        "num_stages": 2,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 8192,
        "max_model_len": 4096,
        "block_size": 16,
        "groups": (BlockGroup(8192),),
        "enable_prefix_caching": False,
    }
    traffic = parse_traffic(text)
    # The scheduler begins with other ideas of it.
    predictor = StepPredictor(RooflineCost(180.0), [StageTimes(0.1, 0.2, 1.0, 0.001, 0.002, 1e-5, 3e-7)] * 2)
    return simulate(traffic, SchedulerLimits(**(settings | limits)), times, predictor, hosts)


def test_simulated_steps_are_of_equal_time():
    """Prompts that come in lumps, as rows end, do not make stages wait for each other."""
    found = _simulated()
    assert min(found["busy"]) > 0.86, "0.73 when tokens alone bound a step"
    assert found["itl_ms"]["p99"] < 50, "100 likewise"


def test_hosts_that_start_prompts_slowly_or_pause_keep_first_tokens_waiting():
    text = "requests=60,rate=20,input=uniform:64:1500,output=uniform:8:64"
    quick, slow, paused = (
        _simulated(text, hosts)["ttft_ms"] for hosts in (Hosts(0.5), Hosts(0.5, 12.0), Hosts(0.5, pause_ms=300.0))
    )
    assert slow["mean"] > 1.2 * quick["mean"]
    assert paused["p99"] > quick["p99"] + 150


def test_times_are_fitted_to_the_steps_of_a_run():
    truth = [StageTimes(0.4, 0.8, 1.2, 0.003, 0.02, 3e-5, 1e-6), StageTimes(0.2, 0.4, 0.9, 0.002, 0.03, 1e-5, 2e-6)]
    roofline, rng = RooflineCost(180.0), random.Random(0)
    spans = []
    for step_id in range(300):
        rows, tokens = rng.randint(0, 64), rng.choice([0, rng.randint(1, 2000)])
        work = StepWork(rows, rows, rows * rng.randint(10, 2000), tokens, tokens, tokens * rng.randint(1, 4000), rows)
        for index, times in enumerate(truth):
            took_us = round(step_ms(times, amounts(work, roofline)) * 1e3)
            spans.append([index, step_id, 0, took_us, 0, rows + 1, work.num_tokens, 0, list(work), 0])
    estimates = [StageTimes(0.1, 0.1, 1.0, 0.001, 0.01, 1e-5, 1e-6)] * 2
    found = times_of({"some run": spans[:300], "another": spans[300:]}, roofline, estimates)
    for index, _, _, took_us, _, _, _, _, work, _ in spans:
        assert step_ms(found[index], amounts(StepWork(*work), roofline)) == pytest.approx(took_us / 1e3, rel=0.25)


def test_the_time_between_tokens_can_be_bounded():
    found = _simulated(max_itl_ms=12.0)
    assert found["itl_ms"]["median"] <= 12.5  # with the hosts' half a millisecond
    assert found["itl_ms"]["p99"] <= 15, "a row that changes its cohort waits for a part of a round besides"
