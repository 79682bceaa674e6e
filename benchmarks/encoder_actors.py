"""One request with many pictures, on one encoder actor and on several.

    python benchmarks/encoder_actors.py --model qwen3-vl-8b --num-encoders 1 2

Time to the first token of a request of `--pictures` pictures that nobody has seen before, in an engine that has nothing
else to do; and of one with the same pictures again, which only the caches see. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from pictures import noise, prompt_around
from report import GrowingReport, resolved_config
from workload import exactly, model_settings

from raypp import LLM
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-vl-8b")
    parser.add_argument("--num-encoders", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pictures", type=int, default=20)
    parser.add_argument("--side", type=int, default=336)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--stage-num-gpus", type=float, default=0.4)
    parser.add_argument("--encoder-num-gpus", type=float, default=0.6)
    parser.add_argument("--max-images-per-batch", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="write the report there")
    args = parser.parse_args()
    report = GrowingReport("encoder_actors", vars(args), args.out)
    model = load_model_config(resolve_model_path(model_settings(args.model)["model"]))
    assert model.vision is not None, "a model that takes pictures"
    for num_encoders in args.num_encoders:
        settings: dict[str, Any] = {
            **model_settings(args.model),
            "num_stages": 1,
            "num_encoders": num_encoders,
            "stage_num_gpus": args.stage_num_gpus,
            "encoder_num_gpus": args.encoder_num_gpus,
            "max_images_per_batch": args.max_images_per_batch,
            "max_model_len": args.max_model_len,
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
        }
        begun = time.perf_counter()
        with LLM(**settings) as llm:
            start_s = time.perf_counter() - begun
            report.note_config(resolved_config(llm))
            rng, noises = random.Random(0), np.random.default_rng(0)
            fresh, again = [], []
            for run in range(1 + args.runs):
                items = [noise(model.vision, args.side, args.side, noises) for _ in range(args.pictures)]
                for seconds in (fresh, again):
                    prompt = prompt_around(items, model.vision, 32, model.vocab_size, rng)
                    sent = time.perf_counter()
                    llm.generate([prompt], exactly(1))  # type: ignore[list-item]
                    if run:  # the first one compiles what is left to compile
                        seconds.append(time.perf_counter() - sent)
            figures = {
                "start_s": round(start_s, 1),
                "tokens": len(prompt.token_ids),
                "first_token_ms": round(statistics.median(fresh) * 1e3, 2),
                "first_token_worst_ms": round(max(fresh) * 1e3, 2),
                "first_token_known_pictures_ms": round(statistics.median(again) * 1e3, 2),
                "stats": llm.stats()["encoders"],
            }
        report.put(f"{num_encoders} encoders", figures)
        print(f"{num_encoders} encoders: {figures}", flush=True)
    report.print()


if __name__ == "__main__":
    main()
