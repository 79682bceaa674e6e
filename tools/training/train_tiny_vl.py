"""Train `tiny-vl`, the vision model that ships inside raypp, on pictures that are drawn while it trains.

    scenes -> questions and answers -> tokenizer -> pool of examples -> rendering and training -> bf16 export -> score

Processes draw scenes into a pool; a step takes some of it, at random, renders them at one size and trains on the
answers. `python tools/training/train_tiny.py --vision` runs it; docs/tiny-vl.md has the commands and the figures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import queue
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_pictures import (
    DESCRIBE,
    NAMELESS,
    TALK,
    Scene,
    caption,
    draw_scene,
    exchange,
    read_caption,
    render,
    sayings,
    scene_numbers,
)
from tiny_training import TURN_END, TURN_START, export, learning_rate_share, train_tokenizer
from tiny_vl_forward import GRID_SIDE, MERGE, PATCH, PictureBatch
from tiny_vl_trainer import HeldOut, Trainer, with_weights
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from raypp.api.prepare import RequestPreparer
from raypp.api.tokenizer import Tokenizer
from raypp.config.engine_config import EngineConfig
from raypp.pictures.fetch import Fetcher
from raypp.pictures.reader import PictureReader
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing import LocalEngine
from raypp.types import SamplingParams

VOCAB_SIZE = 768
MAX_POSITIONS = 4096
NUM_SAYINGS = 96
"""Conversations without a picture, in a step."""
PIXELS = {"shortest_edge": 5120, "longest_edge": 10752}  # most come out at the sizes below, of 32 to 36 tokens
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
class Lessons:
    """What is asked about a picture: at first much, then mostly what the model is for."""

    num_exchanges: int
    describe_share: float
    num_tokens: int  # of a conversation at most
    crowded_share: float = 0.3  # of pictures with at least `CROWD` things, besides those that happen to have as many


CROWD = 7
"""Things of a picture that are hard to count."""
ALL_LESSONS = Lessons(num_exchanges=3, describe_share=0.4, num_tokens=112)
POLISH = Lessons(num_exchanges=1, describe_share=0.75, num_tokens=56)


def draw_examples(
    tokenizer: Any, count: int, aspect: float, rng: random.Random, lessons: Lessons = ALL_LESSONS
) -> list[np.ndarray]:
    """Return scenes, tokens and targets, as the tensors of a `PictureBatch`, int16 where they are integers."""
    scenes = [
        draw_scene(rng, aspect=aspect, min_things=CROWD if rng.random() < lessons.crowded_share else 0)
        for _ in range(count)
    ]
    spoken = [[exchange(scene, rng, lessons.describe_share) for _ in range(lessons.num_exchanges)] for scene in scenes]
    tokens, targets = tokenized(tokenizer, spoken, [rng.random() < 0.75 for _ in scenes], lessons.num_tokens)
    return [*(numbers.numpy() for numbers in scene_numbers(scenes)), tokens, targets]


def tokenized(
    tokenizer: Any,
    conversations: Sequence[Sequence[tuple[str, str]]],
    picture_first: Sequence[bool | None],
    max_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return conversations as the chat template renders them, and the answers' tokens alone.

    Both int16 [N, max_tokens], padded with -1. A picture stands before the first question, behind it, or (None)
    nowhere.
    """
    texts, picture = [], f"{_VISION_START}{_IMAGE_PAD}{_VISION_END}"
    for conversation, is_first in zip(conversations, picture_first, strict=True):
        for index, (question, answer) in enumerate(conversation):
            content = question
            if not index and is_first is not None:
                content = picture + question if is_first else question + picture
            texts.append(f"{TURN_START}user\n{content}{TURN_END}\n{TURN_START}assistant\n")
            texts.append(answer + TURN_END)
            texts.append("\n")
    encoded = iter(tokenizer.backend_tokenizer.encode_batch(texts))
    tokens = np.full((len(conversations), max_tokens), -1, np.int16)
    targets = tokens.copy()
    for row, conversation in enumerate(conversations):
        at = 0
        for _ in conversation:
            question, answer, end = (next(encoded).ids for _ in range(3))
            if at + len(question) + len(answer) + len(end) > max_tokens:
                continue
            for ids, is_told in ((question, False), (answer, True), (end, False)):
                tokens[row, at : at + len(ids)] = ids
                if is_told:
                    targets[row, at : at + len(ids)] = ids
                at += len(ids)
    return tokens, targets


def draw_held_out(tokenizer: Any, count: int, device: torch.device) -> HeldOut:
    """Return pictures like those of `score_pictures`, at the sizes that are trained."""
    rng, batches = random.Random("held-out"), []
    sizes = [(aspect, size) for aspect, of_aspect in SIZES.items() for size in of_aspect]
    for aspect, size in sizes:
        scenes: list[Scene] = []
        while len(scenes) < count // len(sizes):
            scene = draw_scene(rng, aspect=aspect, never_trained=len(scenes) % 4 == 3)
            if not any(NAMELESS in (thing.colour, thing.shape) for thing in scene.things):
                scenes.append(scene)
        spoken = [[(DESCRIBE[0], caption(scene))] for scene in scenes]
        tokens, targets = (
            torch.from_numpy(part).long() for part in tokenized(tokenizer, spoken, [True] * len(spoken), 64)
        )
        numbers = (*scene_numbers(scenes), tokens, targets, torch.tensor(aspect))
        batches.append((size, PictureBatch(*(part.to(device) for part in numbers))))
    return HeldOut(batches)


def _drawn_chunks(tokenizer_path: str, seed: int, lessons: Lessons) -> Iterator[tuple[float, list[np.ndarray]]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_path)
    rng = random.Random(seed)
    while True:
        aspect = rng.choices(_ASPECTS, _SHARES)[0]
        yield aspect, draw_examples(tokenizer, _CHUNK, aspect, rng, lessons)


def _draw_forever(tokenizer_path: str, seed: int, lessons: Lessons, into: Any) -> None:
    torch.set_num_threads(1)
    for chunk in _drawn_chunks(tokenizer_path, seed, lessons):
        into.put(chunk)


class Pool:
    """All examples so far, by aspect, on the training device; the oldest go when there are too many."""

    def __init__(
        self,
        tokenizer_path: str,
        device: torch.device,
        num_workers: int,
        seed: int,
        capacity: int,
        lessons: Lessons,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue: Any = context.Queue(maxsize=4 * num_workers or 1)
        self._workers = [
            context.Process(
                target=_draw_forever, args=(tokenizer_path, 1000 * seed + index, lessons, self._queue), daemon=True
            )
            for index in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()
        self._own_chunks = _drawn_chunks(tokenizer_path, 1000 * seed, lessons)  # without processes
        self._device = device
        self._rng = random.Random(seed)
        self._capacity = capacity // _CHUNK * _CHUNK
        self._parts: dict[float, tuple[Tensor, ...]] = {}
        self.counts = dict.fromkeys(_ASPECTS, 0)

    def fill(self, least: int) -> None:
        """Take in what was drawn; wait until there are as many of each aspect."""
        while True:
            is_short = min(self.counts.values()) < least
            if not self._workers:
                aspect, arrays = next(self._own_chunks)
            else:
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
            if not self._workers and min(self.counts.values()) >= least:
                return

    def batch(self, aspect: float, count: int) -> PictureBatch:
        """Return some of them, at random."""
        num_there = min(self.counts[aspect], self._capacity)
        chosen = torch.randint(num_there, (count,), device=self._device)
        backgrounds, things, tokens, targets = (part[chosen] for part in self._parts[aspect])
        seen_at = torch.tensor(aspect * self._rng.uniform(0.88, 1.14), device=self._device)
        return PictureBatch(backgrounds, things, tokens.long(), targets.long(), seen_at)

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
            "num_position_embeddings": GRID_SIDE**2,
            "deepstack_visual_indexes": [1, 2],
        },
        image_token_id=token_id(_IMAGE_PAD),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id(_VISION_START),
        vision_end_token_id=token_id(_VISION_END),
        tie_word_embeddings=True,
    )
    return Qwen3VLForConditionalGeneration(config)


# ---------------------------------------------------------------------------------------------------- training


def text_examples(tokenizer: Any, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Return conversations without pictures: tokens and targets, [N, T]."""
    rng = random.Random(seed)
    said = [[rng.choice(TALK) if rng.random() < 0.2 else sayings(rng)] for _ in range(20_000)]
    tokens, targets = tokenized(tokenizer, said, [None] * len(said), ALL_LESSONS.num_tokens)
    num_tokens = int((tokens >= 0).sum(1).max())
    return tuple(torch.from_numpy(part[:, :num_tokens]).long().to(device) for part in (tokens, targets))


class Checkpoints:
    """Exports the better of the weights and their average: what is cut short leaves a model.

    Args:
        model: That is trained.
        tokenizer: Its.
        held_out: Says which is better.
        directory: Where the model goes.
    """

    def __init__(self, model: Any, tokenizer: Any, held_out: HeldOut, directory: Path) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._held_out = held_out
        self._directory = directory

    def write(self, trainer: Trainer) -> dict[str, float]:
        """Export; return the share of the held-out pictures that each says exactly."""
        candidates = {"exact": trainer.weights(), "exact_of_average": trainer.average}
        shares = {
            name: round(self._held_out.share_told_exactly(self._model, weights), 4)
            for name, weights in candidates.items()
        }
        best = max(candidates, key=lambda name: shares[name])
        with tempfile.TemporaryDirectory(dir=self._directory.parent) as beside:
            export(with_weights(self._model, candidates[best]), self._tokenizer, Path(beside))
            write_preprocessor(Path(beside))
            for path in Path(beside).iterdir():
                path.replace(self._directory / path.name)
        return shares


def train(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Train, and yield the points of the curve. Ends after its steps or its seconds, whichever comes first.

    The model is exported on the way and at the end.
    """
    device = torch.device(arguments.device)
    is_gpu = device.type == "cuda"
    lessons = ALL_LESSONS if arguments.polish is None else POLISH
    pool = Pool(str(arguments.out), device, arguments.workers, arguments.seed, arguments.pool, lessons)
    texts, rng = text_examples(tokenizer, device, arguments.seed), random.Random(arguments.seed)
    words = texts[1][texts[1] >= 0].unique()
    held_out = draw_held_out(tokenizer, arguments.held_out, device)
    checkpoints = Checkpoints(model, tokenizer, held_out, arguments.out)
    step, reported_step, progress = 0, 0, 0.0
    trainer: Trainer | None = None
    try:
        pool.fill(least=arguments.batch)
        started = reported = saved = time.perf_counter()
        while progress < 1:
            if step % (8 if is_gpu else 64) == 0:  # a CPU has other work than drawing
                pool.fill(least=0)
            aspect = rng.choices(_ASPECTS, _SHARES)[0]
            batch = pool.batch(aspect, arguments.batch)
            chosen = torch.randint(len(texts[0]), (NUM_SAYINGS * arguments.batch // 256 or 4,), device=device)
            text = (texts[0][chosen], texts[1][chosen])
            if trainer is None:
                dtype, graphs = torch.bfloat16 if is_gpu else torch.float32, is_gpu and not arguments.eager
                trainer = Trainer(model, batch, text, arguments.learning_rate, dtype=dtype, graphs=graphs)
            share = learning_rate_share(int(progress * 10_000), 10_000)
            trainer.step(rng.choice(SIZES[aspect]), trainer.garble(batch, words), text, share)
            step += 1
            now = time.perf_counter()
            progress = max(step / arguments.steps, (now - started) / arguments.seconds)
            is_due = progress >= 1 or now - saved >= arguments.checkpoint_every
            if not is_due and step % arguments.report_every:
                continue
            loss = trainer.loss.item()  # what was queued is done then
            seconds, num_steps = time.perf_counter() - reported, step - reported_step
            point = {
                "step": step,
                "seconds": round(time.perf_counter() - started, 1),
                "pictures_drawn": sum(pool.counts.values()),
                "loss": round(loss / num_steps, 4),
                "step_ms": round(seconds * 1e3 / num_steps, 1),
            }
            if is_due:
                point |= checkpoints.write(trainer)
                saved = time.perf_counter()
            yield point
            trainer.loss.zero_()
            reported, reported_step = time.perf_counter(), step
    finally:
        pool.close()


# ------------------------------------------------------------------------------------------------------- score


def score_pictures(count: int, seed: int) -> list[tuple[Image.Image, Any, bool]]:
    """Return pictures that were never trained, with their counts, and whether they hold a pair that never was.

    Every fourth one does. Sizes and aspects are those of no trained picture.
    """
    rng = random.Random(f"score-{seed}")
    drawn = []
    for index in range(count):
        width, height = rng.choice(((224, 224), (320, 240), (240, 320), (150, 150), (300, 170)))
        scene = draw_scene(rng, aspect=width / height, never_trained=index % 4 == 3)
        while any(NAMELESS in (thing.colour, thing.shape) for thing in scene.things):
            scene = draw_scene(rng, aspect=width / height)
        pixels = render(*scene_numbers([scene]), height, width)[0]
        drawn.append((Image.fromarray(pixels.numpy()), scene.counts(), index % 4 == 3))
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
        engine.submit(r.prompt_token_ids, r.params, eos_token_ids=eos_token_ids, items=r.items)
        for r in (one.request for one in prepared)
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
        "exact_of_trained_pairs": round(sum(known) / max(len(known), 1), 4),
        "exact_of_pairs_never_trained": round(sum(never) / max(len(never), 1), 4),
        "first_wrong": wrong[:8],
    }


# ------------------------------------------------------------------------------------------------- the program


def make_tokenizer(seed: int, num_scenes: int = 4000) -> Any:
    """Learn the words of questions and answers."""
    rng = random.Random(seed)
    scenes = [draw_scene(rng) for _ in range(num_scenes)]
    texts = [part for scene in scenes for part in (*exchange(scene, rng), *sayings(rng))]
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
    add("--score-pictures", type=int, default=200, help="0: do not score what was trained")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, default=14_000)
    add("--seconds", type=float, default=1e9, help="end the training after so long; the schedule follows")
    add(
        "--polish",
        type=Path,
        metavar="MODEL",
        help="go on with this exported model; asks mostly what is in the picture",
    )
    add("--eager", action="store_true", help="no CUDA graphs: slower")
    add("--batch", type=int, default=256, help="pictures a step")
    add("--learning-rate", type=float, default=1.5e-3)
    add("--workers", type=int, default=12, help="processes that draw; 0: this one")
    add("--pool", type=int, default=1_000_000, help="examples of each aspect that are kept")
    add("--report-every", type=int, default=200, metavar="STEPS")
    add("--held-out", type=int, default=1400, help="pictures that say, at each checkpoint, which weights are better")
    add("--checkpoint-every", type=float, default=60.0, metavar="SECONDS")
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
    if arguments.polish is None:
        tokenizer = make_tokenizer(arguments.seed)
        model = build_model(tokenizer)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.polish)
        model = Qwen3VLForConditionalGeneration.from_pretrained(arguments.polish, dtype=torch.float32)
    tokenizer.save_pretrained(arguments.out)
    model.to(arguments.device).train()
    num_parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": num_parameters, "vocabulary": len(tokenizer)}), flush=True)
    settings = {name: value for name, value in vars(arguments).items() if isinstance(value, int | float)}
    record: dict[str, Any] = {
        "settings": settings,
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else platform.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": num_parameters,
        "curve": [],
    }
    path = arguments.out / "training.json"
    for point in train(model, tokenizer, arguments):
        print(json.dumps(point), flush=True)
        record["curve"].append(point)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if arguments.score_pictures:
        record["result"] = score(arguments.out, arguments.score_pictures, arguments.seed)
        print(json.dumps(record["result"], indent=1))
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
