"""The chat that a body of another route asks for: it is prepared, run and refused like any chat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from raypp.errors import RequestError
from raypp.openai_api.chat_request import ChatRequest


@dataclass(frozen=True)
class DerivedChat:
    """A chat, and where in the body it comes from."""

    request: ChatRequest
    origins: Sequence[str]
    """The field that each of its messages comes from."""
    params: Mapping[str, str]
    """A chat's fields, and what they are called in the body, where that differs."""

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Let errors about the chat name the fields of the body that it was made of."""
        try:
            yield
        except RequestError as error:
            if error.param is not None:
                error.param = self._own_param(error.param)
            raise

    def _own_param(self, param: str) -> str:
        if message := re.match(r"messages\[(\d+)\]", param):
            return self.origins[int(message[1])]
        return self.params.get(param, param)
