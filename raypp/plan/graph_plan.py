"""CUDA graphs before there are any: which steps are worth recording, and what the recordings will take.

Measured on an H200 with torch 2.11; see docs/design/0042 and 0043.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from raypp.config.engine_config import EngineConfig
from raypp.models.config import ModelConfig
from raypp.models.sizes import decode_width, layer_sizes, logit_row_bytes, mlp_width, qkv_width
from raypp.stage.stage_spec import GraphSpec
from raypp.stage.step_sizes import StepSizes

_BREAK_EVEN = 200e9
"""Weights of a layer that a token is multiplied by, times tokens of a step, from which on the device takes longer for
the layer than a busy or slow host does to launch it: about 540 us for two times as many operations. A quick one that
has nothing else to do takes half."""
_PIECEWISE_TOKENS = (128, 2048)  # at least, at most
_MEMBERS_SLOWER = 2.5
"""So much longer the hosts of members take for a layer, whatever their number: each sum waits for the slowest of them.
Four H200: 1.4 ms for a layer of Qwen3-8B, 2.1 ms of Qwen3-30B-A3B."""
_PIECEWISE_GRAIN = 128

_PIECE_BYTES = 640 << 10  # a graph between two attention calls
_BODY_BYTES = 3 << 20  # a graph of a whole stage, without its sampling
_TAIL_BYTES = 1 << 20  # one of sampling, or of reports
_NUM_TAILS = 2
_KERNEL_BYTES = 256 << 20  # that are loaded meanwhile


def graph_spec(
    config: EngineConfig, model: ModelConfig, device: str, dtype_bytes: int, gpu_memory_bytes: int = 0
) -> GraphSpec:
    """Return which steps are recorded and replayed.

    Args:
        config: What is asked for.
        model: Its sizes.
        device: `cpu` or `cuda`.
        dtype_bytes: Of weights and activations.
        gpu_memory_bytes: Of a GPU. What no share takes of it is room for recordings that are larger than planned.
    """
    mode = config.graphs.mode
    if mode == "auto":
        mode = "full_and_piecewise" if device == "cuda" else "none"
    has_pieces = mode in ("piecewise", "full_and_piecewise")
    spec = GraphSpec(
        has_full=mode in ("full", "full_and_piecewise"),
        max_piecewise_tokens=_max_piecewise_tokens(config, model) if has_pieces else 0,
        has_reports=config.model.max_logprobs != 0,
        is_required=config.graphs.mode != "auto",
        compile_backend="inductor" if config.graphs.compile else None,
        compile_threads=config.graphs.compile_threads,
        debug_every=config.graphs.debug_every,
    )
    if device == "cpu":
        return spec
    planned_bytes = _graph_bytes(step_sizes(config, spec), config, model, dtype_bytes)
    spare_bytes = int(gpu_memory_bytes * config.parallel.stage_num_gpus * (1 - config.cache.gpu_memory_utilization))
    return replace(spec, planned_bytes=planned_bytes, max_bytes=planned_bytes + spare_bytes)


def max_step_rows(config: EngineConfig) -> int:
    """Return the most rows of one step."""
    return -(-config.scheduler.max_num_seqs // config.parallel.num_stages)


def step_sizes(config: EngineConfig, spec: GraphSpec) -> StepSizes:
    """Return what every stage is to record."""
    return StepSizes.wanted(
        spec,
        config.speculative.ladder,
        max_step_rows=max_step_rows(config),
        max_step_tokens=config.scheduler.max_num_batched_tokens,
    )


def describe_graphs(config: EngineConfig, spec: GraphSpec) -> dict[str, Any]:
    """Return the sizes and the planned memory, as plain data."""
    sizes = step_sizes(config, spec)
    return {
        "full_rows": {
            str(num_drafts): sorted(size.num_rows for size in sizes.full if size.num_drafts == num_drafts)
            for num_drafts in sorted({size.num_drafts for size in sizes.full})
        },
        "piecewise_tokens": sorted(sizes.piecewise),
        "compile": spec.compile_backend is not None,
        "planned_bytes": spec.planned_bytes,
    }


def _max_piecewise_tokens(config: EngineConfig, model: ModelConfig) -> int:
    asked, most = config.graphs.max_piecewise_tokens, config.scheduler.max_num_batched_tokens
    if asked is None:
        at_least, at_most = _PIECEWISE_TOKENS
        num_active = sum(size.num_active for size in layer_sizes(model, 1)) / model.num_layers
        tokens = _BREAK_EVEN / num_active
        if model.num_members > 1:
            tokens, at_most = _MEMBERS_SLOWER * tokens, most
        asked = min(max(math.ceil(tokens / _PIECEWISE_GRAIN) * _PIECEWISE_GRAIN, at_least), at_most)
    return min(asked, most)


def _graph_bytes(sizes: StepSizes, config: EngineConfig, model: ModelConfig, dtype_bytes: int) -> int:
    """Return what all recordings of a stage take, and the buffers around them; 0 if there are none."""
    if not sizes.full and not sizes.piecewise:
        return 0
    num_layers = math.ceil(model.num_layers / config.parallel.num_stages)
    graphs = len(sizes.piecewise) * (num_layers + 1) * _PIECE_BYTES
    graphs += len(sizes.full) * (_BODY_BYTES + (_NUM_TAILS + (config.model.max_logprobs != 0)) * _TAIL_BYTES)
    if config.speculative.uses_head:  # what follows a step of each size, and proposals: none, one, and each K
        num_proposals = len({size.num_rows for size in sizes.full}) * len({0, 1, *config.speculative.ladder})
        graphs += (len(sizes.full) + num_proposals) * _TAIL_BYTES
    most_pieces = max(sizes.piecewise, default=0)
    most_full = max((size.num_tokens for size in sizes.full), default=0)
    attention = qkv_width(model)
    others = 4 * model.hidden_size + mlp_width(model)
    pool = max(most_pieces * (others + 2 * attention), most_full * (others + 2 * decode_width(model)))
    buffers = most_pieces * (2 * model.stream_size(0) + attention)
    logits_bytes = most_full * logit_row_bytes(model)
    return graphs + logits_bytes + (pool + buffers) * dtype_bytes + _KERNEL_BYTES
