"""Is the split that `raypp tune` finds as fast as the even one, or faster? Measured on engines, by turns.

python benchmarks/tuned_partition.py            tiny, and a model of the same kind with a large vocabulary
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from raypp import LLM, EngineConfig, SamplingParams
from raypp.actors.engine_actors import tune_engine

LARGE_VOCABULARY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 65536,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
PROMPT_LEN = 16


def main() -> None:
    """Tune and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LARGE_VOCABULARY))
        for model, name in (("tiny", "tiny"), (folder, "vocabulary of 65,536")):
            compare(model, name, args)


def compare(model: str, name: str, args: argparse.Namespace) -> None:
    """Tune one model, run it with both splits by turns, print a table."""
    config = EngineConfig.from_flat(
        model,
        num_stages=args.num_stages,
        load_format="auto" if model == "tiny" else "dummy",
        skip_tokenizer_init=True,
        max_num_seqs=args.batch_size * args.num_stages,
        max_model_len=PROMPT_LEN + args.tokens,
        enable_prefix_caching=False,
    )
    tuning = tune_engine(
        config, context_len=PROMPT_LEN + args.tokens // 2, num_rows=args.batch_size, temperature=args.temperature
    )
    measured = tuning.measured
    print(f"\n{name}: {args.num_stages} stages, {measured.num_rows} rows of {measured.context_len} tokens")
    parts = ("layer", "embedding", "lm_head", "sampler", "every_stage")
    print("  " + ", ".join(f"{part} {getattr(measured, part + '_ms'):.3f} ms" for part in parts))
    splits = {"even": list(tuning.even.layers), "tuned": list(tuning.best.layers)}
    speeds: dict[str, list[float]] = {name: [] for name in splits}
    with ExitStack() as opened:
        # Both engines stay open and take turns: the one that waits uses nothing, and a slow minute slows both.
        engines = {
            name: opened.enter_context(LLM(config.with_settings(layer_partition=layers)))
            for name, layers in splits.items()
        }
        for number in range(-1, args.rounds):  # the first round is thrown away
            if number == 0:
                spent_s = {split: stage_cpu_seconds(engine) for split, engine in engines.items()}
            for split in list(splits) if number % 2 == 0 else reversed(list(splits)):
                speed = tokens_per_second(engines[split], config, args)
                if number >= 0:
                    speeds[split].append(speed)
        num_steps = args.rounds * args.tokens * args.num_stages  # one token per row and step
        cpu_ms = {
            split: [
                (after - before) / num_steps * 1e3
                for before, after in zip(spent_s[split], stage_cpu_seconds(engine), strict=True)
            ]
            for split, engine in engines.items()
        }
    predicted = {"even": tuning.even.slowest_ms, "tuned": tuning.best.slowest_ms}
    for split, layers in splits.items():
        runs = " ".join(f"{speed:.0f}" for speed in speeds[split])
        print(
            f"  {split:6} {layers!s:10} predicted {predicted[split]:.2f} ms a step; "
            f"processor time of the stages {' '.join(f'{ms:.2f}' for ms in cpu_ms[split])} ms a step; "
            f"{statistics.median(speeds[split]):.0f} tokens/s, the median of {runs}"
        )
    gains = [tuned / even - 1 for tuned, even in zip(speeds["tuned"], speeds["even"], strict=True)]
    print(
        f"  gain {statistics.median(gains):+.1%}, the median over pairs of turns; "
        f"predicted {tuning.gain_over(tuning.even):+.1%}",
        flush=True,
    )


def stage_cpu_seconds(llm: LLM) -> list[float]:
    """Return the processor time that each stage has spent so far: other load does not change it much."""
    spent_s = []
    for pid in llm.processes()["stages"]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent_s.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return spent_s


def tokens_per_second(llm: LLM, config: EngineConfig, args: argparse.Namespace) -> float:
    """Return the speed of an engine whose cohorts are full all the time."""
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1 + index] * PROMPT_LEN} for index in range(config.scheduler.max_num_seqs)]
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started_s
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


if __name__ == "__main__":
    main()
