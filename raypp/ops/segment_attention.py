"""Full attention within segments of a packed batch: what vision towers need. No cache, no mask, no causality.

On a GPU it is torch's FlashAttention for variable lengths: it takes every head size that is a multiple of 8, reads the
segments' ends from device memory, and plans nothing on the host, so that a graph can hold it. On a CPU each segment is
one call of `scaled_dot_product_attention`. See docs/design/0080.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_starts: torch.Tensor, max_segment_len: int
) -> torch.Tensor:
    """Return the attention of every token to all tokens of its segment, [P, heads, D].

    Args:
        q: [P, heads, D], and so are k and v; only the last dimension needs to be contiguous.
        k: Keys.
        v: Values.
        segment_starts: Prefix sums of the segments' lengths, int32 [segments + 1], from 0 to P; lengths may be 0.
        max_segment_len: A bound of the lengths.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(q, k, v, segment_starts, segment_starts, max_segment_len, max_segment_len)
        assert isinstance(out, torch.Tensor)  # nothing else was asked for
        return out
    # float32 on a GPU, which FlashAttention does not take, comes here too: it waits for the device.
    lengths = [length for length in segment_starts.diff().tolist() if length]
    parts = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, dim=2) for x in (q, k, v)), strict=True)
    attended = [F.scaled_dot_product_attention(*part) for part in parts]
    return torch.cat(attended, dim=2).squeeze(0).transpose(0, 1)
