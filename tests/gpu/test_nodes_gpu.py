"""Two GPUs as two nodes: texts of one node, bit for bit, also after a node was lost; NCCL takes a cable between them.

The nodes are those of `tools/node_bed.py`.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

from node_bed import NodeBed, obstacle
from node_links import THROUGH_THE_CABLE
from program_on_bed import Program, stages_on, start_requests
from workload import exactly, model_settings

from raypp import LLM

WHY_NOT = obstacle()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no nodes on this machine: {WHY_NOT}")

MODEL = os.environ.get("NODES_MODEL", "qwen3-0.6b")
NUM_STREAMS, NUM_TOKENS = 64, 300
ENGINE: dict[str, Any] = {
    **model_settings(MODEL),
    "num_stages": 2,
    "batch_invariant": True,
    "skip_tokenizer_init": True,
    "max_num_seqs": NUM_STREAMS,
    "max_num_batched_tokens": 1024,
    "max_model_len": 2048,
    "num_kv_blocks": 6000,  # for all streams, and not all memory
}
ON_NODES = {"placement": "strict_spread", "max_engine_restarts": 3, "restart_wait_s": 100.0, "close_timeout_s": 4.0}


def made_prompts() -> list[dict[str, list[int]]]:
    """Return prompts of 1 to 1,000 tokens."""
    rng = random.Random(3)
    return [
        {"prompt_token_ids": [rng.randrange(50_000) for _ in range(int(1000 ** rng.random()))]}
        for _ in range(NUM_STREAMS)
    ]


def test_texts_and_a_lost_node() -> None:
    prompts = made_prompts()
    with LLM(**ENGINE) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, exactly(NUM_TOKENS))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    gpus = {index: {"CUDA_VISIBLE_DEVICES": visible[index]} for index in range(2)}
    with NodeBed(2, environments=gpus, has_cable=True) as bed:
        bed.set_cable_rate(10)
        program = Program(bed, **THROUGH_THE_CABLE)
        started = program.ask("start", engine={**ENGINE, **ON_NODES})
        assert "error" not in started, started["error"]
        assert (stages_on(bed, 0), stages_on(bed, 1)) == ({"0"}, {"1"})
        print(f"\nstarted in {started['seconds']:.1f} s", flush=True)
        answer = program.ask("generate", max_tokens=NUM_TOKENS, prompts=prompts)
        assert answer["token_ids"] == expected
        print(f"two nodes: {NUM_STREAMS} texts are the same bit for bit, in {answer['seconds']:.1f} s", flush=True)
        start_requests(program, max_tokens=NUM_TOKENS, prompts=prompts)
        bed.kill_node(1)
        killed_s = time.monotonic()
        bed.add_node(1)
        answer = program.ask("collect")
        assert answer.get("token_ids") == expected, answer.get("error")
        print(f"a node was lost: all texts the same, after {time.monotonic() - killed_s:.1f} s", flush=True)
        assert stages_on(bed, 1) == {"1"}
        program.end()
