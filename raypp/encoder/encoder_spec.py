"""The specification of an encoder: plain data, sent to its actor once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """One encoder of an engine; all of them are alike but for their index."""

    encoder_index: int
    model_path: str
    load_format: Literal["auto", "dummy"]
    dtype: str  # a torch dtype's name: the stages' own
    device: str  # a torch device
    seed: int
    num_threads: int
    captures: bool  # whether batches are CUDA graphs; else the same batches are encoded by calls
    token_budgets: tuple[int, ...] | None  # None: what the model needs and the memory allows
    max_images_per_batch: int
    memory_bytes: int  # of the device, weights included; 0 on a CPU
    cache_bytes: int
    link_bytes: int  # memory of the first stage that it may write into
