"""A client that speaks the wire by itself: what doors do, without tokenizers and templates."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
import zmq

from raypp.client_messages import (
    AddRequests,
    CloseClient,
    EngineDead,
    OpenClient,
    Rejected,
    StatsCall,
    StatsReply,
    decode_driver_message,
    encode_client_message,
)
from raypp.errors import RayppError
from raypp.messages import OutputBatch
from raypp.prompt_items import PromptItems
from raypp.request import Request
from raypp.types import SamplingParams

WAIT_S = 150.0  # for what is expected; only a hang takes this long


class RawClient:
    """Sends requests and collects what comes of them, in the calling thread."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 200
        self._socket.connect(address)
        self._send(OpenClient())
        self._num_added = 0
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.errors: dict[int, RayppError] = {}
        self.ended: set[int] = set()
        self._stats: list[dict] = []

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(CloseClient())
        self._socket.close()
        self._context.term()

    def add(self, prompt: list[int], items: PromptItems | None = None, max_tokens: int = 12) -> int:
        """Send a greedy request; return its handle."""
        self._num_added += 1
        handle = self._num_added
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._send(
            AddRequests(
                [
                    Request(
                        f"r{handle}",
                        np.asarray(prompt, np.int32),
                        params,
                        0,
                        handle=handle,
                        items=items,
                        is_streamed=True,
                    )
                ]
            )
        )
        return handle

    def wait(self, handles: list[int]) -> None:
        """Wait until these requests have ended, well or with an error."""
        ends = time.monotonic() + WAIT_S
        while not self.ended.issuperset(handles):
            assert time.monotonic() < ends, f"never ended: {set(handles) - self.ended}"
            self.pump()

    def stats(self) -> dict:
        """Return the engine's figures."""
        self._send(StatsCall(0))
        ends = time.monotonic() + WAIT_S
        while not self._stats:
            assert time.monotonic() < ends, "no figures"
            self.pump()
        return self._stats.pop()

    def pump(self) -> None:
        """Take in what comes within a moment."""
        if not self._socket.poll(100):
            return
        match decode_driver_message(self._socket.recv_multipart()):
            case OutputBatch() as batch:
                start = 0
                for handle, count, reason in zip(
                    batch.handles.tolist(), batch.num_tokens.tolist(), batch.finish_reasons.tolist(), strict=True
                ):
                    self.tokens[handle] += batch.token_ids[start : start + count].tolist()
                    start += count
                    if reason:
                        self.ended.add(handle)
            case Rejected(handle, error):
                self.errors[handle] = error
                self.ended.add(handle)
            case StatsReply(_, stats):
                self._stats.append(stats)
            case EngineDead(error):
                raise error

    def _send(self, message) -> None:
        self._socket.send_multipart(encode_client_message(message))
