"""What a hostile client sends is refused, and a stream beside it goes on: the small form of tests/soak."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from hostile_attacks import CHAT, Attack, dripping_server, keep_sending, refused_attacks
from running_app import RunningApp

NUM_TOKENS = 60


async def _honest(session: aiohttp.ClientSession) -> str:
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "ignore_eos": True}
    async with session.post(CHAT, json={**body, "max_tokens": NUM_TOKENS}) as response:
        assert response.status == 200
        answer = await response.json()
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.full
def test_attacks_are_refused_beside_honest_requests(app: RunningApp) -> None:
    statuses: dict[str, int] = {}
    attacks: list[Attack] = []

    def count(attack: Attack, status: int) -> None:
        statuses[attack.name] = status

    async def run() -> None:
        dripping, url = await dripping_server()
        attacks.extend(refused_attacks(256, url))
        is_done = False
        async with dripping, aiohttp.ClientSession(app.url) as session:
            expected = await _honest(session)

            async def attack() -> None:
                nonlocal is_done
                for one in attacks:
                    await keep_sending(session, [one], count, iter((False, True)).__next__)
                is_done = True

            async def honest() -> None:
                while not is_done:
                    assert await _honest(session) == expected

            await asyncio.gather(attack(), honest())

    asyncio.run(asyncio.wait_for(run(), 120))
    assert len(statuses) == len(attacks)
    assert {name: status for name, status in statuses.items() if not 400 <= status < 500} == {}
