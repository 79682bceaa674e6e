"""An encoder's graphs against calls, and encoder actors beside a stage, on GPUs."""

from __future__ import annotations

import pytest
import torch
from exactness import ExactComparison
from hf_vision import (
    FIRST_TEXT_TOKEN,
    hf_vision_choices,
    make_gemma3_checkpoint,
    make_gemma4_checkpoint,
    make_vision_checkpoint,
    picture,
    picture_prompt,
)

from raypp import LLM, SamplingParams
from raypp.api.picture_prompts import EncodedPrompt
from raypp.encoder.encoder_graphs import EncoderCudaGraphManager, GraphChoice
from raypp.graphs.buckets import Buckets
from raypp.graphs.graph_manager import graph_maker
from raypp.models.config import load_model_config
from raypp.models.registry import build_encoder
from raypp.models.weights import CheckpointWeights

SIZES = ((40, 40), (90, 30), (17, 60), (64, 64), (33, 47), (8, 8))


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3", "gemma4", "gemma4 E"])
def path(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("vl")
    if request.param == "gemma3":
        return make_gemma3_checkpoint(3, directory)
    if request.param.startswith("gemma4"):
        return make_gemma4_checkpoint(4, directory, has_layer_inputs=request.param == "gemma4 E")
    return make_vision_checkpoint(3, directory, min_layers=4)


def test_graphs_equal_calls_on_the_same_padding_bit_for_bit(path):
    device, budgets = torch.device("cuda:0"), Buckets({4, 8, 16, 24, 48})  # multiples of an image of Gemma's
    config = load_model_config(path)
    tower = build_encoder(config, dtype=torch.bfloat16, device=device, source=CheckpointWeights(path))
    with torch.inference_mode():
        captured = EncoderCudaGraphManager(tower, budgets, 4, device, graph_maker(device))
        captured.capture()
        captured.choice = GraphChoice(budgets, {})  # also where calls are faster
        called = EncoderCudaGraphManager(tower, budgets, 4, device, None)
        for seed in range(6):
            _, items = picture_prompt(path, [picture(seed + i, *size) for i, size in enumerate(SIZES)])
            for one, other in zip(captured.encode(items.items), called.encode(items.items), strict=True):
                assert one.key == other.key
                assert torch.equal(one.rows, other.rows)
    assert captured.stats.num_captured_batches > 0
    assert captured.stats.num_graphs == len(budgets.sizes)


def settings_of(**changes):
    """Return settings of a stage and an encoder that share a GPU."""
    return {
        "num_stages": 1,
        "stage_num_gpus": 0.5,
        "encoder_num_gpus": 0.25,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 256,
        "num_kv_blocks": 200,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "skip_tokenizer_init": True,
    } | changes


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_pictures_go_through_encoder_actors_to_a_stage_on_the_same_gpu(path, mode):
    text = [FIRST_TEXT_TOKEN + i for i in range(12)]
    prompts = [
        EncodedPrompt(*picture_prompt(path, [text[:3], picture(1, 40, 40), text[3:], picture(2, 90, 30)])),
        EncodedPrompt(text),
        EncodedPrompt(*picture_prompt(path, [picture(2, 90, 30), text[:5]])),
    ]
    with LLM(str(path), **settings_of(dtype="bfloat16", mode=mode)) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8, 8]
        [counted] = llm.stats()["encoders"]["actors"]
    assert counted["writes_to_first_stage"]
    assert counted["num_items"] == 2
    assert (counted["num_graphs"] > 0) == (mode == "auto")


def test_tokens_behind_pictures_equal_transformers(path):
    """In float32; prompts are cut into chunks, images come again from the prefix cache."""
    text = [FIRST_TEXT_TOKEN + i for i in range(70)]
    layouts = ([text[:3], picture(1, 40, 40), text[3:40]], [text[1:60], picture(2, 90, 30), text[:5]], [text])
    prompts = [picture_prompt(path, list(layout)) for layout in layouts]
    items_of = {tuple(prompt): items for prompt, items in prompts}

    def reference(path, prompt, output):
        return hf_vision_choices(path, prompt, items_of[tuple(prompt)], output)

    comparison = ExactComparison()
    with LLM(str(path), **settings_of(dtype="float32", max_num_batched_tokens=40)) as llm:

        def generate(listed, lengths):
            params = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in lengths]
            asked = [EncodedPrompt(prompt, items_of[tuple(prompt)]) for prompt in listed]
            return [list(output.outputs[0].token_ids) for output in llm.generate(asked, params)]

        for _ in range(2):
            comparison.compare(path, [prompt for prompt, _ in prompts], 12, generate, reference)
    comparison.assert_rare()
