"""What knowing replicas' prefix caches is worth: two replicas, several conversations, with prefix routing and without.

    python benchmarks/prefix_routing.py

Conversations begin with a system prompt of 2,000 tokens, all with the same one (`shared`) or each with its own (`own`),
and have several turns, one after the other, all conversations at once. Told are the share of prompt tokens that the
prefix caches had, the time to the first token, and what the routing itself takes in the proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
from report import print_report

from raypp.models.registry import resolve_model_path

_WORDS = ["def", "class", "import", "return", "self", "print", "for", "in", "range", "open", "file", "name", "value"]
KINDS = ("shared", "own")
Messages = list[dict[str, str]]


def system_prompt(num_tokens: int, seed: int) -> str:
    """Return a text of about so many tokens of `tiny`, another one for each seed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("tiny"))
    rng = random.Random(seed)
    tokens: list[int] = tokenizer.encode(" ".join(rng.choices(_WORDS, k=2 * num_tokens)))
    return str(tokenizer.decode(tokens[:num_tokens]))


async def converse(
    url: str, kind: str, num_conversations: int, num_turns: int, prefix_tokens: int, seed: int
) -> dict[str, Any]:
    """Hold conversations with a server, and return what its caches had of them.

    Args:
        url: Of the server.
        kind: One of `KINDS`.
        num_conversations: At once.
        num_turns: Of each.
        prefix_tokens: Of a system prompt.
        seed: Another one makes other conversations.

    Returns:
        `hit_rate`, 0..1, `tokens`: prompt tokens in all, `ttft_ms`: the mean time to the first token of turns behind
        the first, `first_ttft_ms`: of first turns, `seconds` for all of it, `requests`: how many each replica had.
    """
    own = kind == "own"
    texts = [system_prompt(prefix_tokens, 1000 * seed + (index if own else 0)) for index in range(num_conversations)]
    conversations: list[Messages] = [[{"role": "system", "content": text}] for text in texts]
    times: list[list[float]] = [[] for _ in conversations]
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        before = await _metrics(session)
        started_s = time.monotonic()

        async def one(index: int) -> None:
            rng = random.Random(1000 * seed + index)
            await asyncio.sleep(rng.uniform(0, 0.2))
            for turn in range(num_turns):
                question = f"{index} {turn}: " + " ".join(rng.choices(_WORDS, k=12))
                conversations[index].append({"role": "user", "content": question})
                text, ttft_s = await _answer(session, conversations[index])
                conversations[index].append({"role": "assistant", "content": text})
                times[index].append(ttft_s)

        await asyncio.gather(*(one(index) for index in range(num_conversations)))
        took_s = time.monotonic() - started_s
        after = await _metrics(session)
    asked, hit = (
        sum(after[name].values()) - sum(before[name].values())
        for name in ("prefix_query_tokens_total", "prefix_hit_tokens_total")
    )
    num_finished = after["request_seconds_count"]
    return {
        "hit_rate": hit / asked,
        "tokens": asked,
        "first_ttft_ms": 1000 * statistics.mean(of_one[0] for of_one in times),
        "ttft_ms": 1000 * statistics.mean(seconds for of_one in times for seconds in of_one[1:]),
        "seconds": took_s,
        "requests": sorted(
            count - before["request_seconds_count"].get(name, 0.0) for name, count in num_finished.items()
        ),
    }


async def _answer(session: aiohttp.ClientSession, messages: Messages) -> tuple[str, float]:
    """Return what the model says, and the seconds to its first token."""
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True}
    started_s, first_s, pieces = time.monotonic(), 0.0, []
    async with session.post("v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b'data: {"'):
                first_s = first_s or time.monotonic() - started_s
                pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    return "".join(pieces), first_s


async def _metrics(session: aiohttp.ClientSession) -> dict[str, dict[str, float]]:
    """Return some counters by replica."""
    async with session.get("metrics") as response:
        text = await response.text()
    names = ("prefix_query_tokens_total", "prefix_hit_tokens_total", "request_seconds_count")
    return {
        name: {
            replica: float(value)
            for replica, value in re.findall(
                rf'^raypp_{name}\{{.*replica="([^"]+)".*\}} (\S+)$', text, flags=re.MULTILINE
            )
        }
        for name in names
    }


@contextmanager
def two_replicas(port: int, kv_cache_bytes: int) -> Iterator[dict[str, str]]:
    """Serve `tiny` with two replicas twice; yields the addresses by what routes: `prefix` and `load`."""
    import ray
    from ray import serve

    from serve_app.app import build
    from serve_app.running_serve import end_serve, start_serve

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        start_serve("127.0.0.1", port)
        for name in ("prefix", "load"):
            arguments = {"model": "tiny", "num_stages": 1, "num_replicas": 2, "kv_cache_bytes": kv_cache_bytes}
            serve.run(build({**arguments, "prefix_routing": name == "prefix"}), name=name, route_prefix=f"/{name}")
        yield {name: f"http://127.0.0.1:{port}/{name}/" for name in ("prefix", "load")}
    finally:
        end_serve()
        ray.shutdown()


def routing_microseconds(num_bytes: int) -> dict[str, float]:
    """Return what the routing of one request takes in the proxy: to name its beginnings, and to choose and learn."""
    from ray.serve._private.common import StreamingHTTPRequest

    from serve_app.prefix_keys import SCOPE_KEY, prefix_keys
    from serve_app.prefix_router import PrefixChoice

    content = " ".join(random.Random(0).choices(_WORDS, k=num_bytes // 4))[:num_bytes]
    body = json.dumps({"messages": [{"role": "system", "content": content}], "model": "tiny"}).encode()
    choice = PrefixChoice(4)
    choice.update(["a", "b"])
    keys = prefix_keys(body)
    headers = [(b"content-type", b"application/json"), (b"user-agent", b"x" * 60), (b"accept", b"*/*")]
    scope = {"type": "http", "path": "/v1/chat/completions", "headers": headers, SCOPE_KEY: keys}
    plain = {**scope, SCOPE_KEY: ()}

    def packed(scope: dict[str, Any]) -> bytes:
        return pickle.dumps(StreamingHTTPRequest(asgi_scope=scope, proxy_actor_name="proxy"))

    argument = packed(scope)

    def route() -> None:
        for _ in range(2):  # once to choose, once when the replica has accepted
            pickle.loads(argument)
        choice.learn(choice.replica_of(keys), keys)

    return {
        "name_us": _microseconds(lambda: prefix_keys(body)),
        "choose_us": _microseconds(route),
        "carry_us": _microseconds(lambda: packed(scope)) - _microseconds(lambda: packed(plain)),
    }


def _microseconds(work: Any, num: int = 500) -> float:
    times = []
    for _ in range(num):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3, help="each with new conversations; the two ways take turns")
    parser.add_argument("--kv-cache-bytes", type=int, default=160 << 20, help="of each replica")
    parser.add_argument("--port", type=int, default=8124)
    args = parser.parse_args(argv)

    found: dict[str, dict[str, list[dict[str, Any]]]] = {kind: {"prefix": [], "load": []} for kind in KINDS}
    with two_replicas(args.port, args.kv_cache_bytes) as urls:
        for round_index in range(args.rounds):
            for kind in KINDS:
                for way, url in urls.items():
                    seed = 1 + 2 * round_index + KINDS.index(kind)
                    one = asyncio.run(converse(url, kind, args.conversations, args.turns, args.prefix_tokens, seed))
                    found[kind][way].append(one)
                    print(kind, way, json.dumps(one), flush=True)
    figures: dict[str, Any] = {
        kind: {
            way: {
                name: statistics.median(one[name] for one in rounds)
                for name in ("hit_rate", "first_ttft_ms", "ttft_ms", "seconds")
            }
            for way, rounds in ways.items()
        }
        for kind, ways in found.items()
    }
    figures["routing"] = {num_bytes: routing_microseconds(num_bytes) for num_bytes in (1000, 8000, 100_000, 1_000_000)}
    print(json.dumps(figures, indent=2))
    print_report("prefix_routing", vars(args), figures)


if __name__ == "__main__":
    main()
