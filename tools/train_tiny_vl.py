"""Train `tiny-vl`, the vision model that ships inside raypp, on pictures that are drawn while it trains.

    scenes -> questions and answers -> tokenizer -> pool of examples -> rendering and training -> bf16 export -> score

Processes draw scenes into a pool; a step takes some of it, at random, renders them at one size and trains on the
answers. `python tools/train_tiny.py --vision` runs it; docs/tiny-vl.md has the commands and the figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import queue
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from PIL import Image
from tiny_pictures import DESCRIBE, TALK, caption, draw_scene, exchange, read_caption, render, scene_numbers
from torch import Tensor
from train_tiny import TURN_END, TURN_START, export, learning_rate_share, train_tokenizer
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from raypp.api.prepare import RequestPreparer
from raypp.api.tokenizer import Tokenizer
from raypp.config.engine import EngineConfig
from raypp.driver.engine_plan import plan_engine
from raypp.driver.hardware import Hardware
from raypp.pictures.fetch import Fetcher
from raypp.pictures.reader import PictureReader
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

PATCH, MERGE = 8, 2
VOCAB_SIZE = 768
MAX_POSITIONS = 4096
MAX_TEXT_TOKENS = 80
PIXELS = {"shortest_edge": 5120, "longest_edge": 9216}  # so that a picture is 20 to 36 tokens
SIZES = {
    1.0: ((96, 96),),
    1.4: ((80, 112), (80, 96)),
    1 / 1.4: ((112, 80), (96, 80)),
    2.0: ((64, 128),),
    0.5: ((128, 64),),
}
"""Height and width of the pictures that are trained, by the aspect for which their scenes are drawn."""

_ASPECTS, _SHARES = tuple(SIZES), (0.4, 0.2, 0.2, 0.1, 0.1)
_CHUNK = 512
_IMAGE_PAD, _VISION_START, _VISION_END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"


# ---------------------------------------------------------------------------------------------------- examples


@dataclass(frozen=True)
class Examples:
    """Questions about scenes, tokenized; on the host as they come, on the device in the pool. N of them."""

    backgrounds: Tensor  # [N, 3]
    things: Tensor  # [N, MAX_THINGS, 8]
    tokens: Tensor  # [N, MAX_TEXT_TOKENS] int16; one placeholder stands for the picture; padded with -1
    answer_starts: Tensor  # [N] int16

    def parts(self) -> tuple[Tensor, ...]:
        """Return the tensors."""
        return self.backgrounds, self.things, self.tokens, self.answer_starts


def _turns(question: str, answer: str, picture_first: bool) -> tuple[str, str]:
    """Return an exchange as the chat template renders it: up to the answer, and the answer."""
    picture = f"{_VISION_START}{_IMAGE_PAD}{_VISION_END}"
    content = picture + question if picture_first else question + picture
    return f"{TURN_START}user\n{content}{TURN_END}\n{TURN_START}assistant\n", answer + TURN_END


def draw_examples(tokenizer: Any, count: int, aspect: float, rng: random.Random) -> Examples:
    """Return new examples."""
    scenes = [draw_scene(rng, aspect=aspect) for _ in range(count)]
    texts = [_turns(*exchange(scene, rng), picture_first=rng.random() < 0.75) for scene in scenes]
    prompts = tokenizer.backend_tokenizer.encode_batch([prompt for prompt, _ in texts])
    answers = tokenizer.backend_tokenizer.encode_batch([answer for _, answer in texts])
    tokens = np.full((count, MAX_TEXT_TOKENS), -1, np.int16)
    starts = np.empty(count, np.int16)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = (prompt.ids + answer.ids)[:MAX_TEXT_TOKENS]
        tokens[index, : len(ids)] = ids
        starts[index] = len(prompt.ids)
    return Examples(*scene_numbers(scenes), torch.from_numpy(tokens), torch.from_numpy(starts))


def _draw_forever(tokenizer_path: str, seed: int, into: Any) -> None:
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_path)
    rng = random.Random(seed)
    while True:
        aspect = rng.choices(_ASPECTS, _SHARES)[0]
        drawn = draw_examples(tokenizer, _CHUNK, aspect, rng)
        into.put((aspect, [part.numpy() for part in drawn.parts()]))


class Pool:
    """All examples so far, by aspect, on the training device; the oldest go when there are too many."""

    def __init__(self, tokenizer_path: str, device: torch.device, num_workers: int, seed: int, capacity: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue(maxsize=4 * num_workers)
        self._workers = [
            context.Process(target=_draw_forever, args=(tokenizer_path, 1000 * seed + index, self._queue), daemon=True)
            for index in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()
        self._device = device
        self._capacity = capacity // _CHUNK * _CHUNK
        self._parts: dict[float, tuple[Tensor, ...]] = {}
        self.counts = dict.fromkeys(_ASPECTS, 0)

    def fill(self, least: int) -> None:
        """Take in what was drawn; wait until there are as many of each aspect."""
        while True:
            is_short = min(self.counts.values()) < least
            try:
                aspect, arrays = self._queue.get(timeout=60.0 if is_short else 0.0)
            except queue.Empty:
                return
            drawn = [torch.from_numpy(array).to(self._device) for array in arrays]
            if aspect not in self._parts:
                self._parts[aspect] = tuple(
                    torch.empty(self._capacity, *part.shape[1:], dtype=part.dtype, device=self._device)
                    for part in drawn
                )
            at = self.counts[aspect] % self._capacity
            for kept, new in zip(self._parts[aspect], drawn, strict=True):
                kept[at : at + _CHUNK] = new
            self.counts[aspect] += _CHUNK

    def batch(self, aspect: float, count: int) -> Examples:
        """Return some of them, at random."""
        num_there = min(self.counts[aspect], self._capacity)
        chosen = torch.randint(num_there, (count,), device=self._device)
        return Examples(*(part[chosen] for part in self._parts[aspect]))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.terminate()
            worker.join()


# ------------------------------------------------------------------------------------------------------- model


def build_model(tokenizer: Any) -> Any:
    """Return the untrained model: four layers, of which the first two take deepstack rows."""
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 192,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
            "eos_token_id": token_id(TURN_END),
            "bos_token_id": None,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "num_heads": 4,
            "intermediate_size": 384,
            "patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": MERGE,
            "out_hidden_size": 192,
            "num_position_embeddings": 144,
            "deepstack_visual_indexes": [1, 2],
        },
        image_token_id=token_id(_IMAGE_PAD),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id(_VISION_START),
        vision_end_token_id=token_id(_VISION_END),
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


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
            grid, num_grid_per_side=12, mode="bilinear", align_corners=True, spatial_merge_size=MERGE
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
    hidden = F.linear(pixels.float() / 127.5 - 1, projection.weight.flatten(1), projection.bias)
    hidden = hidden.view(num_pictures, grid.rows * grid.columns, -1)
    hidden = hidden + (visual.pos_embed(grid.corners) * grid.weights.unsqueeze(-1)).sum(1)
    tapped = []
    for index, block in enumerate(visual.blocks):
        qkv = block.attn.qkv(block.norm1(hidden)).unflatten(-1, (3, block.attn.num_heads, -1))
        q, k, v = qkv.unbind(2)
        q, k = (
            x * grid.cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * grid.sin
            for x in (q, k)
        )
        attended = F.scaled_dot_product_attention(*(x.to(v.dtype).transpose(1, 2) for x in (q, k, v)))
        hidden = hidden + block.attn.proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + block.mlp(block.norm2(hidden))
        if index in visual.deepstack_visual_indexes:
            tapped.append(visual.deepstack_merger_list[len(tapped)](hidden.flatten(0, 1)))
    return [visual.merger(hidden.flatten(0, 1)), *tapped]


def expand(tokens: Tensor, pad_id: int, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens with a placeholder per token of the picture, their positions, and where the placeholders are.

    Shapes: tokens [B, T]; returns [B, T + N - 1], [3, B, T + N - 1], [B, T + N - 1].
    """
    num_tokens, columns = grid.num_tokens, grid.columns // MERGE
    place = (tokens == pad_id).int().argmax(1, keepdim=True)
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


def answer_loss(model: Any, examples: Examples, pictures: Tensor, grid: Grid) -> Tensor:
    """Return the mean cross entropy of the answers' tokens."""
    tokens = examples.tokens.long()
    ids, positions, is_picture = expand(tokens, model.config.image_token_id, grid)
    is_answer = torch.arange(tokens.shape[1], device=ids.device) >= examples.answer_starts[:, None]
    # Where the answer begins moves with the picture's tokens.
    is_answer = F.pad(is_answer & (tokens >= 0), (grid.num_tokens - 1, 0))
    rows, *deepstack = encode_pictures(model.model.visual, pictures, grid)
    embeddings = model.model.language_model.embed_tokens(ids.clamp(min=0))
    embeddings = embeddings.masked_scatter(is_picture.unsqueeze(-1), rows.to(embeddings.dtype))
    hidden = model.model.language_model(
        inputs_embeds=embeddings,
        position_ids=positions,
        visual_pos_masks=is_picture,
        deepstack_visual_embeds=deepstack,
        use_cache=False,
    ).last_hidden_state
    told = is_answer[:, 1:]
    logits = model.lm_head(hidden[:, :-1][told])
    return F.cross_entropy(logits.float(), ids[:, 1:][told])


def text_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of conversations without pictures, [B, T], padded with -1."""
    hidden = model.model.language_model(input_ids=tokens.clamp(min=0), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-1)


# ---------------------------------------------------------------------------------------------------- training


def greetings(tokenizer: Any, device: torch.device) -> Tensor:
    """Return the conversations without pictures, [G, T] padded with -1."""
    texts = [f"{TURN_START}user\n{q}{TURN_END}\n{TURN_START}assistant\n{a}{TURN_END}" for q, a in TALK]
    ids = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts)]
    tokens = torch.full((len(ids), max(map(len, ids))), -1)
    for row, of_text in zip(tokens, ids, strict=True):
        row[: len(of_text)] = torch.tensor(of_text)
    return tokens.to(device)


def train(model: Any, tokenizer: Any, tokenizer_path: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train in place; return the loss curve. Ends after its steps or its seconds, whichever comes first."""
    device = torch.device(arguments.device)
    pool = Pool(tokenizer_path, device, arguments.workers, arguments.seed, arguments.pool)
    grids = {size: Grid.of(model.model.visual, *size, device) for sizes in SIZES.values() for size in sizes}
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=arguments.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    text, rng = greetings(tokenizer, device), random.Random(arguments.seed)
    curve: list[dict[str, float]] = []
    running = torch.zeros((), device=device)
    pool.fill(least=arguments.batch)
    started = time.perf_counter()
    try:
        for step in range(arguments.steps):
            seconds = time.perf_counter() - started
            progress = max(step / arguments.steps, seconds / arguments.seconds)
            if progress >= 1:
                break
            if step % 4 == 0:
                pool.fill(least=0)
            aspect = rng.choices(_ASPECTS, _SHARES)[0]
            examples, size = pool.batch(aspect, arguments.batch), rng.choice(SIZES[aspect])
            pictures = render(examples.backgrounds, examples.things, *size)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                loss = answer_loss(model, examples, pictures, grids[size])
                running += loss.detach()
                if step % 20 == 0:
                    loss = loss + 0.2 * text_loss(model, text)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * learning_rate_share(int(progress * 10_000), 10_000)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % arguments.report_every == 0:
                point = {
                    "step": step + 1,
                    "seconds": round(seconds, 1),
                    "pictures_drawn": sum(pool.counts.values()),
                    "loss": round(running.item() / arguments.report_every, 4),
                }
                curve.append(point)
                print(json.dumps(point), flush=True)
                running.zero_()
    finally:
        pool.close()
    return curve


# ------------------------------------------------------------------------------------------------------- score


def score_pictures(count: int, seed: int) -> list[tuple[Image.Image, Any, bool]]:
    """Return pictures that were never trained, with their counts, and whether they hold a pair that never was.

    Every second one does. Sizes and aspects are those of no trained picture.
    """
    rng = random.Random(f"score-{seed}")
    drawn = []
    for index in range(count):
        width, height = rng.choice(((224, 224), (320, 240), (240, 320), (150, 150), (300, 170)))
        scene = draw_scene(rng, aspect=width / height, never_trained=index % 2 == 1)
        pixels = render(*scene_numbers([scene]), height, width)[0]
        drawn.append((Image.fromarray(pixels.numpy()), scene.counts(), index % 2 == 1))
    return drawn


def describe_pictures(directory: Path, pictures: Sequence[Image.Image], num_stages: int = 1) -> list[str]:
    """Return what an exported model says is in each picture, through raypp's doors and stages on a CPU."""
    config = EngineConfig.from_flat(str(directory), device="cpu", num_stages=num_stages, stage_num_threads=1)
    plan = plan_engine(config, Hardware(1))
    assert plan.model.vision is not None
    tokenizer, engine = Tokenizer(directory), LocalEngine(plan)
    preparer = RequestPreparer(
        tokenizer,
        vocab_size=plan.model.vocab_size,
        max_model_len=plan.max_model_len,
        seed=0,
        pictures=PictureReader(plan.model.vision, plan.max_model_len, Fetcher(config.images)),
    )
    text = {"type": "text", "text": DESCRIBE[0]}
    conversations = [[{"role": "user", "content": [{"type": "image", "image": image}, text]}] for image in pictures]
    prepared = preparer.chats(conversations, SamplingParams(max_tokens=48, temperature=0.0))
    eos_token_ids = frozenset(plan.model.eos_token_ids)
    requests = [
        engine.submit(p.prompt_token_ids, p.params, eos_token_ids=eos_token_ids, items=p.items) for p in prepared
    ]
    while engine.has_unfinished:
        engine.step()
    return [tokenizer.decode(request.output_token_ids) for request in requests]


def score(directory: Path, count: int, seed: int) -> dict[str, Any]:
    """Return the share of pictures whose colours, shapes and counts an exported model says exactly."""
    drawn = score_pictures(count, seed)
    said = describe_pictures(directory, [image for image, _, _ in drawn])
    exact = [read_caption(text) == counts for text, (_, counts, _) in zip(said, drawn, strict=True)]
    never = [hit for hit, (_, _, is_new) in zip(exact, drawn, strict=True) if is_new]
    known = [hit for hit, (_, _, is_new) in zip(exact, drawn, strict=True) if not is_new]
    wrong = [
        {"said": text, "is": sorted(f"{n} {' '.join(kind)}" for kind, n in counts.items())}
        for text, hit, (_, counts, _) in zip(said, exact, drawn, strict=True)
        if not hit
    ]
    return {
        "pictures": count,
        "exact": round(sum(exact) / len(exact), 4),
        "exact_of_trained_pairs": round(sum(known) / len(known), 4),
        "exact_of_pairs_never_trained": round(sum(never) / len(never), 4),
        "first_wrong": wrong[:8],
    }


# ------------------------------------------------------------------------------------------------- the program


def make_tokenizer(seed: int) -> Any:
    """Learn the words of questions and answers."""
    rng = random.Random(seed)
    scenes = [draw_scene(rng) for _ in range(4000)]
    texts = [part for scene in scenes for part in (*exchange(scene, rng), caption(scene))]
    return train_tokenizer([*texts, *(part for turn in TALK for part in turn)], VOCAB_SIZE)


def write_preprocessor(directory: Path) -> None:
    """Write how pictures are brought to patches."""
    common = {
        "size": PIXELS,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = {"image_processor_type": "Qwen2VLImageProcessor", **common}
    (directory / "preprocessor_config.json").write_text(json.dumps(image, indent=1) + "\n")
    video_size = {"shortest_edge": PIXELS["shortest_edge"], "longest_edge": 16 * PIXELS["longest_edge"]}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", **common, "size": video_size}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1) + "\n")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("build/tiny-vl"), help="where the model goes")
    add("--score", type=Path, metavar="MODEL", help="do not train; score this exported model")
    add("--score-pictures", type=int, default=200)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, default=12_000)
    add("--seconds", type=float, default=1e9, help="end the training after so long; the schedule follows")
    add("--batch", type=int, default=512, help="pictures a step")
    add("--learning-rate", type=float, default=1.5e-3)
    add("--workers", type=int, default=12, help="processes that draw")
    add("--pool", type=int, default=1_000_000, help="examples of each aspect that are kept")
    add("--report-every", type=int, default=200, metavar="STEPS")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Train, export and score; or only score."""
    arguments = parse_arguments(argv)
    if arguments.score:
        print(json.dumps(score(arguments.score, arguments.score_pictures, arguments.seed), indent=1))
        return
    torch.manual_seed(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(arguments.seed)
    tokenizer.save_pretrained(arguments.out)
    model = build_model(tokenizer).to(arguments.device)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": num_parameters, "vocabulary": len(tokenizer)}), flush=True)
    curve = train(model, tokenizer, str(arguments.out), arguments)
    export(model, tokenizer, arguments.out)
    write_preprocessor(arguments.out)
    settings = {name: value for name, value in vars(arguments).items() if isinstance(value, int | float)}
    record = {
        "settings": settings,
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else platform.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": num_parameters,
        "curve": curve,
    }
    path = arguments.out / "training.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    record["result"] = score(arguments.out, arguments.score_pictures, arguments.seed)
    print(json.dumps(record["result"], indent=1))
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
