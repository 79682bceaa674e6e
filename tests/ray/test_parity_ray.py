"""The same parity on real Ray actors, with 1, 3 and 4 stages; the other tests here have two."""

from __future__ import annotations

import json
import random

import pytest
from exactness import ExactComparison
from hf_models import FAMILIES, make_checkpoint

from raypp import LLM, SamplingParams

pytestmark = pytest.mark.ray


# Seeds whose models have layers for that many stages, a family each; steps in flight.
@pytest.mark.parametrize(
    ("seed", "wanted_stages", "max_steps"),
    [(2, 3, 3), pytest.param(3, 4, 4, marks=pytest.mark.full), pytest.param(4, 1, 2, marks=pytest.mark.full)],
)
def test_greedy_tokens_equal_transformers_on_actors(local_ray, tmp_path, seed, wanted_stages, max_steps):
    comparison = ExactComparison()
    path = make_checkpoint(FAMILIES[seed % len(FAMILIES)], seed, tmp_path / str(seed), min_layers=wanted_stages)
    rng = random.Random(seed)
    options = {"block_size": 8, "max_num_batched_tokens": 24, "min_prefill_chunk_tokens": 4, "max_num_seqs": 8}
    with LLM(
        str(path),
        num_stages=wanted_stages,
        max_model_len=160,
        skip_tokenizer_init=True,
        num_kv_blocks=31,
        max_steps_per_cohort=max_steps,
        mode="full_and_piecewise" if seed == 2 else "none",  # padded steps, called
        **options,
    ) as llm:
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 60))] for _ in range(6)]

        def generate(prompts, lengths, llm=llm):
            params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            return [output.outputs[0].token_ids for output in outputs]

        comparison.compare(path, prompts, 32, generate)
        stats = llm.stats()
        assert len(llm.processes()["stages"]) == wanted_stages
        assert stats["num_prefill_chunks"] > stats["num_prefills"]
        assert stats["num_preemptions"] > 0
        assert all(set(stage["graphs"]) == ({"full", "piecewise"} if seed == 2 else set()) for stage in stats["stages"])
    comparison.assert_rare()
