"""Requests of a client that means harm, and of a polite one that asks for as many tokens.

Each attack is a request or a few. Those of `REFUSED` must be answered with a 4xx; those of `ADMITTED` run, and each has
a polite twin: plain requests with the same number of prompt and output tokens.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import aiohttp

_JSON = {"Content-Type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN = 260, 500  # ordinary tokens of tiny-vl

# Every word may be cut into words in many ways: 2 ** 2,000 of them.
AMBIGUOUS_GRAMMAR = "root ::= item{0,2000}\nitem ::= [a-z]+ | [a-z]+ [a-z]* | ([a-z]* [a-z]*){0,50}"

# Rules within rules: llguidance finds that they are too many, and takes seconds to say where.
_RULES = [f'T{index}: T{index + 1} "x"?' for index in range(1450)]
SLOW_GRAMMAR = "\n".join(["%llguidance {}", "start: T0", *_RULES, 'T1450: "a"'])


@dataclass(frozen=True)
class Attack:
    """One thing that a hostile client does.

    Args:
        name: Of the report.
        path: Where the request goes.
        body: The request's body.
        leaves_early: Whether the client leaves a stream after its first piece.
    """

    name: str
    path: str
    body: dict[str, Any]
    leaves_early: bool = False

    @cached_property
    def payload(self) -> bytes:
        """The body as it is sent. Written once: the client's own work is not what is measured."""
        return json.dumps(self.body).encode()


def random_tokens(number: int, seed: int) -> list[int]:
    """Return a prompt that no prefix cache has seen."""
    draw = random.Random(seed)
    return [draw.randint(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN) for _ in range(number)]


def png(side: int) -> str:
    """Return an image of side x side black pixels, as an address: a few kilobytes that decode to gigabytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = b"\0" * (1 + 4 * side)
    data = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 32, **fields}


def _image(url: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}


def _nested_tool(depth: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        parameters = {"type": "object", "properties": {"a": parameters}, "required": ["a"]}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def refused_attacks(max_model_len: int, dripping_url: str) -> list[Attack]:
    """Return what a server has to refuse, whatever else it does.

    Args:
        max_model_len: Of the engine.
        dripping_url: An address that answers a byte at a time.
    """
    words = [f"w{index}" for index in range(60_000)]
    return [
        Attack("60,000 bad words", CHAT, _chat("hello", bad_words=words)),
        Attack("2,000 bad words", CHAT, _chat("hello", bad_words=words[:2000])),
        Attack(
            "biases of tokens that are not there", CHAT, _chat("hello", logit_bias={str(i): 1 for i in range(5000)})
        ),
        Attack("a prompt of twice the context", COMPLETIONS, {"prompt": random_tokens(2 * max_model_len, 1)}),
        Attack("8 million characters of text", COMPLETIONS, {"prompt": "def " * 2_000_000}),
        Attack("80 prompts, 128 continuations each", COMPLETIONS, {"prompt": ["a"] * 80, "n": 128}),
        Attack("50,000 prompts", COMPLETIONS, {"prompt": ["a"] * 50_000}),
        Attack("an image of 81 million pixels", CHAT, _image(png(9000))),
        Attack("an address that drips", CHAT, _image(dripping_url)),
        Attack("a grammar without a root", CHAT, _chat("hello", structured_outputs={"grammar": "a ::= a"})),
        Attack(
            "tool parameters nested 250 levels", CHAT, _chat("hello", tools=[_nested_tool(250)], tool_choice="required")
        ),
    ]


def slow_grammar() -> Attack:
    """Return what keeps a compiler busy until its deadline, and is refused then."""
    return Attack(
        "a grammar that compiles for seconds", CHAT, _chat("hello", structured_outputs={"grammar": SLOW_GRAMMAR})
    )


def admitted_attacks(prompt_len: int) -> list[tuple[Attack, Attack]]:
    """Return attacks that a server serves, each with its polite twin.

    Args:
        prompt_len: Tokens of the long prompts.
    """
    plain = _chat("hello", ignore_eos=True)
    pattern = {"structured_outputs": {"regex": "(a|aa|aaa|[a-z])*"}}
    grammar = {"structured_outputs": {"grammar": AMBIGUOUS_GRAMMAR}}

    def streamed(attack: Attack) -> Attack:
        return Attack(attack.name, attack.path, {**attack.body, "stream": True}, leaves_early=True)

    def prompt(number: int) -> Attack:
        body = {"prompt": random_tokens(prompt_len, number), "max_tokens": 1, "temperature": 0}
        return Attack(f"a prompt of {prompt_len} tokens", COMPLETIONS, body)

    polite = Attack("polite", CHAT, plain)
    return [
        (Attack("33 bad words", CHAT, {**plain, "bad_words": [f"w{i}" for i in range(33)]}), polite),
        (Attack("128 bad words", CHAT, {**plain, "bad_words": [f"w{i}" for i in range(128)]}), polite),
        (Attack("700 biases", CHAT, {**plain, "logit_bias": {str(i): 0.5 for i in range(700)}}), polite),
        (Attack("an ambiguous pattern", CHAT, {**plain, "ignore_eos": False, **pattern}), polite),
        (Attack("an ambiguous grammar", CHAT, {**plain, "ignore_eos": False, **grammar}), polite),
        (prompt(2), prompt(3)),
        (Attack("an image of 67 million pixels", CHAT, _image(png(8192))), Attack("a picture", CHAT, _image(png(448)))),
        (streamed(Attack("leaves early", CHAT, {**plain, "max_tokens": 512})), Attack("polite", CHAT, plain)),
    ]


async def send(session: aiohttp.ClientSession, attack: Attack) -> int:
    """Send one and read its answer; return its status."""
    async with session.post(attack.path, data=attack.payload, headers=_JSON) as response:
        if attack.leaves_early and response.status == 200:
            async for line in response.content:
                if line.startswith(b"data:"):
                    break
        else:
            await response.read()
        return response.status


async def keep_sending(
    session: aiohttp.ClientSession,
    attacks: Sequence[Attack],
    count: Callable[[Attack, int], None],
    is_over: Callable[[], bool],
    period_s: float = 0.0,
) -> None:
    """Send one after the other over one connection, round and round.

    Args:
        session: With the server's address.
        attacks: In their order.
        count: Takes each and the status of its answer.
        is_over: Whether to end; asked before each.
        period_s: The least time between the beginnings of two.
    """
    loop, number = asyncio.get_running_loop(), 0
    while not is_over():
        begun = loop.time()
        attack = attacks[number % len(attacks)]
        count(attack, await send(session, attack))
        number += 1
        await asyncio.sleep(max(begun + period_s - loop.time(), 0))


async def dripping_server(seconds_between: float = 0.2) -> tuple[asyncio.Server, str]:
    """Start a server whose answers never end; return it and the address of an image on it."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"X-Drip: 1\r\n")
                await writer.drain()
                await asyncio.sleep(seconds_between)
        except ConnectionError:
            return

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png"
