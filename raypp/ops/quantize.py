"""Rounds weights to 8 bits: float8_e4m3fn with a float32 scale per output, so that each uses the whole range."""

from __future__ import annotations

import torch

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_PIECE_ROWS = 1024


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in 8 bits, and its scale: quantized * scale is within 2^-4 of each element.

    Shapes: weight [N, K]; quantized [N, K] float8_e4m3fn; scale [N] float32. Elements below 2^-14 of their row's
    largest lose more.
    """
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    pieces = zip(weight.split(_PIECE_ROWS), quantized.split(_PIECE_ROWS), scale.split(_PIECE_ROWS), strict=True)
    for rows, into, of_rows in pieces:  # in float32, a piece at a time
        values = rows.float()
        of_rows.copy_(values.abs().amax(1) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)  # a row of zeros
        into.copy_((values / of_rows[:, None]).clamp_(-_LARGEST, _LARGEST))
    return quantized, scale
