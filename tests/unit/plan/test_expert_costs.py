"""Layers with experts: what a step costs by its tokens, where stages are cut, and when drafts pay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from expert_models import expert_model

from raypp.config.engine_config import EngineConfig
from raypp.models.config import ModelConfig
from raypp.models.expert_config import ExpertConfig
from raypp.models.quantization import Quantization
from raypp.plan.cost_model import StepCosts, estimated_costs
from raypp.plan.graph_plan import graph_spec
from raypp.plan.hardware import Gpu, StageGpus
from raypp.plan.layer_partition import LayerRoom, costs_of, fastest_partition
from raypp.plan.speculation_plan import draft_cost
from raypp.plan.stage_memory import stage_weight_bytes
from raypp.scheduler.drafts import AdaptiveDrafts

FP8 = Quantization(format="fp8", block=(128, 128))
LADDER = (0, 2, 4, 8)


def _chosen(model: ModelConfig, num_rows: int, rate: float) -> int:
    """Return the K that is chosen once 60 steps have accepted drafts at a rate, as long runs of them do on average."""
    policy = AdaptiveDrafts(LADDER, 1, draft_cost(model, 2, "cuda"))
    rng, num_drafts = np.random.default_rng(0), 0
    for _ in range(60):
        num_compared = max(num_drafts, 1)
        accepted = rng.random((num_rows, num_compared)) < rate
        matched = np.cumprod(accepted, axis=1).sum(axis=1).astype(np.int32)
        policy.note_result(0, num_drafts, np.full(num_rows, num_compared, np.int32), matched)
        num_drafts = policy.num_drafts(0, num_rows, 8)
    return num_drafts


@pytest.mark.parametrize("num_rows", [1, 16, 64])
@pytest.mark.parametrize("quantization", [None, FP8])
def test_drafts_of_a_model_with_experts(num_rows: int, quantization: Quantization | None) -> None:
    model = expert_model(quantization=quantization)
    assert _chosen(model, num_rows, 0.0) == 0
    assert _chosen(model, num_rows, 0.02) == 0
    assert _chosen(model, num_rows, 0.7) > 0


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_a_draft_is_not_free_where_it_reads_more_experts(num_rows: int) -> None:
    sparse, dense = draft_cost(expert_model(), 2, "cuda"), draft_cost(expert_model(experts=None), 2, "cuda")
    assert dense(3 * num_rows) / dense(num_rows) < 1.05
    assert sparse(3 * num_rows) / sparse(num_rows) > 1.3
    # What a dense model is worth drafting for is not worth it here: an acceptance of 0.1, 8 rows and two drafts.
    assert _chosen(expert_model(experts=None), 8, 0.15) > 0
    assert _chosen(expert_model(), 8, 0.15) == 0


def test_dense_models_cost_what_they_did() -> None:
    cost = draft_cost(expert_model(experts=None), 2, "cuda")
    assert (cost.free_tokens, cost.expert_time) == (184, 0)
    assert draft_cost(expert_model(experts=None), 4, "cpu", 20).free_tokens == 20
    narrow = draft_cost(expert_model(experts=None, quantization=FP8), 2, "cuda")
    assert 92 < narrow.free_tokens < 184, "a token takes as long as ever, reading its weights does not"


def test_a_layer_costs_more_the_more_rows_choose_its_experts() -> None:
    model = expert_model(experts=replace(_experts(), dense_layers=frozenset({0})))
    one, many = (estimated_costs(model, 2, on_gpu=True, num_rows=rows).layers for rows in (1, 64))
    assert one[0] == many[0]
    assert many[1] > 4 * one[1]
    assert len(set(many[1:])) == 1


def test_the_lm_head_weighs_less_the_more_experts_are_read() -> None:
    """The last stage of a pipeline that few rows use holds fewer layers than one that many use."""
    gpus = [StageGpus(Gpu(80 << 30))] * 2
    few, many = (
        fastest_partition(
            costs_of(
                EngineConfig.from_flat("tiny", num_stages=2, max_num_seqs=seqs), expert_model(), None, 2, "cuda", gpus
            )
        )
        for seqs in (2, 256)
    )
    assert few[1] < many[1] <= 24


def test_dense_layers_and_sparse_ones_are_cut_by_their_own_cost_and_bytes() -> None:
    model = expert_model(num_layers=8, experts=replace(_experts(), dense_layers=frozenset(range(4))))
    costs = estimated_costs(model, 2, on_gpu=False, num_rows=32)
    [first, second] = fastest_partition([costs] * 2)
    assert first > second, "the dense layers come first"
    assert costs.of_stages([first, second]) == [
        sum(costs.layers[:first]),
        pytest.approx(sum(costs.layers[first:]) + costs.last_stage),
    ]
    uneven, even = stage_weight_bytes(model, [6, 2], 2), stage_weight_bytes(model, [4, 4], 2)
    assert sum(uneven) == sum(even)
    assert uneven[0] > even[0]


def test_the_memory_holds_some_layers_and_not_others() -> None:
    room = LayerRoom(layer_bytes=[1, 1, 1, 10], stage_bytes=[3, 11])
    assert fastest_partition([StepCosts(layers=[1.0] * 4)] * 2, room) == [2, 2]
    assert fastest_partition([StepCosts(layers=[1.0, 1.0, 1.0, 9.0])] * 2, replace(room, stage_bytes=[3, 10])) == [3, 1]
    assert room.most_layers() == [3, 3]


def test_pieces_are_recorded_by_what_a_token_is_multiplied_by() -> None:
    config = EngineConfig.from_flat("tiny", max_num_batched_tokens=8192)
    models = (expert_model(hidden_size=4096), expert_model(hidden_size=4096, experts=None))
    sparse, dense = (graph_spec(config, model, "cuda", 2).max_piecewise_tokens for model in models)
    assert sparse == dense == 1792, "eight experts of 768 are an MLP of 6,144"


def _experts() -> ExpertConfig:
    experts = expert_model().experts
    assert experts is not None
    return experts
