"""The frequencies of a model's rotary embedding, stretched as its configuration says."""

from __future__ import annotations

import math

import torch

from raypp.models.config import RopeConfig


def inverse_frequencies(head_dim: int, config: RopeConfig) -> torch.Tensor:
    """Return each pair's angle per position, [head_dim / 2] float32.

    `linear` divides all by the factor. `llama3` divides only the slow ones: waves that fit less than `low_freq_factor`
    times into the original context are stretched, those that fit more than `high_freq_factor` times are kept, and
    between the two it blends (Llama 3.1's release; transformers 5.17, `modeling_rope_utils.py`).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / config.theta**exponents
    if config.rope_type == "default":
        return frequencies
    stretched = frequencies / config.factor
    if config.rope_type == "linear":
        return stretched
    waves_in_context = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    kept = ((waves_in_context - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1.0 - kept) * stretched + kept * frequencies
