"""Measures layers on the device that a stage would get, in a process that Ray places like a stage."""

from __future__ import annotations

import ray

from raypp.actors.deadline import Deadline
from raypp.actors.engine_actors import connect_and_plan
from raypp.actors.placement import alive_nodes, check_capacity
from raypp.actors.remote_errors import raypp_errors
from raypp.config.engine_config import EngineConfig
from raypp.errors import ConfigError
from raypp.plan.engine_plan import EnginePlan
from raypp.plan.graph_plan import max_step_rows
from raypp.plan.layer_partition import prompt_tokens_of_step
from raypp.plan.measure import MeasuredCosts, default_context_len, measure_costs
from raypp.plan.tuning import Tuning, tune_partition
from raypp.sampling_params import SamplingParams


def tune_engine(
    config: EngineConfig, *, num_rows: int | None = None, context_len: int | None = None, temperature: float = 1.0
) -> Tuning:
    """Measure the configured model on one stage's device, and cut its layers by that.

    Args:
        config: Which model, how many stages, what a stage asks Ray for, and how many prompt tokens there are for every
            token of an answer: as many are computed in each step.
        num_rows: Of a decode step; None: the most that a step of this configuration holds.
        context_len: Tokens of each row; None: what they have when the KV cache is half full.
        temperature: Of the sampling; 0 is greedy.

    Raises:
        ConfigError, ModelLoadError, ResourceError: it cannot run, or not at this size.
        DeadlineError: it took longer than start_timeout_s.
    """
    deadline = Deadline(config.faults.start_timeout_s)
    plan, hardware, cluster = connect_and_plan(config, deadline)
    try:
        num_rows = num_rows or max_step_rows(config)
        context_len = context_len or default_context_len(plan, num_rows)
        if min(num_rows, context_len) < 1:
            raise ConfigError("nothing can be measured", got=f"{num_rows} rows of {context_len} tokens")
        params = SamplingParams(temperature=temperature)
        num_prompt_tokens = prompt_tokens_of_step(config, num_rows)
        measured = _measure_on_ray(plan, num_rows, context_len, params, num_prompt_tokens, deadline)
    finally:
        cluster.disconnect()
    return tune_partition(plan, hardware, measured)


def _measure_on_ray(
    plan: EnginePlan,
    num_rows: int,
    context_len: int,
    params: SamplingParams,
    num_prompt_tokens: int,
    deadline: Deadline,
) -> MeasuredCosts:
    resources = plan.stage_resources()
    check_capacity(alive_nodes(), [resources], "pack")
    task = ray.remote(_measure).options(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), max_retries=0)
    with raypp_errors(f"start_timeout_s={deadline.seconds:g}"):
        ref = task.remote(plan, num_rows, context_len, params, num_prompt_tokens)
        measured: MeasuredCosts = ray.get(ref, timeout=deadline.remaining_s)
    return measured


def _measure(
    plan: EnginePlan, num_rows: int, context_len: int, params: SamplingParams, num_prompt_tokens: int
) -> MeasuredCosts:
    return measure_costs(
        plan, num_rows=num_rows, context_len=context_len, params=params, num_prompt_tokens=num_prompt_tokens
    )
