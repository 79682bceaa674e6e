"""Speculation on against off, with the embedded model: text that repeats itself, and text that does not.

    python benchmarks/speculation.py                       two engines beside each other, runs alternate
    python benchmarks/speculation.py --rounds 9 --num-stages 2
    python benchmarks/speculation.py --method auto --draft-model tiny-eagle3

    code    four requests that continue code with repeated identifiers, greedy
    copy    four requests that copy a document, greedy
    plain   four requests at temperature 1.3, which repeat nothing

Medians over rounds in which either side goes first in turn. The speedup is that of the two runs of a round, so that
what else happens on the machine hits both. The tokens of both sides must be equal. Speculation is adaptive, unless
`--num-speculative-tokens` says otherwise. The last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from report import print_report, resolved_config

from raypp import LLM, SamplingParams

CODE = """\
class Account:
    def __init__(self, owner, balance, limit):
        self.owner = owner
        self.balance = balance
        self.limit = limit

    def get_owner(self):
        return self.owner

    def get_balance(self):
        return self.balance

"""
DOCUMENT = """\
The lock is released when the block ends, even if an exception is raised inside of it. A second thread that waits for
the lock goes on then, and sees everything that the first one has written before. A lock that was not acquired cannot
be released: that raises RuntimeError.
"""


def workloads(num_tokens: int) -> dict[str, tuple[list[str], list[SamplingParams]]]:
    """Return prompts and parameters by name."""
    greedy = [SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)] * 4
    drawn = [SamplingParams(max_tokens=num_tokens, temperature=1.3, seed=seed, ignore_eos=True) for seed in range(4)]
    code = [CODE * 2 + f"    def get_{name}(self):\n" for name in ("limit", "owner", "name", "rate")]
    copies = [DOCUMENT * 3 + DOCUMENT[: 20 * (index + 1)] for index in range(4)]
    plain = [f"def {name}(" for name in ("main", "parse", "load", "run")]
    return {"code": (code, greedy), "copy": (copies, greedy), "plain": (plain, drawn)}


def run(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> tuple[float, list[list[int]]]:
    """Return the seconds that the requests took together, and their tokens."""
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - started, [output.outputs[0].token_ids for output in outputs]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=1)
    parser.add_argument("--num-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--num-speculative-tokens", type=int)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--draft-model", help="of eagle3 and auto, e.g. tiny-eagle3")
    args = parser.parse_args()

    fixed: dict[str, Any] = {"num_stages": args.num_stages, "enable_prefix_caching": False, "max_num_seqs": 8}
    speculative = {"method": args.method, "num_speculative_tokens": args.num_speculative_tokens}
    if args.draft_model:
        speculative["model"] = args.draft_model
    figures: dict[str, Any] = {}
    with LLM("tiny", **fixed) as off, LLM("tiny", **fixed, speculative=speculative) as on:
        config = resolved_config(on)
        for name, (prompts, params) in workloads(args.num_tokens).items():
            seconds: dict[str, list[float]] = {"off": [], "on": []}
            before = on.stats()
            for round_index in range(args.rounds + 1):
                tokens, sides = {}, [("off", off), ("on", on)]
                for side, llm in sides if round_index % 2 else reversed(sides):
                    elapsed, tokens[side] = run(llm, prompts, params)
                    if round_index:  # the first one warms up
                        seconds[side].append(elapsed)
                assert tokens["on"] == tokens["off"], "speculation changed the text"
            after = on.stats()
            drafted = after["num_draft_tokens"] - before["num_draft_tokens"]
            figures[name] = {
                "off_s": statistics.median(seconds["off"]),
                "on_s": statistics.median(seconds["on"]),
                "speedup": statistics.median(a / b for a, b in zip(seconds["off"], seconds["on"], strict=True)),
                "speedup_of_best": min(seconds["off"]) / min(seconds["on"]),
                "acceptance_rate": (after["num_accepted_tokens"] - before["num_accepted_tokens"]) / max(drafted, 1),
                "drafted": drafted,
                "steps": after["num_steps"] - before["num_steps"],
            }
            print(name, {key: round(value, 3) for key, value in figures[name].items()}, flush=True)
    print_report("speculation", vars(args), figures, config)


if __name__ == "__main__":
    main()
