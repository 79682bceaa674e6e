"""The messages between a client and the driver, and how they become zmq frames.

A client hands in requests: a notebook, a replica of the HTTP app, a batch job. Its socket is a DEALER, the
driver's a ROUTER; the frame that names the client is the driver's affair and not part of a message. Every message is
`[kind, header, payload?]`: one byte, JSON, and binary data where there are many numbers.

    client -> driver                             driver -> client
    OpenClient     the client has connected
    AddRequests    header: sampling parameters,  OutputBatch   payload: what one step brought (raypp.messages)
                   and one entry per request;    Rejected      a request that cannot be run, and why
                   payload: the tokens of each;
                   then the patches of images
    AbortRequests  header: request ids           StatsReply    header: the call's id and the figures
    StatsCall      header: the call's id         Alive         the driver lives
    CloseClient    the client leaves; its        EngineDead    why nothing more will come
                   requests are aborted

Requests that follow each other in a message share what is the same object for them: parameters, a prompt, an image.
So the continuations of one prompt carry, and keep in memory, one copy of it.

A request that another engine has begun, and could not end, comes with the tokens that its client has of it. It goes on
after them, and outputs name new tokens only. Counters of outputs are of this engine: what its client adds to those that
it has. A connection is to one engine: what its messages say is of no other.

Errors travel as dicts and come out as the same class of RayppError that went in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np

from raypp import errors
from raypp.errors import RayppError
from raypp.messages import NO_INT32S, Int32s, OutputBatch, pack, unpack
from raypp.prompt_items import EncoderItem, PromptItems
from raypp.request import Request
from raypp.sampling_params import PARAMETERS, SamplingParams

_ADD, _OUTPUT = b"A", b"O"

_PLAIN_FIELDS = ("request_id", "handle", "seed", "priority", "goes_first", "is_streamed", "cache_salt")
"""Of `Request`, those that JSON holds as they are."""
_ERROR_CLASSES: dict[str, type[RayppError]] = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RayppError)
}


@dataclass(frozen=True, slots=True)
class OpenClient:
    """The client has connected."""


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Run these requests."""

    requests: Iterable[Request]  # as received, an iterator that makes each when it is asked for


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End these requests; unknown ids are ignored."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class StatsCall:
    """Answer with a StatsReply."""

    call_id: int
    spans_after_us: int | None = None  # and with the stages' forwards that ended later, if a time is given


@dataclass(frozen=True, slots=True)
class CloseClient:
    """The client leaves: abort what it still has, send it nothing more."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request of this handle will not run."""

    handle: int
    error: RayppError


@dataclass(frozen=True, slots=True)
class StatsReply:
    """The answer to a StatsCall."""

    call_id: int
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineDead:
    """The engine answers nothing any more. What its steps brought before has been sent."""

    error: RayppError
    # Handles of the client's unfinished requests that were in a step that stages had and whose result has not come.
    in_flight: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Alive:
    """The driver lives. Sent to every client at every heartbeat; it also finds out which clients are gone."""


ClientMessage = OpenClient | AddRequests | AbortRequests | StatsCall | CloseClient
DriverMessage = OutputBatch | Rejected | StatsReply | EngineDead | Alive


def error_to_dict(error: RayppError) -> dict[str, Any]:
    """Return the error as plain values; `got` and `expected` become text."""
    values = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    for name in ("got", "expected"):
        if values[name] is not None:
            values[name] = str(values[name])
    return {"class": type(error).__name__, **values}


def error_from_dict(values: dict[str, Any]) -> RayppError:
    """Return the error that `error_to_dict` described, of the same class."""
    keywords = dict(values)
    cls = _ERROR_CLASSES.get(keywords.pop("class"), RayppError)
    return cls(keywords.pop("message"), **keywords)


_PLAIN: dict[bytes, type[Any]] = {
    b"H": OpenClient,
    b"X": AbortRequests,
    b"S": StatsCall,
    b"C": CloseClient,
    b"R": Rejected,
    b"Y": StatsReply,
    b"D": EngineDead,
    b"L": Alive,
}
"""Messages whose header has their fields, and that have no payload."""
_KINDS = {cls: kind for kind, cls in _PLAIN.items()}


def encode_client_message(message: ClientMessage) -> list[bytes | memoryview]:
    """Return the frames of a message to the driver. Images are views: they need not be copied to be sent."""
    return _add_frames(list(message.requests)) if isinstance(message, AddRequests) else [*_plain_frames(message)]


def decode_client_message(frames: Sequence[bytes | memoryview]) -> ClientMessage:
    """Return the message that a client sent. Its images are views of their frames."""
    kind, header = bytes(frames[0]), bytes(frames[1])
    if kind == _ADD:
        return AddRequests(_requests_from(json.loads(header), frames[2], frames[3:]))
    message: ClientMessage = _plain_message(kind, header)
    return message


def encode_driver_message(message: DriverMessage) -> list[bytes]:
    """Return the frames of a message to a client."""
    return [_OUTPUT, b"", pack(message)] if isinstance(message, OutputBatch) else _plain_frames(message)


def decode_driver_message(frames: Sequence[bytes]) -> DriverMessage:
    """Return the message that the driver sent. An OutputBatch's arrays are views into its frame."""
    if frames[0] == _OUTPUT:
        return unpack(OutputBatch, frames[2])
    message: DriverMessage = _plain_message(frames[0], frames[1])
    return message


def _plain_frames(message: Any) -> list[bytes]:
    values = {each.name: getattr(message, each.name) for each in fields(message)}
    if "error" in values:
        values["error"] = error_to_dict(values["error"])
    return [_KINDS[type(message)], _dump(values)]


def _plain_message(kind: bytes, header: bytes) -> Any:
    values = json.loads(header)
    if "error" in values:
        values["error"] = error_from_dict(values["error"])
    return _PLAIN[kind](**values)


def _add_frames(requests: Sequence[Request]) -> list[bytes | memoryview]:
    params: dict[int, int] = {}  # by identity: mostly all requests have the same, and comparing costs more
    values: list[list[Any]] = []
    headers: list[dict[str, Any]] = []
    token_ids: list[Int32s] = []
    patches = {item.key: item.patches for r in requests if r.items is not None for item in r.items.items}
    before: Request | None = None
    for request in requests:
        same = before is not None and request.prompt_token_ids is before.prompt_token_ids
        if not same:
            token_ids.append(request.prompt_token_ids)
        if request.output_token_ids:
            token_ids.append(np.array(request.output_token_ids, np.int32))
        if id(request.params) not in params:
            params[id(request.params)] = len(values)
            values.append([getattr(request.params, name) for name in PARAMETERS])
        header = {name: getattr(request, name) for name in _PLAIN_FIELDS} | {
            "params": params[id(request.params)],
            "num_prompt_tokens": None if same else len(request.prompt_token_ids),  # None: the one before has it
            "num_output_tokens": len(request.output_token_ids),  # they follow the prompt, or the request before
            "bad_word_token_ids": request.bad_word_token_ids,
            "eos_token_ids": sorted(request.eos_token_ids),
            "items": None if request.items is None else _items_header(request.items),
        }
        headers.append(header)
        before = request
    payload = np.concatenate(token_ids).astype("<i4", copy=False) if token_ids else NO_INT32S
    return [
        _ADD,
        _dump({"params": values, "requests": headers}),
        payload.view(np.uint8).data,
        *(np.ascontiguousarray(array).reshape(-1).data for array in patches.values()),
    ]


def _requests_from(
    header: dict[str, Any], payload: bytes | memoryview, patches: Sequence[bytes | memoryview]
) -> Iterator[Request]:
    """Yield the requests of a message. Tokens are copies: a view would keep those of all of them in memory."""
    all_token_ids, frames, pictures = np.frombuffer(payload, "<i4"), iter(patches), dict[str, EncoderItem]()
    params = [SamplingParams.of_json(values) for values in header["params"]]
    prompt_token_ids, offset = NO_INT32S, 0
    for values in header["requests"]:
        if (num_tokens := values["num_prompt_tokens"]) is not None:
            prompt_token_ids = all_token_ids[offset : offset + num_tokens].astype(np.int32)
            offset += num_tokens
        num_tokens = values["num_output_tokens"]
        output_token_ids = all_token_ids[offset : offset + num_tokens].tolist()
        offset += num_tokens
        yield Request(
            **{name: values[name] for name in _PLAIN_FIELDS},
            prompt_token_ids=prompt_token_ids,
            params=params[values["params"]],
            eos_token_ids=_end_tokens(tuple(values["eos_token_ids"])),
            bad_word_token_ids=tuple(map(tuple, values["bad_word_token_ids"])),
            items=None if values["items"] is None else _items_from(values["items"], pictures, frames),
            output_token_ids=output_token_ids,
        )


@lru_cache(maxsize=8)
def _end_tokens(token_ids: tuple[int, ...]) -> frozenset[int]:
    """Return one set for all requests of a model: a set for each would take more memory than the rest of it."""
    return frozenset(token_ids)


def _items_header(items: PromptItems) -> dict[str, Any]:
    columns = [[item.key.hex(), *item.grid_thw, item.num_tokens, item.patches.shape[1]] for item in items.items]
    return {"items": columns, "starts": items.starts, "merge_size": items.merge_size}


def _items_from(
    values: dict[str, Any], known: dict[str, EncoderItem], frames: Iterator[bytes | memoryview]
) -> PromptItems:
    for key, time, height, width, num_tokens, patch_dim in values["items"]:
        if key not in known:
            patches = np.frombuffer(next(frames), np.uint8).reshape(-1, patch_dim)
            known[key] = EncoderItem(bytes.fromhex(key), patches, (time, height, width), num_tokens)
    return PromptItems(
        items=tuple(known[key] for key, *_ in values["items"]),
        starts=tuple(values["starts"]),
        merge_size=values["merge_size"],
    )


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
