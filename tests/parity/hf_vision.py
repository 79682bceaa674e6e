"""Small random Qwen3-VL checkpoints, and what transformers makes of pictures and prompts with them.

Over the seeds they vary in the sizes of both halves, in taps, patches, learned positions, in how a head's pairs are
shared out to axes, in which form config.json is written, and some have experts.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hf_models import choices_of
from PIL import Image
from safetensors.torch import load_file, save_file

from raypp.config.sections import ImagesSection
from raypp.models.config import load_model_config
from raypp.pictures.content import ImageContent, VideoContent
from raypp.pictures.fetch import Fetcher
from raypp.pictures.patches import place_pictures
from raypp.pictures.reader import PictureReader
from raypp.prompt_items import EncoderItem, PromptItems

IMAGE, VIDEO, VISION_START, VISION_END = 2, 3, 4, 5
FIRST_TEXT_TOKEN = 6
_SECTIONS = {16: ([4, 2, 2], [2, 3, 3]), 24: ([4, 4, 4], [6, 3, 3]), 32: ([6, 5, 5], [8, 4, 4])}


_EXPERTS = {5: (5, 2), 6: (3, 1), 9: (12, 4)}
"""By seed, experts that there are, and by token."""


def make_vision_checkpoint(seed: int, directory: Path, *, min_layers: int = 2) -> Path:
    """Write a random model to `directory` and return it. Equal arguments, equal files."""
    rng = random.Random(f"vision-{seed}")
    head_dim, num_layers = rng.choice(list(_SECTIONS)), max(min_layers, rng.randint(2, 6))
    depth, patch_size = rng.randint(2, 4), rng.choice((4, 6, 8))
    num_taps = min(seed % 4, depth, num_layers)
    hidden_size, vision_heads = rng.choice((32, 48, 64)), rng.choice((1, 2))
    ratio = (1, 2, 4)[seed % 3]
    experts = {}
    if seed in _EXPERTS:
        num_experts, num_chosen = _EXPERTS[seed]
        experts = {"num_experts": num_experts, "num_experts_per_tok": num_chosen, "moe_intermediate_size": 24}
    config_class, model_class = (
        (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration)
        if experts
        else (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration)
    )
    config = config_class(
        text_config={
            **experts,
            "vocab_size": rng.choice((160, 256)),
            "hidden_size": hidden_size,
            "intermediate_size": rng.choice((48, 64)),
            "num_hidden_layers": num_layers,
            "num_attention_heads": ratio,
            "num_key_value_heads": 1,
            "head_dim": head_dim,
            "max_position_embeddings": 1024,
            "attention_bias": seed % 5 == 3,
            "initializer_range": rng.choice((0.2, 0.25)),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": rng.choice((1000.0, 10000.0, 5e6)),
                "mrope_section": rng.choice(_SECTIONS[head_dim]),
                "mrope_interleaved": True,
            },
            "eos_token_id": 1,
        },
        vision_config={
            "depth": depth,
            "hidden_size": vision_heads * rng.choice((16, 24)),
            "num_heads": vision_heads,
            "intermediate_size": rng.choice((40, 64)),
            "patch_size": patch_size,
            "temporal_patch_size": 2,
            "spatial_merge_size": rng.choice((2, 2, 3)),
            "out_hidden_size": hidden_size,
            "num_position_embeddings": rng.choice((9, 16, 64)),
            "deepstack_visual_indexes": sorted(rng.sample(range(depth), num_taps)),
            "initializer_range": 0.2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=seed % 4 in (1, 2),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = model_class(config)
        _randomize(model)
    model.save_pretrained(directory)
    factor = patch_size * config.vision_config.spatial_merge_size
    bounds = {"shortest_edge": 2 * factor**2, "longest_edge": 24 * factor**2}
    images = {"size": bounds, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.25]}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    video = {"size": {"shortest_edge": 4 * factor**2, "longest_edge": 40 * factor**2}}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    if seed % 2:
        _write_published_form(directory / "config.json")
        _turn_experts(directory / "model.safetensors")
    return directory


@torch.no_grad()
def _randomize(model: Any) -> None:
    """Make visible what initialization hides: norms are not one, biases not zero."""
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.copy_(1.0 + 0.3 * torch.randn_like(parameter))
        elif name.endswith("bias"):
            parameter.copy_(0.1 * torch.randn_like(parameter))
        elif name.endswith("pos_embed.weight"):
            parameter.copy_(torch.randn_like(parameter))


def _write_published_form(file: Path) -> None:
    """Rewrite config.json as the published checkpoints have it."""
    values = json.loads(file.read_text())
    text = values["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    text["rope_scaling"] = rope
    text.pop("layer_types", None)
    values["vision_config"].pop("rope_parameters", None)
    values["vision_config"]["model_type"] = values["model_type"]
    file.write_text(json.dumps(values, indent=2))


def _turn_experts(file: Path) -> None:
    """Store experts as the published checkpoints have them: inputs before outputs."""
    tensors = load_file(file)
    fused = (".experts.gate_up_proj", ".experts.down_proj")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if name.endswith(fused) else tensor
        for name, tensor in tensors.items()
    }
    save_file(turned, file, metadata={"format": "pt"})


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Return a picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def picture_reader(path: Path, max_model_len: int = 1024) -> PictureReader:
    """Return the reader of a model's pictures."""
    config = load_model_config(path).vision
    assert config is not None
    return PictureReader(config, max_model_len, Fetcher(ImagesSection()))


def picture_prompt(path: Path, parts: list[Any]) -> tuple[list[int], PromptItems | None]:
    """Return a prompt of texts (lists of tokens), images, and videos (lists of frames)."""
    reader = picture_reader(path)
    token_ids: list[int] = []
    items: list[EncoderItem] = []
    for part in parts:
        if isinstance(part, Image.Image):
            [read] = reader.read([ImageContent(part, is_address=False)])
            token_ids += [VISION_START, IMAGE, VISION_END]
        elif isinstance(part[0], Image.Image):
            [read] = reader.read([VideoContent(tuple(part), 2.0)])
            token_ids += [VISION_START, VIDEO, VISION_END] * len(read.items)
        else:
            token_ids += part
            continue
        items += read.items
    if not items:
        return token_ids, None
    expanded, placed = place_pictures(token_ids, items, reader.config)
    return expanded.tolist(), placed


def pixel_values(path: Path, item: EncoderItem) -> torch.Tensor:
    """Return an item's patches as transformers' processors make them, float32."""
    config = load_model_config(path).vision
    assert config is not None
    per_channel = config.patch_dim // config.in_channels
    mean, std = (np.repeat(np.array(v, np.float32), per_channel) for v in (config.image_mean, config.image_std))
    return torch.from_numpy((item.patches.astype(np.float32) / 255 - mean) / std)


@lru_cache(maxsize=2)
def load_vision_reference(path: Path) -> Any:
    """Return transformers' model of a directory, in float32."""
    has_experts = load_model_config(path).experts is not None
    model_class = getattr(transformers, f"Qwen3VL{'Moe' if has_experts else ''}ForConditionalGeneration")
    model = model_class.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


@torch.inference_mode()
def hf_rows(path: Path, items: list[EncoderItem]) -> list[torch.Tensor]:
    """Return each item's embeddings and deepstack rows, [1 + L, N, H]."""
    pixels = torch.cat([pixel_values(path, item) for item in items])
    grids = torch.tensor([item.grid_thw for item in items])
    found = load_vision_reference(path).model.get_image_features(pixels, grids)
    rows = torch.stack([torch.cat(found.pooler_output), *found.deepstack_features])
    return list(rows.split([item.num_tokens for item in items], dim=1))


@torch.inference_mode()
def hf_vision_choices(
    path: Path, prompt: list[int], items: PromptItems | None, output: list[int]
) -> tuple[list[int], list[float]]:
    """Return transformers' choice at each token of an output, and how much it prefers that; see `hf_choices`."""
    model, cache = load_vision_reference(path), transformers.DynamicCache()
    model.model.rope_deltas = None  # of the prompt before
    ids = torch.tensor([prompt])
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    if items is not None:
        for token, pixels, grids in (
            (IMAGE, "pixel_values", "image_grid_thw"),
            (VIDEO, "pixel_values_videos", "video_grid_thw"),
        ):
            of_kind = [i for i, start in zip(items.items, items.starts, strict=True) if prompt[start] == token]
            if of_kind:
                inputs[pixels] = torch.cat([pixel_values(path, item) for item in of_kind])
                inputs[grids] = torch.tensor([item.grid_thw for item in of_kind])
    logits = [model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0]]
    if len(output) > 1:  # by itself: a placeholder that the model generates is no picture
        logits.append(model(input_ids=torch.tensor([output[:-1]]), past_key_values=cache, use_cache=True).logits[0])
    return choices_of(torch.cat(logits), output)
