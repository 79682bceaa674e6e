"""Bytes, parameters and operations of layers, against published numbers and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_models import LARGE, expert_model

from raypp.models.expert_config import ExpertConfig
from raypp.models.member_sizes import of_one_member
from raypp.models.quantization import Quantization
from raypp.models.sizes import (
    WeightReads,
    embedding_bytes,
    kv_bytes_per_token,
    layer_sizes,
    lm_head_bytes,
    mlp_width,
    total_reads,
)
from raypp.plan.measure import model_of_alike_layers

FP8 = Quantization(format="fp8", block=(128, 128), skipped=("lm_head", "mlp.gate"))
INT4 = Quantization(format="awq", block=(1, 128), has_zeros=True)


@pytest.mark.parametrize(("changes", "total", "active"), [({}, 30.5e9, 3.3e9), (LARGE, 235e9, 22e9)])
def test_parameters_are_those_that_the_models_are_named_after(
    changes: dict[str, Any], total: float, active: float
) -> None:
    config = expert_model(**changes)
    sizes = layer_sizes(config, 2)
    besides = (embedding_bytes(config, 2) + lm_head_bytes(config, 2)) // 2
    assert sum(size.num_parameters for size in sizes) + besides == pytest.approx(total, rel=0.005)
    assert sum(size.num_active for size in sizes) + besides == pytest.approx(active, rel=0.02)
    assert sum(size.weight_bytes for size in sizes) == 2 * sum(size.num_parameters for size in sizes)


def test_the_experts_that_a_step_reads() -> None:
    size = layer_sizes(expert_model(), 2)[0]
    one_expert = 3 * 2048 * 768 * 2
    shared = 2 * (2048 * (4096 + 1024) + 4096 * 2048 + 128 * 2048 + 2 * 2048 + 2 * 128)
    assert size.reads.of(0) == shared
    assert size.reads.of(1) == pytest.approx(shared + 8 * one_expert)
    assert size.reads.of(2) == pytest.approx(shared + (16 - 8 * 8 / 128) * one_expert), "both may choose the same one"
    assert size.reads.of(10_000) == pytest.approx(size.weight_bytes)
    assert size.weight_bytes == shared + 128 * one_expert
    assert size.flops(3) == 2 * 3 * (shared + 8 * one_expert) / 2


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "num_members"), [(128, 8, 2), (128, 8, 4), (256, 8, 8), (32, 4, 16)]
)
def test_the_whole_experts_that_the_fullest_member_reads(num_experts: int, num_chosen: int, num_members: int) -> None:
    """Against choices at random: all members wait for the one with most."""
    reads = WeightReads(0, num_experts // num_members, num_chosen / num_experts, num_experts, num_members)
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (1, 16, 64, 256):
        most = 0.0
        for _ in range(200):
            ranks = torch.rand(num_tokens, num_experts, generator=generator)
            chosen = ranks.topk(num_chosen, dim=1).indices.unique()
            most += float((chosen // (num_experts // num_members)).bincount().max()) / 200
        assert reads.of(num_tokens) == pytest.approx(most, rel=0.12)
    assert reads.of(0) == 0
    parts = WeightReads(0, num_experts, num_chosen / num_experts)
    assert reads.of(1) > parts.of(1) / num_members


def test_whole_experts_of_a_member() -> None:
    one, part = expert_model(), of_one_member(expert_model(), 4, whole_experts=True)
    (size,), (member, *_) = layer_sizes(one, 2)[:1], layer_sizes(part, 2)
    assert member.reads.experts == size.reads.experts // 4
    assert member.reads.of(10_000) == member.weight_bytes
    parts = layer_sizes(of_one_member(expert_model(), 4), 2)[0]
    assert (member.num_parameters, member.num_active) == (parts.num_parameters, parts.num_active)


def test_layers_differ() -> None:
    experts = ExpertConfig(
        num_experts=4, num_chosen=2, intermediate_size=768, normalizes=True, dense_layers=frozenset({0, 2})
    )
    config = expert_model(num_layers=3, experts=experts)
    dense, sparse, other_dense = layer_sizes(config, 2)
    assert dense == other_dense != sparse
    assert not dense.reads.experts
    attention = sparse.reads.always - 2 * 4 * 2048
    assert dense.weight_bytes == attention + 2 * 3 * 2048 * 6144
    assert mlp_width(config) == 3 * 6144, "of the widest layer"
    assert mlp_width(replace(config, experts=replace(experts, dense_layers=frozenset()))) == 2 * (2 * 768 + 2048)


@pytest.mark.parametrize(("quantization", "share"), [(FP8, 0.5001), (INT4, 0.2617)])
def test_quantized_weights_take_fewer_bytes_of_a_gpu(quantization: Quantization, share: float) -> None:
    plain, narrow = expert_model(), expert_model(quantization=quantization)
    wide_bytes, narrow_bytes = (layer_sizes(config, 2)[5].reads for config in (plain, narrow))
    assert narrow_bytes.experts / wide_bytes.experts == pytest.approx(share, rel=1e-3)
    others = 2 * (128 * 2048 + 2 * 2048 + 2 * 128)  # the router and the norms stay
    assert (narrow_bytes.always - others) / (wide_bytes.always - others) == pytest.approx(share, rel=1e-3)
    assert layer_sizes(narrow, 2)[5].num_parameters == layer_sizes(plain, 2)[5].num_parameters


def test_a_layer_of_modules_that_are_skipped_is_larger_and_measured_apart() -> None:
    skipping = replace(FP8, skipped=("lm_head", "re:.*layers\\.1\\.self_attn.*", "model.layers.2"))
    config = expert_model(num_layers=4, quantization=skipping)
    sizes = layer_sizes(config, 2)
    assert sizes[0] == sizes[3]
    assert sizes[0].weight_bytes < sizes[1].weight_bytes < sizes[2].weight_bytes
    assert sizes[2] == layer_sizes(expert_model(), 2)[2]
    for index, size in enumerate(sizes):
        assert set(layer_sizes(model_of_alike_layers(config, index, 9), 2)) == {size}


def test_a_model_of_alike_layers_has_experts_or_not() -> None:
    experts = ExpertConfig(
        num_experts=4, num_chosen=2, intermediate_size=768, normalizes=True, dense_layers=frozenset({0})
    )
    config = expert_model(experts=experts)
    assert model_of_alike_layers(config, 0, 3).experts is None
    sparse = model_of_alike_layers(config, 1, 3)
    assert set(layer_sizes(sparse, 2)) == {layer_sizes(config, 2)[1]}


def test_parts_add_up() -> None:
    total = total_reads([WeightReads(5), WeightReads(3, 100, 0.25), WeightReads(1, 50, 0.25)])
    assert total == WeightReads(9, 150, 0.25)
    assert total.of(1) == 9 + 37.5
    assert total_reads([]).of(7) == 0
    assert kv_bytes_per_token(expert_model(), 2) == [2 * 4 * 128 * 2] * 48
