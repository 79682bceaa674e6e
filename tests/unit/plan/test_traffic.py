"""Layers per stage for traffic with prompts, and what a log says of it."""

import json

import pytest

from raypp.cli.tune import read_traffic
from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.cost_model import estimated_costs
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.plan.layer_partition import prompt_tokens_of_step
from raypp.plan.measure import measure_costs
from raypp.sampling_params import SamplingParams

MACHINE = Hardware(num_cpu_cores=2, memory_bytes=64 << 30)


def _plan(**settings):
    return plan_engine(EngineConfig.from_flat("tiny", num_stages=2, **settings), MACHINE)


def test_the_more_prompts_the_more_layers_has_the_last_stage():
    cuts = [[s.num_layers for s in _plan(prompt_tokens_per_output=ratio).stages] for ratio in (0, 1, 5, 100)]
    assert cuts[0] == [s.num_layers for s in _plan().stages] == [4, 2]
    assert cuts[-1] == [3, 3]
    assert [last for _, last in cuts] == sorted(last for _, last in cuts)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_prompts_cost_layers_and_not_the_head(on_gpu):
    model = _plan().model
    decode, mixed = (
        estimated_costs(model, 2, on_gpu=on_gpu, num_rows=8, num_prompt_tokens=tokens) for tokens in (0, 4000)
    )
    assert decode == estimated_costs(model, 2, on_gpu=on_gpu, num_rows=8)
    assert mixed.last_stage == decode.last_stage
    assert all(after > before for before, after in zip(decode.layers, mixed.layers, strict=True))


def test_a_step_has_room_for_so_many_prompt_tokens():
    config = EngineConfig.from_flat("tiny", prompt_tokens_per_output=4.6, max_num_batched_tokens=300)
    assert [prompt_tokens_of_step(config, rows) for rows in (1, 10, 128)] == [5, 46, 300 - 128]
    assert prompt_tokens_of_step(EngineConfig.from_flat("tiny"), 100) == 0


def test_a_log_has_the_usage_of_answers_in_any_of_their_forms(tmp_path):
    usages = [
        {"prompt_tokens": 100, "completion_tokens": 10},
        {"prompt_tokens": 300, "completion_tokens": 30, "prompt_tokens_details": {"cached_tokens": 200}},
        {"prompt_tokens": 40, "completion_tokens": 0, "prompt_tokens_details": None},
    ]
    forms = [usages[0], {"id": "x", "usage": usages[1]}, {"custom_id": "a", "response": {"body": {"usage": usages[2]}}}]
    failed = [{"custom_id": "b", "response": None, "error": {"code": 1}}]
    failed += [{"custom_id": "c", "response": {"body": {"error": {"code": 400}}}}]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, [*forms, *failed])) + "\n\n")
    traffic = read_traffic(path)
    assert (traffic.num_requests, traffic.prompt_tokens) == (3, 80)
    assert traffic.output_tokens == pytest.approx(40 / 3)
    assert traffic.prompt_tokens_per_output == pytest.approx(6.0)
    assert traffic.context_len == pytest.approx((10 * 105 + 30 * 315) / 40)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no token of an answer"),
        ('{"prompt_tokens": 5, "completion_tokens": 0}', "no token of an answer"),
        ("hello", "says nothing of tokens"),
        ('{"prompt_tokens": 5}', "line 1 of"),
        ("[1]", "says nothing of tokens"),
        ('{"prompt_tokens": -5, "completion_tokens": 1}', "impossible"),
        ('{"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}', "impossible"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, text, words):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_traffic(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_traffic(tmp_path / "none.jsonl")


@pytest.mark.full
def test_steps_with_prompts_are_measured():
    plan = _plan(max_model_len=256)
    measured = measure_costs(
        plan, num_rows=3, context_len=16, params=SamplingParams(temperature=0.0), num_prompt_tokens=200
    )
    decoding = measure_costs(plan, num_rows=3, context_len=16, params=SamplingParams(temperature=0.0))
    assert (measured.num_prompt_tokens, decoding.num_prompt_tokens) == (200, 0)
    assert measured.layers_ms[0] > 2 * decoding.layers_ms[0]
    assert measured.step_text == "steps of 3 decode rows of 16 tokens and 200 tokens of a prompt"
