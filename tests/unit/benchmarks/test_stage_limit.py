"""The physical limit of a forward, and which forwards it is asked of."""

from dataclasses import replace

import numpy as np
import pytest
from device_speed import DeviceSpeed, measure_device_speed
from pipeline_timeline import full_decode_steps
from stage_limit import StageLimit, Work, forward_work

from raypp.api.timeline import Forward
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.models.sizes import kv_bytes_per_token, layer_sizes, lm_head_bytes
from raypp.scheduler.step_budget import StepWork, prompt_pairs, step_work


def _forward(step_id, num_rows, num_tokens, cohort=0, stage_index=0):
    return Forward(stage_index, step_id, 10 * step_id, 10 * step_id + 5, cohort, num_rows, num_tokens)


@pytest.fixture(scope="module")
def shapes():
    return load_model_config(resolve_model_path("tiny"))


def test_reading_bounds_a_decode_step_and_the_last_stage_reads_the_head(shapes):
    speed = DeviceSpeed(read_bytes_per_s=1e9, flops_per_s=1e15)
    done = StepWork(num_decode_rows=4, num_decode_tokens=4, num_decode_kv=402, num_logits=4)
    work = forward_work(_forward(0, num_rows=4, num_tokens=4)._replace(work=done))
    assert work == Work(num_tokens=4, num_kv_tokens=402, num_attended=402, num_logits=4, num_rows=4)
    layers = 3 * (layer_sizes(shapes, 2)[0].weight_bytes + 402 * kv_bytes_per_token(shapes, 2)[0])
    assert StageLimit(shapes, 0, 3, False, 2, speed).seconds(work) == pytest.approx(layers / 1e9)
    head = lm_head_bytes(shapes, 2)
    assert StageLimit(shapes, 0, 3, True, 2, speed).seconds(work) == pytest.approx((layers + head) / 1e9)


def test_arithmetic_bounds_a_prompt(shapes):
    speed = DeviceSpeed(read_bytes_per_s=1e15, flops_per_s=1e9)
    work = Work(num_tokens=10, num_kv_tokens=10, num_attended=55, num_logits=0)
    flops = (
        2 * 10 * layer_sizes(shapes, 2)[0].weight_bytes / 2
        + 4 * shapes.attention[0].num_heads * shapes.attention[0].head_dim * 55
    )
    assert StageLimit(shapes, 0, 1, False, 2, speed).seconds(work) == pytest.approx(flops / 1e9)


def test_decode_rows_read_no_more_than_a_window_and_kv_may_have_fewer_bits(shapes):
    speed = DeviceSpeed(read_bytes_per_s=1e9, flops_per_s=1e15)
    near = replace(shapes, attention=tuple(replace(layer, window=100) for layer in shapes.attention))
    weights = layer_sizes(shapes, 2)[0].weight_bytes
    for model, kv_bytes, num_read in ((shapes, 2, 402), (near, 2, 200), (near, 1, 200), (near, 0, 200)):
        found = StageLimit(model, 0, 1, False, 2, speed, kv_bytes).seconds(Work(2, 402, 402, 2, 2))
        read = num_read * kv_bytes_per_token(shapes, kv_bytes or 2)[0]
        assert found == pytest.approx((weights + read) / 1e9)


def test_a_prompt_attends_to_all_before_it_in_whatever_chunks():
    works = [
        step_work(0, *(np.array([number], np.int32) for number in (count, start)), np.array([False]))
        for count, start in ((6, 0), (3, 6), (1, 9))
    ]
    assert [work.num_prompt_kv for work in works] == [6, 9, 10]
    assert [work.num_prompt_pairs for work in works] == [prompt_pairs(0, 6), prompt_pairs(6, 3), prompt_pairs(9, 1)]
    assert sum(work.num_prompt_pairs for work in works) == 55


def test_only_full_decode_steps_are_looked_at():
    forwards = [
        _forward(0, 4, 9),
        _forward(1, 4, 4),
        _forward(2, 3, 3),
        _forward(3, 2, 2, cohort=1),
        _forward(4, 4, 4, stage_index=1),
    ]
    assert [forward.step_id for forward in full_decode_steps(forwards)] == [1, 3, 4]


@pytest.mark.full
def test_a_device_is_measured_in_a_process_of_its_own():
    speed = measure_device_speed("cpu", "float32")
    assert speed.read_bytes_per_s > 1e8
    assert speed.flops_per_s > 1e8
