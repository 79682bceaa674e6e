"""Tries whether stages of transformers' modules generate what transformers does: `python -m` it, see `main`.

A small random model in the shape of the one in question runs on one stage, and on the stages that are planned, with
prompts in chunks, shared beginnings and decoding rows; transformers reads what comes out.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from raypp.config.engine_config import EngineConfig
from raypp.models.asked import HAS_MEMBERS, TRUSTS_CODE
from raypp.plan.engine_plan import plan_engine
from raypp.plan.hardware import Hardware
from raypp.testing.local_engine import LocalEngine
from raypp.testing.shrunken_model import save_random_model, shrunken_config
from raypp.types import SamplingParams

NUM_TOKENS = 8
TIE_GAP = 1e-2
"""Below this gap between two logits either token may be chosen. Deep random models double rounding with each layer."""


def prompts() -> list[list[int]]:
    """Return prompts of mixed lengths, in a vocabulary of 257; two share a beginning."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 250) for _ in range(20)]
    lone = [[rng.randrange(3, 250) for _ in range(count)] for count in (12, 3, 30)]
    return [*lone, [*shared, 5], [*shared, 6, 7]]


def first_difference(
    path: Path, partition: list[int], *, num_members: int = 1, trusts_code: bool = False
) -> str | None:
    """Return where a model's stages generate another token than transformers; None: nowhere.

    Args:
        path: A small model, in float32.
        partition: Layers of each stage.
        num_members: Of each stage.
        trusts_code: Whether code that comes with it may be run.
    """
    settings: dict[str, Any] = {
        "model_impl": "transformers",
        "trust_remote_code": trusts_code,
        "num_stages": len(partition),
        "tensor_parallel_size": num_members,
        "layer_partition": partition,
        "device": "cpu",
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "min_prefill_chunk_tokens": 3,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "num_kv_blocks": 80,
        "stage_num_threads": 1,
        "skip_tokenizer_init": True,
    }
    engine = LocalEngine(plan_engine(EngineConfig.from_flat(str(path), **settings), Hardware(1)))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(prompts(), params)
    auto = transformers.AutoModelForCausalLM
    trust: Any = {"trust_remote_code": trusts_code}
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **trust).eval()
    for number, (prompt, output) in enumerate(zip(prompts(), outputs, strict=True)):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + list(output[:-1])]), use_cache=False).logits[0]
        for place, (token, of_token) in enumerate(zip(output, logits[len(prompt) - 1 :].float(), strict=True)):
            if not float(of_token.max() - of_token[token]) < TIE_GAP:
                return f"prompt {number}: token {place} is {token}, transformers has {int(of_token.argmax())}"
    return None


def try_cut(
    path: Path, partition: list[int], *, has_members: bool = False, trusts_code: bool = False
) -> dict[str, Any]:
    """Return what differs on one stage, on those of `partition`, and with two members: None where nothing does.

    By which weights members are cut goes by names, so what is right with two is right with more.
    """
    auto = transformers.AutoConfig
    config = auto.from_pretrained(path, trust_remote_code=trusts_code).get_text_config(decoder=True)
    with tempfile.TemporaryDirectory() as folder:
        small = save_random_model(shrunken_config(config), Path(folder), code=path if trusts_code else None)
        whole = first_difference(small, [sum(partition)], trusts_code=trusts_code)
        has_cut = len(partition) > 1 and whole is None
        cut = first_difference(small, partition, trusts_code=trusts_code) if has_cut else None
        shared = None
        if has_members and whole is None:
            shared = first_difference(small, [sum(partition)], num_members=2, trusts_code=trusts_code)
    return {"whole": whole, "cut": cut, "members": shared}


def main(path: str, partition: str, *options: str) -> None:
    """Print the result of `try_cut` as a line of JSON, or `error`: why it could not be tried."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    try:
        trusts_code = TRUSTS_CODE in options
        layers, has_members = [int(count) for count in partition.split(",")], HAS_MEMBERS in options
        found = try_cut(Path(path), layers, has_members=has_members, trusts_code=trusts_code)
    except Exception as error:  # a model's own code may raise anything
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
