"""Operations of vision towers: attention within each image, rotation of queries and keys, a product with GELU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F  # noqa: N812

RotateQk = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(qkv, cos, sin) -> qkv, rotated in place; see `rotate_qk_`."""


def segment_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segment_starts: torch.Tensor, max_segment_len: int
) -> torch.Tensor:
    """Return the attention of every token to all tokens of its segment, [P, heads, D]: without cache, mask, causality.

    In 16 bits on a GPU it is torch's FlashAttention for variable lengths: it takes every head size that is a multiple
    of 8, reads the segments' ends from device memory, and plans nothing on the host, so a graph can hold it. Elsewhere
    each segment is one call of `scaled_dot_product_attention`. See docs/design/0080.

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


def rotate_qk_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries and keys of qkv [P, 3, heads, D] in place, and return it; cos and sin [P, D / 2] float32."""
    first, second = qkv[:, :2].float().chunk(2, -1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    qkv[:, :2] = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(qkv.dtype)
    return qkv


def choose_rotate_qk(device: torch.device, dtype: torch.dtype) -> RotateQk:
    """Return the fastest rotation that this device and installation have."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or find_spec("triton") is None:
        return rotate_qk_
    from raypp.ops.cuda.heads import rotate_qk_ as rotate_by_kernel
    from raypp.ops.cuda.kernel_launch import Device

    described = Device.of(device)
    return lambda qkv, cos, sin: rotate_by_kernel(qkv, cos, sin, described)


def linear_gelu_tanh(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(x W^T + b) by the tanh approximation, [T, N]. Shapes: x [T, K]; weight [N, K]; bias [N].

    On a GPU, in half precision, the product applies it before it rounds: one launch in place of two. torch has that
    only under a private name, which means tanh on CUDA and the exact GELU on a CPU (pytorch PR 104061).
    """
    fused = getattr(torch, "_addmm_activation", None)
    if fused is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    y: torch.Tensor = fused(bias, x, weight.t(), use_gelu=True)
    return y
