"""Requests of all lengths at once or as they arrive, and where every second of every stage goes.

    python benchmarks/mixed_traffic.py --model qwen3-8b --traffic offline online-16 online-40 --out mixed.json
    python benchmarks/mixed_traffic.py --traffic rate=8,input=512 offline-tail --settings '{}' '{"mode": "none"}'
    python benchmarks/mixed_traffic.py --traffic turns-90 --kv-share 0.1 --settings '{}' '{"cpu_kv_bytes": 8589934592}'
    python benchmarks/mixed_traffic.py --url http://localhost:8000 --vocab-size 4000 --traffic rate=8,input=512

What traffic is: `benchmarks/traffic.py`. `--settings` starts an engine for each, `--kv-share` gives it a KV cache of so
much of what the texts of the largest traffic need. Outputs have exactly the tokens that
were drawn, EOS ignored. Times count from the moment at which a request was due, also if it was sent late (`late`): time
to the first token (TTFT), per output token after it (TPOT), between pieces of output (ITL), to the last token (E2E).
All at once, through an engine, outputs are not streamed, as by `LLM.generate`: then there is no ITL.

Of an engine's steps it says what they were made of and how long they took (`step_breakdown.py`), beside the least time
that the device could take for them. The last line is JSON, or with `--out` that file, written after every traffic;
`--steps` keeps every forward of every step in a file besides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
from arrivals import RequestTimes, Stream, Turn, check_num_tokens, run_arrivals, summarize
from device_speed import measure_device_speed
from report import GrowingReport, resolved_config
from stage_limit import stage_limits
from step_breakdown import breakdown, table
from traffic import Lengths, Traffic, parse_traffic
from workload import SAMPLING, exactly, model_settings, params_for

from raypp import AsyncLLM
from raypp.actors.cluster import Cluster
from raypp.api.timeline import Forward
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.types import TokensPrompt

_WARM_UP = Traffic(requests=16, input=Lengths("uniform", 16, 512), output=Lengths("uniform", 4, 16))
_LOOK_S = 0.1  # how often the engine is asked for its steps: those of a whole second would hold its driver up for 20 ms
_REPORTS_S = 2.0
_BLOCK_SIZE = 16
_ANY_VOCAB_SIZE = 1000  # how long texts are does not depend on it
_COUNTERS = (
    "num_preemptions",
    "num_prefix_query_tokens",
    "num_prefix_hit_tokens",
    "num_cpu_hit_tokens",
    "num_blocks_copied_out",
    "num_blocks_copied_in",
    "num_copied_bytes",
)


def engine_stream(llm: AsyncLLM, sampling: str) -> Stream:
    """Return the way to an engine."""

    async def stream(prompt: list[int], num_tokens: int) -> AsyncIterator[Sequence[int]]:
        token_ids: Sequence[int] = ()
        async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), exactly(num_tokens, sampling)):
            token_ids = output.outputs[0].token_ids
            yield token_ids
        check_num_tokens(len(token_ids), num_tokens)

    return stream


def http_stream(session: aiohttp.ClientSession, sampling: str) -> Stream:
    """Return the way to a server. Its pieces do not tell their tokens; the usage at the end does."""

    async def stream(prompt: list[int], num_tokens: int) -> AsyncIterator[Sequence[int]]:
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "repetition_penalty": 1.0,  # whatever the model's generation_config.json says
            **SAMPLING[sampling],
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if chunk["choices"]:
                    yield ()
                else:
                    check_num_tokens(chunk["usage"]["completion_tokens"], num_tokens)

    return stream


async def all_at_once(llm: AsyncLLM, conversations: Sequence[Sequence[Turn]], sampling: str) -> list[RequestTimes]:
    """Run requests as `LLM.generate` does, and return when each had its first token and its last."""
    turns = [turn for (turn,) in conversations]
    prompts = [TokensPrompt(prompt_token_ids=turn.token_ids) for turn in turns]
    kinds = params_for(len(turns), 1, sampling)
    params = [replace(kind, max_tokens=turn.num_tokens) for kind, turn in zip(kinds, turns, strict=True)]
    found = []
    begun_s = time.time()
    for output, turn in zip(await llm.complete(prompts, params), turns, strict=True):
        check_num_tokens(len(output.outputs[0].token_ids), turn.num_tokens)
        metrics = output.metrics
        first_s, last_s = metrics.first_token_time_s or 0.0, metrics.finish_time_s or 0.0
        found.append(RequestTimes(turn.num_tokens, [first_s - begun_s, last_s - begun_s], is_streamed=False))
    return found


class StepsSeen:
    """Asks an engine for its steps while it works."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._seen: dict[tuple[int, int], Forward] = {}
        self._since_us = 0

    async def watch(self) -> None:
        """Ask until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> dict[str, Any]:
        """Ask once."""
        stats = await self._llm.stats(spans_after_us=self._since_us)
        newest: dict[int, int] = {}
        for span in stats["spans"]:
            forward = Forward.of_span(span)
            self._seen[forward.stage_index, forward.step_id] = forward
            newest[forward.stage_index] = max(newest.get(forward.stage_index, 0), forward.end_us)
        if len(newest) == len(stats["stages"]):
            self._since_us = min(newest.values())
        return stats

    async def take(self) -> list[Forward]:
        """Return all that was seen since the last call, when the stages have told of their last steps."""
        ends = time.monotonic() + _REPORTS_S
        stats = await self.look()
        while time.monotonic() < ends and any(each["num_steps"] < stats["num_steps"] for each in stats["stages"]):
            await asyncio.sleep(0.1)
            stats = await self.look()
        taken, self._seen = list(self._seen.values()), {}
        return taken


async def run_traffic(traffic: Traffic, stream: Stream, llm: AsyncLLM | None, vocab_size: int, seed: int) -> Any:
    """Send all of it; return the times of its requests, and how long they took together, seconds."""
    conversations = traffic.conversations(vocab_size, seed)
    begun = time.perf_counter()
    if llm is not None and math.isinf(traffic.rate) and traffic.turns == 1:
        times = await all_at_once(llm, conversations, traffic.sampling)
    else:
        times = await run_arrivals(stream, conversations, traffic.rate, random.Random(seed))
    return times, time.perf_counter() - begun


def request_figures(times: Sequence[RequestTimes], num_prompt_tokens: int, seconds: float) -> dict[str, Any]:
    """Return what the requests waited for, and how many tokens there were."""
    num_tokens = sum(each.num_tokens for each in times)
    return {
        "seconds": seconds,
        "requests": len(times),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_tokens,
        "requests_per_s": len(times) / seconds,
        "tokens_per_s": num_tokens / seconds,
        **summarize(times),
    }


def print_requests(name: str, figures: Mapping[str, Any]) -> None:
    """Print what requests waited for."""
    print(
        f"{name}: {figures['requests']} requests in {figures['seconds']:.2f} s, {figures['prompt_tokens']} tokens in, "
        f"{figures['output_tokens']} out ({figures['tokens_per_s']:.0f} tok/s)"
    )
    for kind, values in figures.items():
        if kind.endswith("_ms"):
            columns = "".join(f"  {key} {value:9.2f}" for key, value in values.items())
            print(f"  {kind.removesuffix('_ms'):>5}, ms:{columns}", flush=True)


def engine_settings(args: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an engine that all traffic fits into; a prefix cache only where something is shared."""
    return {
        **model_settings(args.model),
        "num_stages": args.num_stages,
        "stage_num_gpus": args.stage_num_gpus,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": any(traffic.shares for traffic in args.traffic.values()),
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "mode": args.mode,
        **({} if args.kv_share is None else {"num_kv_blocks": kv_blocks(args), "block_size": _BLOCK_SIZE}),
        **({"device": args.device} if args.device else {}),
        **given,
    }


def kv_blocks(args: argparse.Namespace) -> int:
    """Return the KV blocks of a share of all texts, and at least those of one request."""
    needed = max(traffic.num_distinct_tokens(_ANY_VOCAB_SIZE, args.seed) for traffic in args.traffic.values())
    return 1 + math.ceil(max(needed * args.kv_share, args.max_model_len) / _BLOCK_SIZE)


async def measure_engine(args: argparse.Namespace, llm: AsyncLLM) -> dict[str, list[dict[str, Any]]]:
    """Run all traffic, `--runs` times by turns; return what was found, with the forwards of every run."""
    vocab_size = llm.plan()["vocab_size"]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.traffic}
    steps = StepsSeen(llm)
    await run_traffic(_WARM_UP, engine_stream(llm, "greedy"), None, vocab_size, -1)
    for run in range(args.runs):
        for name, traffic in args.traffic.items():
            await steps.take()
            before, begun_us = await llm.stats(), time.time_ns() // 1000
            watching = asyncio.create_task(steps.watch())
            try:
                times, seconds = await run_traffic(
                    traffic, engine_stream(llm, traffic.sampling), llm, vocab_size, args.seed + run
                )
            finally:
                watching.cancel()
            forwards, after = await steps.take(), await llm.stats()
            forwards = [forward for forward in forwards if forward.start_us >= begun_us]
            num_prompt_tokens = after["num_prompt_tokens"] - before["num_prompt_tokens"]
            figures = request_figures(times, num_prompt_tokens, seconds)
            figures |= {counter: after[counter] - before[counter] for counter in _COUNTERS}
            waited = zip(after["stages"], before["stages"], strict=True)
            figures["copy_wait_s"] = [now["copy_wait_s"] - then["copy_wait_s"] for now, then in waited]
            found[name].append({**figures, "forwards": forwards})
            print_requests(f"{name}, run {run}", figures)
            print(f"  {', '.join(f'{counter} {figures[counter]}' for counter in _COUNTERS)}")
            print(f"  stages waited for copies, s: {', '.join(f'{s:.3f}' for s in figures['copy_wait_s'])}", flush=True)
    return found


async def run_engines(args: argparse.Namespace, report: GrowingReport) -> None:
    """Start one engine after the other, and say where the time of each went when it has ended."""
    speed, kept = None, {}
    for given in args.settings:
        title = json.dumps(given)
        print(f"settings {title}", flush=True)
        try:
            async with await AsyncLLM.create(**engine_settings(args, given)) as llm:
                report.note_config(resolved_config(llm))
                plan, found = llm.plan(), await measure_engine(args, llm)
        except Exception as error:  # one engine must not stop the others
            traceback.print_exc()
            report.put(title, {"error": f"{type(error).__name__}: {error}"})
            continue
        # Behind the engine, whose memory the measurement needs.
        speed = speed or measure_device_speed(plan["device"], plan["dtype"])
        model = load_model_config(Path(resolve_model_path(model_settings(args.model)["model"])))
        limits = stage_limits(model, plan, speed)
        for name, runs in found.items():
            for run, figures in enumerate(runs):
                forwards = figures.pop("forwards")
                kept[f"{title} {name} {run}"] = [list(forward) for forward in sorted(forwards)]
                figures["steps"] = breakdown(forwards, limits)
                print(f"{name}, run {run}:", *table(figures["steps"]), sep="\n", flush=True)
        stages = [{key: stage[key] for key in ("layers", "num_layers")} for stage in plan["stages"]]
        report.put(title, {"stages": stages, "device_speed": asdict(speed), "traffic": found})
        if args.steps is not None:
            args.steps.write_text(json.dumps(kept))


async def run_server(args: argparse.Namespace, report: GrowingReport) -> None:
    """Send all traffic to a running server."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=args.timeout_s)
    async with aiohttp.ClientSession(args.url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await measure_server(args, session, report)


async def measure_server(args: argparse.Namespace, session: aiohttp.ClientSession, report: GrowingReport) -> None:
    """Send all traffic through a session."""
    await run_traffic(_WARM_UP, http_stream(session, "greedy"), None, args.vocab_size, -1)
    for name, traffic in args.traffic.items():
        if traffic.turns > 1:
            raise ValueError(f"{name} has several turns, and a server does not tell the tokens of its answers")
        runs = []
        for run in range(args.runs):
            stream = http_stream(session, traffic.sampling)
            times, seconds = await run_traffic(traffic, stream, None, args.vocab_size, args.seed + run)
            num_prompt_tokens = sum(
                len(turn.token_ids) for (turn,) in traffic.conversations(args.vocab_size, args.seed + run)
            )
            runs.append(request_figures(times, num_prompt_tokens, seconds))
            print_requests(f"{name}, run {run}", runs[-1])
        report.put(name, runs)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a folder of benchmarks/models, or what LLM takes")
    parser.add_argument("--traffic", nargs="+", default=["offline", "online-16", "online-40"], help="see traffic.py")
    parser.add_argument("--settings", type=json.loads, nargs="+", default=[{}], help="of an engine each")
    parser.add_argument("--runs", type=int, default=1, help="of all traffic, by turns; each with requests of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a running server; by default engines are started, and used directly")
    parser.add_argument("--vocab-size", type=int, default=1000, help="prompts for --url have ids below it")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="the longest silence of a server")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--stage-num-gpus", type=float, default=1.0, help="0.5: two stages on one GPU")
    parser.add_argument("--device", help="cpu or cuda; by default whatever there is")
    parser.add_argument("--mode", default="auto", help="of graphs")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--kv-share", type=float, help="of the KV that all texts need, for the KV cache")
    parser.add_argument("--out", type=Path, help="a JSON file, written after every engine")
    parser.add_argument("--steps", type=Path, help="a JSON file with every forward of every run")
    args = parser.parse_args()
    settings = {**vars(args), "steps": None}
    args.traffic = {name: parse_traffic(name) for name in args.traffic}
    settings["traffic"] = {name: traffic.as_text() for name, traffic in args.traffic.items()}
    too_long = [name for name, traffic in args.traffic.items() if traffic.max_len > args.max_model_len]
    if too_long and not args.url:
        parser.error(f"--max-model-len {args.max_model_len} is too short for {', '.join(too_long)}")
    report = GrowingReport("mixed_traffic", settings, args.out)
    if args.url is not None:
        asyncio.run(run_server(args, report))
    else:
        cluster = Cluster.connect()
        try:
            asyncio.run(run_engines(args, report))
        finally:
            cluster.disconnect()
    report.print()


if __name__ == "__main__":
    main()
