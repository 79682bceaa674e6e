"""Small random Qwen3-VL, Qwen3.5 and Gemma checkpoints, and what transformers makes of images and prompts with them.

Over the seeds they vary in the sizes of both halves, in taps, patches, learned positions, in how a head's pairs are
shared out to axes, in which form config.json is written, some have experts, and some gated delta nets. Those of Gemma
vary in windows, shorter and longer than an image, and in the tokens of an image; those of Gemma 4 in what their towers
do to products and pooled rows, and in whether tokens of an image see each other.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
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
_MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_SECTIONS = {16: ([4, 2, 2], [2, 3, 3]), 24: ([4, 4, 4], [6, 3, 3]), 32: ([6, 5, 5], [8, 4, 4])}


_EXPERTS = {5: (5, 2), 6: (3, 1), 9: (12, 4), 13: (5, 2), 15: (4, 1)}
"""By seed, experts that there are, and by token."""
STATE_SEEDS = range(12, 16)
"""Of Qwen3.5: gated delta nets in most layers, no deepstack, a quarter or half of a head is rotated."""


def make_vision_checkpoint(seed: int, directory: Path, *, min_layers: int = 2, like: Path | None = None) -> Path:
    """Write a random model to `directory` and return it. Equal arguments, equal files.

    It has the tokenizer of the model `like`, if that is given; else none.
    """
    rng = random.Random(f"vision-{seed}")
    head_dim, num_layers = rng.choice(list(_SECTIONS)), max(min_layers, rng.randint(2, 6))
    depth, patch_size = rng.randint(2, 4), rng.choice((4, 6, 8))
    has_states = seed in STATE_SEEDS
    num_taps = 0 if has_states else min(seed % 4, depth, num_layers)
    hidden_size, vision_heads = rng.choice((32, 48, 64)), rng.choice((1, 2))
    ratio = (1, 2, 4)[seed % 3]
    experts = {}
    if seed in _EXPERTS:
        num_experts, num_chosen = _EXPERTS[seed]
        experts = {"num_experts": num_experts, "num_experts_per_tok": num_chosen, "moe_intermediate_size": 24}
    name = _class_name(has_states=has_states, has_experts=bool(experts))
    config_class, model_class = (getattr(transformers, name + end) for end in ("Config", "ForConditionalGeneration"))
    token_ids = dict(zip(_MARKS, (IMAGE, VIDEO, VISION_START, VISION_END), strict=True))
    vocab_size, eos_token_id = rng.choice((160, 256)), 1
    if like is not None:
        theirs = json.loads((like / "config.json").read_text())
        token_ids = {name: theirs[name] for name in _MARKS}
        vocab_size, eos_token_id = (theirs["text_config"][name] for name in ("vocab_size", "eos_token_id"))
    config = config_class(
        text_config={
            **experts,
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": rng.choice((48, 64)),
            "num_hidden_layers": num_layers,
            "num_attention_heads": ratio,
            "num_key_value_heads": 1,
            "head_dim": head_dim * (2 if has_states else 1),
            "max_position_embeddings": 1024,
            "attention_bias": seed % 5 == 3,
            "initializer_range": rng.choice((0.1, 0.12) if has_states else (0.2, 0.25)),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": rng.choice((1000.0, 10000.0, 5e6)),
                "mrope_section": rng.choice(_SECTIONS[head_dim]),
                "mrope_interleaved": True,
                **({"partial_rotary_factor": 0.5} if has_states else {}),
            },
            "eos_token_id": eos_token_id,
            **(_states(rng, num_layers) if has_states else {}),
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
            **({} if has_states else {"deepstack_visual_indexes": sorted(rng.sample(range(depth), num_taps))}),
            "initializer_range": 0.2,
        },
        **token_ids,
        tie_word_embeddings=seed % 4 in (1, 2),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = model_class(config)
        _randomize(model, adds_one=has_states)
    model.save_pretrained(directory)
    _copy_tokenizer(like, directory)
    factor = patch_size * config.vision_config.spatial_merge_size
    bounds = {"shortest_edge": 2 * factor**2, "longest_edge": 24 * factor**2}
    images = {"size": bounds, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.25]}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    video = {"size": {"shortest_edge": 4 * factor**2, "longest_edge": 40 * factor**2}}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    if seed % 2 and not has_states:
        _write_published_form(directory / "config.json")
        _turn_experts(directory / "model.safetensors")
    return directory


def make_gemma3_checkpoint(seed: int, directory: Path, *, like: Path | None = None) -> Path:
    """Write a random Gemma 3 with its tower to `directory` and return it. Equal arguments, equal files.

    It has the tokenizer of the directory `like`, if that is given; else none.
    """
    rng = random.Random(f"gemma3-{seed}")
    num_layers, hidden_size = rng.randint(2, 5), rng.choice((32, 48))
    patch_size, merge, token_side, vision_heads = (
        rng.choice((4, 6)),
        rng.choice((1, 2)),
        2 + seed % 3,
        rng.choice((1, 2)),
    )
    marks = {"image_token_index": IMAGE, "boi_token_index": VISION_START, "eoi_token_index": VISION_END}
    vocab_size, eos_token_id = rng.choice((160, 256)), 1
    marks, vocab_size = _tokens_of(like, marks, vocab_size)
    config = transformers.Gemma3Config(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1 + seed % 2,
            "head_dim": 16,
            "query_pre_attn_scalar": rng.choice((7, 24)),
            "max_position_embeddings": 1024,
            "sliding_window": (3, 9, 40)[seed % 3],
            "layer_types": [("sliding_attention", "full_attention")[(i + seed) % 2] for i in range(num_layers)],
            "initializer_range": 0.25,
            "eos_token_id": eos_token_id,
        },
        vision_config={
            "num_hidden_layers": rng.randint(2, 3),
            "hidden_size": vision_heads * rng.choice((16, 24)),
            "num_attention_heads": vision_heads,
            "intermediate_size": rng.choice((40, 64)),
            "image_size": patch_size * merge * token_side,
            "patch_size": patch_size,
            "vision_use_head": False,
        },
        mm_tokens_per_image=token_side**2,
        tie_word_embeddings=seed % 2 == 0,
        **marks,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.Gemma3ForConditionalGeneration(config)
        _randomize_gemma3(model)
    model.save_pretrained(directory)
    _copy_tokenizer(like, directory)
    side = config.vision_config.image_size
    images = {"size": {"height": side, "width": side}, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.25]}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    if seed % 2:  # as it is published
        tensors = load_file(directory / "model.safetensors")
        inner = "vision_tower.vision_model."
        named = {name.replace("vision_tower.", inner): tensor for name, tensor in tensors.items()}
        named["lm_head.weight"] = named.pop("language_model.lm_head.weight")
        save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_gemma4_checkpoint(
    seed: int, directory: Path, *, like: Path | None = None, has_layer_inputs: bool = False
) -> Path:
    """Write a random Gemma 4 with its tower to `directory` and return it. Arguments as for Gemma 3.

    With inputs of all layers it is one like E2B and E4B, with layers without keys and values of their own.
    """
    rng = random.Random(f"gemma4-{seed}")
    num_layers, vision_heads, vision_dim = rng.randint(2, 5), rng.choice((1, 2)), rng.choice((16, 24))
    marks = {"image_token_id": IMAGE, "boi_token_id": VISION_START, "eoi_token_id": VISION_END}
    marks, vocab_size = _tokens_of(like, marks, 256)
    config = transformers.Gemma4Config(
        text_config={
            "vocab_size": vocab_size,
            "hidden_size": rng.choice((32, 48)),
            "intermediate_size": 48,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1 + seed % 2,
            "head_dim": 16,
            "global_head_dim": rng.choice((16, 32)),
            "num_global_key_value_heads": rng.choice((1, 2)),
            "attention_k_eq_v": seed % 3 != 1,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "max_position_embeddings": 1024,
            "sliding_window": (3, 9, 40)[seed % 3],
            "layer_types": ["sliding_attention"] * (num_layers - 1) + ["full_attention"],
            "use_bidirectional_attention": None if seed == 3 else "vision",
            "initializer_range": 0.25,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "tie_word_embeddings": seed % 2 == 0,
            **(_layer_inputs(seed, vocab_size) if has_layer_inputs else {}),
        },
        vision_config={
            "num_hidden_layers": rng.randint(2, 3),
            "hidden_size": vision_heads * vision_dim,
            "num_attention_heads": vision_heads,
            "num_key_value_heads": vision_heads,
            "head_dim": vision_dim,
            "intermediate_size": rng.choice((40, 64)),
            "patch_size": 4,
            "pooling_kernel_size": 2 + seed // 2 % 2,  # of 1 transformers 5.17 keeps the padding
            "position_embedding_size": 256,
            "standardize": seed % 2 == 0,
            "use_clipped_linears": seed % 3 == 1,
        },
        tie_word_embeddings=seed % 2 == 0,
        video_token_id=VIDEO,
        audio_token_id=0,
        **marks,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.Gemma4ForConditionalGeneration(config)
        _randomize_gemma4(model, has_layer_inputs=has_layer_inputs)
    model.save_pretrained(directory)
    _copy_tokenizer(like, directory)
    images = {"image_processor": {"max_soft_tokens": (5, 8, 11)[seed % 3], "do_normalize": False, "resample": 3}}
    (directory / "processor_config.json").write_text(json.dumps(images))
    return directory


def _layer_inputs(seed: int, vocab_size: int) -> dict[str, Any]:
    """Return what Gemma 4 E2B and E4B have besides, and leave out; stages begin with one of layers 0 to 2."""
    return {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": (8, 12)[seed // 2 % 2],
        "vocab_size_per_layer_input": vocab_size,
        "use_double_wide_mlp": seed % 4 < 2,
        "attention_k_eq_v": False,
        "use_bidirectional_attention": "vision" if seed == 3 else None,
    }


def _tokens_of(like: Path | None, marks: dict[str, int], vocab_size: int) -> tuple[dict[str, int], int]:
    """Return what marks images, and the size of the vocabulary: those of a checkpoint with a tokenizer, or as given."""
    if like is None:
        return marks, vocab_size
    theirs = json.loads((like / "config.json").read_text())
    return {name: theirs[name] for name in marks}, theirs["text_config"]["vocab_size"]


def _copy_tokenizer(like: Path | None, directory: Path) -> None:
    for name in () if like is None else ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(like / name, directory)


@torch.no_grad()
def _randomize_gemma4(model: Any, *, has_layer_inputs: bool) -> None:
    """Make visible what initialization hides."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name or name.endswith("std_scale"):
            tensor.copy_(1.0 + 0.3 * torch.randn_like(tensor))
            if has_layer_inputs and "language_model" in name and name.endswith("q_norm.weight"):
                tensor.mul_(0.3)  # else six layers make of a rounding another token
        elif name.endswith(("_max", "_min")):
            tensor.fill_(1.5 if name.endswith("max") else -1.25)
        elif name.endswith(("std_bias", "layer_scalar")):
            tensor.copy_(0.7 + 0.3 * torch.randn_like(tensor))
        elif name.endswith("position_embedding_table"):
            tensor.copy_(torch.randn_like(tensor))
        elif ("vision_tower" in name and not name.endswith("inv_freq")) or "projection" in name:
            tensor.copy_(0.2 * torch.randn_like(tensor))
        elif "lm_head" in name or "embed_tokens_per_layer" in name:  # its row of padding, too, which stands at images
            tensor.copy_(0.25 * torch.randn_like(tensor))


@torch.no_grad()
def _randomize_gemma3(model: Any) -> None:
    """Make visible what initialization hides."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # of 1 + w, but for the tower's own
            parameter.copy_((1.0 if "vision_tower" in name else 0.0) + 0.3 * torch.randn_like(parameter))
        elif name.endswith("bias") or "layer_norm" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
        elif name.endswith("position_embedding.weight"):
            parameter.copy_(torch.randn_like(parameter))
        elif "vision_tower" in name or "projection" in name:
            parameter.copy_(0.2 * torch.randn_like(parameter))
        elif "lm_head" in name:  # else its scaled embedding, once more the LM head, says again what was said
            parameter.copy_(0.25 * torch.randn_like(parameter))


def _class_name(*, has_states: bool, has_experts: bool) -> str:
    """Return what names of transformers' classes begin with."""
    return ("Qwen3_5" if has_states else "Qwen3VL") + ("Moe" if has_experts else "")


def _states(rng: random.Random, num_layers: int) -> dict[str, Any]:
    """Return sizes of gated delta nets; the last layer attends, and sometimes the first."""
    kinds = ["linear_attention"] * (num_layers - 1) + ["full_attention"]
    kinds[0] = rng.choice(kinds)
    num_k_heads = rng.choice((1, 2))
    return {
        "layer_types": kinds,
        "linear_num_key_heads": num_k_heads,
        "linear_num_value_heads": num_k_heads * rng.choice((1, 2)),
        "linear_key_head_dim": rng.choice((8, 12)),
        "linear_value_head_dim": rng.choice((8, 20)),
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 16,
    }


@torch.no_grad()
def _randomize(model: Any, *, adds_one: bool) -> None:
    """Make visible what initialization hides: norms are not one, biases not zero."""
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            is_offset = adds_one and ".visual." not in name and not name.endswith("linear_attn.norm.weight")
            parameter.copy_((0.0 if is_offset else 1.0) + 0.3 * torch.randn_like(parameter))
        elif name.endswith("conv1d.weight"):
            parameter.copy_(0.4 * torch.randn_like(parameter))
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


class PromptMaker:
    """Makes prompts that mix text and pictures; each begins with a token of its own."""

    def __init__(self, seed: int, vocab_size: int, sizes: Sequence[tuple[int, int]]) -> None:
        self._rng = random.Random(seed)
        self._seed, self._vocab_size, self._sizes = seed, vocab_size, sizes

    def text(self, low: int, high: int) -> list[int]:
        """Return as many tokens."""
        rng = self._rng
        return [rng.randrange(FIRST_TEXT_TOKEN, self._vocab_size) for _ in range(rng.randint(low, high))]

    def image(self, index: int) -> Image.Image:
        """Return a picture of one of the sizes; the same number twice is the same one if the size is."""
        return picture(100 * self._seed + index, *self._rng.choice(self._sizes))

    def usual_layouts(self) -> list[list[Any]]:
        """Return a picture and text, pictures within text, and text alone."""
        text, image = self.text, self.image
        return [[image(0), text(1, 6)], [text(1, 8), image(1), text(0, 4), image(2), text(1, 4)], [text(5, 30)]]

    def prompts(self, path: Path, layouts: Sequence[Sequence[Any]]) -> list[tuple[list[int], PromptItems | None]]:
        """Return a prompt for each layout, of texts, pictures and lists of frames."""
        return [
            picture_prompt(path, [[FIRST_TEXT_TOKEN + index], *(part for part in layout if part)])
            for index, layout in enumerate(layouts)
        ]


def pixel_values(path: Path, item: EncoderItem) -> torch.Tensor:
    """Return an item's pixels as transformers' processors make them, float32: patches, or [1, 3, side, side].

    Gemma 4's are between 0 and 1, row by row, with the channels last, and padded: [1, P, patch_dim].
    """
    config = load_model_config(path).vision
    assert config is not None
    per_channel = config.patch_dim // config.in_channels
    mean, std = (np.repeat(np.array(v, np.float32), per_channel) for v in (config.image_mean, config.image_std))
    patches = torch.from_numpy((item.patches.astype(np.float32) / 255 - mean) / std)
    if config.kind == "gemma4":
        _, height, width = item.grid_thw
        merge, patch = config.spatial_merge_size, config.patch_size
        squares = (patches / 2 + 0.5).view(height // merge, width // merge, merge, merge, 3, patch, patch)
        in_rows = squares.permute(0, 2, 1, 3, 5, 6, 4).reshape(1, height * width, -1)
        most = config.tokens_per_max_image * config.patches_per_token
        return torch.nn.functional.pad(in_rows, (0, 0, 0, most - height * width))
    if config.image_side is None:
        return patches
    side, patch, merge = config.image_side, config.patch_size, config.spatial_merge_size
    num_squares = side // (patch * merge)
    squares = patches.view(num_squares, num_squares, merge, merge, config.in_channels, patch, patch)
    return squares.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, config.in_channels, side, side)


@lru_cache(maxsize=2)
def load_vision_reference(path: Path) -> Any:
    """Return transformers' model of a directory, in float32."""
    config = load_model_config(path)
    assert config.vision is not None
    name = _class_name(has_states=config.has_row_states, has_experts=config.experts is not None)
    name = {"gemma3": "Gemma3", "gemma4": "Gemma4"}.get(config.vision.kind, name)
    model_class = getattr(transformers, name + "ForConditionalGeneration")
    model = model_class.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


@torch.inference_mode()
def hf_rows(path: Path, items: list[EncoderItem]) -> list[torch.Tensor]:
    """Return each item's embeddings and deepstack rows, [1 + L, N, H]."""
    pixels, model = torch.cat([pixel_values(path, item) for item in items]), load_vision_reference(path).model
    if model.config.model_type == "gemma3":
        return [rows.unsqueeze(0) for rows in model.get_image_features(pixels).pooler_output]
    if model.config.model_type == "gemma4":
        found = model.get_image_features(pixels, torch.cat([_patch_places(path, item) for item in items]))
        return [rows.unsqueeze(0) for rows in found.pooler_output]
    grids = torch.tensor([item.grid_thw for item in items])
    found = model.get_image_features(pixels, grids)
    rows = torch.stack([torch.cat(found.pooler_output), *getattr(found, "deepstack_features", ())])
    return list(rows.split([item.num_tokens for item in items], dim=1))


def _patch_places(path: Path, item: EncoderItem) -> torch.Tensor:
    """Return columns and rows of an item's patches as Gemma 4's processor does, -1 for padding, [1, P, 2]."""
    config = load_model_config(path).vision
    assert config is not None
    _, height, width = item.grid_thw
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack((columns, rows), 2).view(1, -1, 2)
    most = config.tokens_per_max_image * config.patches_per_token
    return torch.nn.functional.pad(places, (0, 0, 0, most - height * width), value=-1)


@torch.inference_mode()
def hf_vision_choices(
    path: Path, prompt: list[int], items: PromptItems | None, output: list[int]
) -> tuple[list[int], list[float]]:
    """Return transformers' choice at each token of an output, and how much it prefers that; see `hf_choices`."""
    model = load_vision_reference(path)
    cache = transformers.DynamicCache(config=model.config.get_text_config())
    model.model.rope_deltas = None  # of the prompt before
    ids = torch.tensor([prompt])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds}
    if model.config.model_type == "gemma4" and items is not None:
        pixels, places = (torch.cat([of(path, item) for item in items.items]) for of in (pixel_values, _patch_places))
        inputs |= {"pixel_values": pixels, "image_position_ids": places}
    elif model.config.model_type == "gemma3":  # with its processor, text alone has types, too: it is masked the same
        pixels = None if items is None else torch.cat([pixel_values(path, item) for item in items.items])
        inputs = {"input_ids": ids, "token_type_ids": kinds, "pixel_values": pixels}
    elif items is not None:
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
        said = {"input_ids": torch.tensor([output[:-1]])}
        if model.config.model_type == "gemma4":  # it would take such a one for padding
            ids = said.pop("input_ids")
            said = {"inputs_embeds": model.get_input_embeddings()(ids)}
            if model.config.text_config.hidden_size_per_layer_input:
                said |= {"per_layer_inputs": model.model.language_model.get_per_layer_inputs(ids, None)}
        logits.append(model(**said, past_key_values=cache, use_cache=True).logits[0])
    return choices_of(torch.cat(logits), output)
