"""Computes the frequencies of a model's rotary embedding, stretched and split among axes as its configuration says."""

from __future__ import annotations

import math

import torch

from raypp.models.rope_config import RopeConfig


def inverse_frequencies(head_dim: int, config: RopeConfig) -> torch.Tensor:
    """Return each pair's angle per position, [head_dim / 2] float32.

    `linear` divides all by the factor. `llama3` divides only the slow ones: waves that fit less than `low_freq_factor`
    times into the original context are stretched, those that fit more than `high_freq_factor` times are kept, and
    between the two it blends (Llama 3.1's release; transformers 5.17, `modeling_rope_utils.py`). `yarn` does so by the
    number of the pair, between the pairs that turn `beta_fast` and `beta_slow` times (arXiv:2309.00071, section 3.2;
    transformers likewise). `dynamic` raises the base by as much as its longest context needs, none of them slower.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / _base(head_dim, config) ** exponents
    if config.rope_type in ("default", "dynamic"):
        return frequencies
    stretched = frequencies / config.factor
    if config.rope_type == "linear":
        return stretched
    if config.rope_type == "yarn":
        kept = _kept_by_yarn(head_dim, config)
        return (1.0 - kept) * stretched + kept * frequencies
    waves_in_context = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    kept = ((waves_in_context - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1.0 - kept) * stretched + kept * frequencies


def _base(head_dim: int, config: RopeConfig) -> float:
    if config.rope_type != "dynamic" or head_dim == 2:  # the only pair of two dimensions turns as fast with any base
        return config.theta
    growth = config.factor * config.stretched_to / config.original_max_position_embeddings - (config.factor - 1.0)
    return float(config.theta * growth ** (head_dim / (head_dim - 2)))


def _kept_by_yarn(head_dim: int, config: RopeConfig) -> torch.Tensor:
    """Return how much of each pair's own frequency stays, [head_dim / 2] float32, 0..1."""

    def pair_that_turns(num_turns: float) -> float:
        turns = config.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = last - first if last != first else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1.0 - ((pairs - first) / span).clamp(0.0, 1.0)


def axis_frequencies(head_dim: int, config: RopeConfig) -> torch.Tensor | None:
    """Return each pair's angle per position in time, height and width, [3, head_dim / 2] float32; None without axes.

    Every pair turns with one axis, so two of its three numbers are 0. Interleaved M-RoPE: pairs 0, 3, 6, ... belong to
    time, and the axes take turns over as many pairs as the section of each says; what is left over is time's (Qwen3-VL,
    arXiv:2511.21631; transformers 5.17, `models/qwen3_vl`). A token whose three positions are equal turns as ever.
    """
    if config.mrope_section is None:
        return None
    frequencies = inverse_frequencies(head_dim, config)
    axis_of_pair = torch.zeros(len(frequencies), dtype=torch.int64)
    for axis in (1, 2):
        axis_of_pair[axis : 3 * config.mrope_section[axis] : 3] = axis
    return torch.where(axis_of_pair == torch.arange(3).unsqueeze(1), frequencies, 0.0)
