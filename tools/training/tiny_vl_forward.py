"""Qwen3-VL's forward for training: pictures of one size, no cache, no masks, and no shape that depends on a value.

The modules and their weights are transformers'; only what lies between them is said anew, so that a CUDA graph can hold
a whole step. `tests/unit/test_tiny_vl.py` compares it with transformers' own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tiny_pictures import render
from torch import Tensor
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

PATCH, MERGE = 8, 2
GRID_SIDE = 12
"""Learned positions lie on a grid of this side."""


@dataclass(frozen=True)
class PictureBatch:
    """Scenes and what is said about them. B examples of T tokens."""

    backgrounds: Tensor  # [B, 3]
    things: Tensor  # [B, things, 8]
    tokens: Tensor  # [B, T] int64; one placeholder stands for the picture; padded with -1
    targets: Tensor  # [B, T] int64; the answers' tokens, -1 elsewhere
    aspect: Tensor  # [] of all pictures, before they were brought to one size


@dataclass(frozen=True)
class Grid:
    """What the tower must know of pictures of one size; see transformers' `Qwen3VLVisionModel.forward`."""

    rows: int  # of patches
    columns: int
    corners: Tensor  # [P, 4]
    weights: Tensor  # [P, 4]
    cos: Tensor  # [P, 1, D]
    sin: Tensor

    @classmethod
    def of(cls, visual: Any, height: int, width: int, device: torch.device) -> Grid:
        """Return the grid of a size in pixels."""
        grid = torch.tensor([[1, height // PATCH, width // PATCH]], device=device)
        corners, weights = get_vision_interpolation_indices_and_weights(
            grid, num_grid_per_side=GRID_SIDE, mode="bilinear", align_corners=True, spatial_merge_size=MERGE
        )
        cos, sin = visual.rotary_pos_emb(weights, get_vision_position_ids(grid, MERGE))
        return cls(height // PATCH, width // PATCH, corners, weights, cos.unsqueeze(-2), sin.unsqueeze(-2))

    @property
    def num_tokens(self) -> int:
        """Of a picture."""
        return self.rows * self.columns // MERGE**2


def encode_pictures(visual: Any, pictures: Tensor, grid: Grid) -> list[Tensor]:
    """Return embeddings and deepstack rows, [B * tokens, H] each: as transformers' forward, all of one size at once.

    Shapes: pictures uint8 [B, height, width, 3].
    """
    num_pictures = len(pictures)
    cut = pictures.view(num_pictures, grid.rows // MERGE, MERGE, PATCH, grid.columns // MERGE, MERGE, PATCH, 3).permute(
        0, 1, 4, 2, 5, 7, 3, 6
    )
    pixels = cut.reshape(-1, 3, 1, PATCH * PATCH).expand(-1, -1, 2, -1).reshape(-1, 6 * PATCH * PATCH)
    projection = visual.patch_embed.proj
    weight = projection.weight.flatten(1)
    hidden = F.linear((pixels.float() / 127.5 - 1).to(weight.dtype), weight, projection.bias)
    hidden = hidden.view(num_pictures, grid.rows * grid.columns, -1)
    hidden = hidden + (visual.pos_embed(grid.corners) * grid.weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
    cos, sin = grid.cos.to(hidden.dtype), grid.sin.to(hidden.dtype)
    tapped = []
    for index, block in enumerate(visual.blocks):
        qkv = block.attn.qkv(block.norm1(hidden)).unflatten(-1, (3, block.attn.num_heads, -1))
        q, k, v = qkv.unbind(2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        hidden = hidden + block.attn.proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + block.mlp(block.norm2(hidden))
        if index in visual.deepstack_visual_indexes:
            tapped.append(visual.deepstack_merger_list[len(tapped)](hidden.flatten(0, 1)))
    return [visual.merger(hidden.flatten(0, 1)), *tapped]


def expand(tokens: Tensor, pad_id: int, grid: Grid, *, place: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens with a placeholder per token of the picture, their positions, and where the placeholders are.

    `place` says where the one placeholder is, if not the tokens do, [B, T].

    Shapes: tokens [B, T]; returns [B, T + N - 1], [3, B, T + N - 1], [B, T + N - 1].
    """
    num_tokens, columns = grid.num_tokens, grid.columns // MERGE
    place = (tokens == pad_id if place is None else place).int().argmax(1, keepdim=True)
    at = torch.arange(tokens.shape[1] + num_tokens - 1, device=tokens.device).expand(len(tokens), -1)
    inside, behind = at - place, at >= place + num_tokens
    is_picture = (inside >= 0) & ~behind
    source = torch.where(behind, at - num_tokens + 1, torch.minimum(at, place))
    text_position = torch.where(behind, at - num_tokens + max(grid.rows, grid.columns) // MERGE, at)
    positions = torch.stack(
        (
            torch.where(is_picture, place, text_position),
            torch.where(is_picture, place + inside // columns, text_position),
            torch.where(is_picture, place + inside % columns, text_position),
        )
    )
    return tokens.gather(1, source), positions, is_picture


def run_language_model(model: Any, embeddings: Tensor, positions: Tensor, deepstack: Sequence[Tensor]) -> Tensor:
    """Return the hidden states after the final norm, [B, T, H]: as transformers' forward, without caches and masks.

    Shapes: embeddings [B, T, H]; positions [3, B, T]; deepstack [B, T, H] each, zero where no picture is.
    """
    text, hidden = model.model.language_model, embeddings
    cos, sin = (x.unsqueeze(1) for x in text.rotary_emb(hidden, positions))
    for index, layer in enumerate(text.layers):
        attention, x = layer.self_attn, _normed(layer.input_layernorm, hidden)
        q, k, v = (
            projection(x).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (
            _rotated(_normed(norm, x).transpose(1, 2), cos, sin)
            for norm, x in ((attention.q_norm, q), (attention.k_norm, k))
        )
        attended = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden))
        if index < len(deepstack):
            hidden = hidden + deepstack[index]
    return _normed(text.norm, hidden)


def _normed(norm: Any, x: Tensor) -> Tensor:
    """Return what transformers' module does in a dozen operations, by one."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _pictures(batch: PictureBatch, grid: Grid) -> Tensor:
    """Return the scenes as pictures of the grid's size: on a GPU by one kernel, if there is Triton."""
    numbers = (batch.backgrounds, batch.things, grid.rows * PATCH, grid.columns * PATCH, batch.aspect)
    if not batch.things.is_cuda or find_spec("triton") is None:
        return render(*numbers)
    import tiny_render_kernel

    return tiny_render_kernel.render(*numbers)


def answer_loss(model: Any, batch: PictureBatch, grid: Grid) -> Tensor:
    """Return the mean cross entropy of the answers' tokens."""
    return _loss(*_answers(model, batch, grid))


def told_exactly(model: Any, batch: PictureBatch, grid: Grid) -> Tensor:
    """Return which examples' answers come out token by token when always the most likely one is taken, bool [B]."""
    logits, targets = _answers(model, batch, grid)
    return ((logits.argmax(-1) == targets) | (targets < 0)).all(1)


def _answers(model: Any, batch: PictureBatch, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return logits [B, T, V], and what they should say, -1 where nothing, [B, T]."""
    pictures = _pictures(batch, grid)
    ids, positions, is_picture = expand(batch.tokens, model.config.image_token_id, grid)
    targets = expand(batch.targets, -1, grid, place=batch.tokens == model.config.image_token_id)[0]
    place = (batch.tokens == model.config.image_token_id).int().argmax(1, keepdim=True)
    inside = (torch.arange(ids.shape[1], device=ids.device) - place).clamp(0, grid.num_tokens - 1)

    def spread(rows: Tensor) -> Tensor:
        """Return the pictures' rows where their placeholders are, zero elsewhere, [B, T, H]."""
        of_each = rows.view(len(ids), grid.num_tokens, -1)
        return of_each.gather(1, inside.unsqueeze(-1).expand(-1, -1, of_each.shape[-1])) * is_picture.unsqueeze(-1)

    rows, *deepstack = (spread(rows) for rows in encode_pictures(model.model.visual, pictures, grid))
    embeddings = model.model.language_model.embed_tokens(ids.clamp(min=0))
    embeddings = torch.where(is_picture.unsqueeze(-1), rows.to(embeddings.dtype), embeddings)
    hidden = run_language_model(model, embeddings, positions, deepstack)[:, grid.num_tokens - 1 :]  # text may be told
    return _told(model, hidden, targets[:, grid.num_tokens - 1 :])


def text_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the same of conversations without pictures. Shapes: both [B, T]."""
    embeddings = model.model.language_model.embed_tokens(tokens.clamp(min=0))
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, len(tokens), -1)
    return _loss(*_told(model, run_language_model(model, embeddings, positions, ()), targets))


def _told(model: Any, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of all tokens but the first, each from what stands before it, and what they should say."""
    return model.lm_head(hidden[:, :-1]).float(), targets[:, 1:]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
