"""How `tiny-vl` is trained, in small: the forward is transformers', and the pictures are what their captions say."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("transformers.vision_utils")

from tiny_pictures import MAX_THINGS, NAMELESS, NEVER_TRAINED, caption, draw_scene, read_caption, render, scene_numbers
from tiny_vl_forward import Grid, PictureBatch, answer_loss, text_loss
from tiny_vl_trainer import Trainer, with_weights
from train_tiny_vl import ALL_LESSONS, build_model, draw_examples, draw_held_out, make_tokenizer, tokenized
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from raypp.models.registry import resolve_model_path

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(0, num_scenes=200)


@pytest.fixture(scope="module")
def model(tokenizer):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(tokenizer)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.08)
    return model.eval()


@torch.inference_mode()
def test_the_forward_is_that_of_transformers(model, tokenizer):
    height, width = 80, 112
    parts = [torch.from_numpy(part) for part in draw_examples(tokenizer, 4, 1.4, random.Random(0))]
    batch = PictureBatch(*parts[:2], parts[2].long(), parts[3].long(), torch.tensor(1.3))
    grid = Grid.of(model.model.visual, height, width, CPU)
    loss, pad = answer_loss(model, batch, grid), model.config.image_token_id
    total, count = 0.0, 0
    for picture, padded, targets in zip(
        render(*parts[:2], height, width, 1.3), batch.tokens, batch.targets, strict=True
    ):
        tokens = padded[padded >= 0]
        place = int((tokens == pad).nonzero()[0])
        ids = torch.cat([tokens[:place], torch.full((grid.num_tokens,), pad), tokens[place + 1 :]]).unsqueeze(0)
        cut = picture.view(grid.rows // 2, 2, 8, grid.columns // 2, 2, 8, 3).permute(0, 3, 1, 4, 6, 2, 5)
        pixels = cut.reshape(-1, 3, 1, 64).expand(-1, -1, 2, -1).reshape(-1, 384).float() / 127.5 - 1
        model.model.rope_deltas = None
        logits = model(
            input_ids=ids,
            pixel_values=pixels,
            image_grid_thw=torch.tensor([[1, grid.rows, grid.columns]]),
            mm_token_type_ids=(ids == pad).int(),
        ).logits[0]
        for at in (targets >= 0).nonzero()[:, 0].tolist():
            shifted = at + grid.num_tokens - 1
            assert ids[0, shifted] == targets[at]
            total += F.cross_entropy(logits[shifted - 1], targets[at]).item()
            count += 1
    assert loss.item() == pytest.approx(total / count, rel=1e-4)


@torch.inference_mode()
def test_text_alone(model, tokenizer):
    tokens, targets = (torch.from_numpy(x).long() for x in tokenized(tokenizer, [[("hello", "Hello!")]], [None], 24))
    ids = tokens[tokens >= 0].unsqueeze(0)
    expected = F.cross_entropy(model(input_ids=ids).logits[0, :-1], targets[:, 1 : ids.shape[1]][0], ignore_index=-1)
    assert text_loss(model, tokens, targets).item() == pytest.approx(expected.item(), rel=1e-4)


def test_examples_hold_answers_as_targets(tokenizer):
    *_, tokens, targets = draw_examples(tokenizer, 8, 1.0, random.Random(1))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for row, told in zip(tokens, targets, strict=True):
        assert (row[told >= 0] == told[told >= 0]).all()
        assert 1 <= (told == end).sum() <= ALL_LESSONS.num_exchanges
        assert (row == tokenizer.convert_tokens_to_ids("<|image_pad|>")).sum() == 1


def test_pairs_that_are_never_trained_are_never_drawn():
    rng = random.Random(0)
    trained = set().union(*(draw_scene(rng).counts() for _ in range(3000)))
    assert not trained & NEVER_TRAINED
    assert len({kind for kind in trained if NAMELESS not in kind}) == 10 * 8 - len(NEVER_TRAINED)
    assert all(set(draw_scene(rng, never_trained=True).counts()) & NEVER_TRAINED for _ in range(100))


def test_captions_are_read_back():
    rng = random.Random(0)
    for _ in range(500):
        scene = draw_scene(rng, never_trained=rng.random() < 0.5)
        if not any(NAMELESS in (thing.colour, thing.shape) for thing in scene.things):
            assert read_caption(caption(scene)) == scene.counts()
    assert read_caption("Two red stars.") != read_caption("Three red stars.")
    assert read_caption("Two red.") != read_caption("Nothing.")


def test_things_are_drawn_in_their_colours_and_do_not_touch():
    rng = random.Random(3)
    for _ in range(20):
        scene = draw_scene(rng)
        [picture] = render(*scene_numbers([scene]), 96, 96)
        covered = (picture != torch.tensor(scene.background)).any(-1)
        assert covered.any() == bool(scene.things)
        for thing in scene.things:
            assert (picture.view(-1, 3) == torch.tensor(thing.rgb)).all(-1).any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU, and pictures are on the host")
def test_the_kernel_draws_what_plain_torch_draws():
    tiny_render_kernel = pytest.importorskip("tiny_render_kernel")
    rng = random.Random(0)
    backgrounds, things = scene_numbers([draw_scene(rng, aspect=1.3, min_things=7) for _ in range(6)])
    things[..., 4] = (torch.arange(things[..., 4].numel()) % 11).view_as(things[..., 4])  # every outline
    expected = render(backgrounds, things, 24, 32, 1.3).int()
    drawn = tiny_render_kernel.render(backgrounds, things, 24, 32, torch.tensor(1.3)).int()
    differing = (drawn - expected).abs()
    assert differing.max() <= 1  # the last bit of a product
    assert (differing > 0).float().mean() < 1e-3


def test_steps_of_training(model, tokenizer):
    held_out = draw_held_out(tokenizer, 14, CPU)
    [(size, batch), *_] = held_out.batches
    pupil = with_weights(model, dict(model.named_parameters()))
    text = tuple(torch.from_numpy(part).long() for part in tokenized(tokenizer, [[("hi", "Hi!")]], [None], 24))
    trainer = Trainer(pupil, batch, text, 3e-3, dtype=torch.float32, graphs=False)
    losses = []
    for _ in range(8):
        trainer.loss.zero_()
        trainer.step(size, batch, text, 1.0)
        losses.append(trainer.loss.item())
    assert losses[-1] < losses[0] - 1
    assert all(not torch.equal(trainer.average[name], weights) for name, weights in trainer.weights().items())
    assert replace(held_out, batches=[(size, batch)]).share_told_exactly(pupil, trainer.average) < 1


def test_what_is_told_exactly_of_held_out_pictures():
    path = resolve_model_path("tiny-vl")
    trained = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    held_out = draw_held_out(AutoTokenizer.from_pretrained(path), 42, CPU)
    assert held_out.share_told_exactly(trained, dict(trained.named_parameters())) > 0.9


def test_crowded_pictures():
    rng = random.Random(0)
    assert all(7 <= len(draw_scene(rng, min_things=7).things) <= MAX_THINGS for _ in range(50))
