"""The errors raypp raises.

    RayppError
    +-- ConfigError          a setting, or a combination of settings, that cannot work
    +-- RequestError         one request is at fault; the others do not notice (.request_id, .param)
    |   +-- ContextLengthError ... because it is longer than the model's context
    |   +-- FatalRequestError  ... because the engine dies whenever it runs it
    +-- NonFiniteLogitsError the model computed NaN or infinity for one request; the others do not notice
    +-- ModelLoadError       a checkpoint that cannot be read as the model it claims to be
    +-- ResourceError        the machine or the cluster lacks something (memory, CPUs, GPUs, nodes)
    +-- EngineDeadError      the engine is gone; make a new one
    |   +-- StageDiedError   ... because one of its stages died or froze (.stage_index)
    +-- EncoderDiedError     images cannot be encoded any more; text goes on
    +-- DeadlineError        something was waited for in vain
    +-- QueueFullError       too much is under way; the same request may be served later (.retry_after_s)
    +-- GraphMismatchError   a CUDA graph does not do what was captured (debug mode)

Every error says what it got, what it expected, and what to do about it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import wraps
from importlib import metadata
from typing import Any, TypeVar


def page(name: str) -> str:
    """Return where a page of the documentation is: on the site that the package names, else in its sources.

    Args:
        name: As its file in docs/ has it, without `.md`.
    """
    try:
        named = metadata.metadata("raypp").get_all("Project-URL") or ()
    except metadata.PackageNotFoundError:  # the sources, on the path
        named = ()
    urls = (url.partition(", ") for url in named)
    site = next((url for label, _, url in urls if label.lower() == "documentation"), None)
    return f"docs/{name}.md in the sources of raypp" if site is None else f"{site.rstrip('/')}/{name}.html"


def install(extra: str) -> str:
    """Return how an extra of the package is installed. No package index has raypp: it comes from a clone."""
    return f'pip install ".[{extra}]" in the clone of raypp'


class RayppError(Exception):
    """Base of all errors of raypp.

    Args:
        message: What went wrong, in one sentence.
        got: What was found, e.g. the offending value.
        expected: What would have been right.
        hint: What the reader can do about it.
    """

    def __init__(self, message: str, *, got: object = None, expected: object = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.got = got
        self.expected = expected
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.message]
        if self.got is not None:
            parts.append(f"got: {self.got}")
        if self.expected is not None:
            parts.append(f"expected: {self.expected}")
        if self.hint is not None:
            parts.append(f"hint: {self.hint}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own pickling calls the class with `args` alone and would lose the keywords.
        return (_rebuild, (type(self), dict(self.__dict__)))


class ConfigError(RayppError):
    """A setting, or a combination of settings, that cannot work."""

    setting: str | None = None
    """Which one, as `section.name`; None: no single one."""


class RequestError(RayppError):
    """One request is at fault.

    Args:
        request_id: The request's public id, or None when it has none yet.
        param: The parameter at fault, by its name in `SamplingParams` or in the body of an HTTP request.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, got=got, expected=expected, hint=hint)
        self.request_id = request_id
        self.param = param


class ContextLengthError(RequestError):
    """A prompt that is too long for the model's context."""


class FatalRequestError(RequestError):
    """A request that ends the engine whenever that runs it. The others go on in another engine."""


class NonFiniteLogitsError(RayppError):
    """The model computed logits for a request that are NaN or infinite, from which no token can be chosen."""


class ModelLoadError(RayppError):
    """A checkpoint that cannot be read as the model it claims to be."""


class ResourceError(RayppError):
    """The machine or the cluster lacks something that the engine needs."""


class EngineDeadError(RayppError):
    """The engine is gone and will answer no more requests.

    Args:
        silent_s: How long there had been no sign of what died when that was noticed, 0 if that is not known. Seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
        silent_s: float = 0.0,
    ) -> None:
        super().__init__(message, got=got, expected=expected, hint=hint)
        self.silent_s = silent_s


class StageDiedError(EngineDeadError):
    """A pipeline stage died or froze, and the engine with it.

    Args:
        stage_index: The stage's position in the pipeline, 0-based.
        silent_s: See `EngineDeadError`.
    """

    def __init__(
        self,
        message: str,
        *,
        stage_index: int,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
        silent_s: float = 0.0,
    ) -> None:
        super().__init__(message, got=got, expected=expected, hint=hint, silent_s=silent_s)
        self.stage_index = stage_index


def name_process(index: int, num_members: int) -> tuple[str, int]:
    """Return what a process of the stages is called, and its stage's index.

    Args:
        index: Of the process: the members of a stage follow each other.
        num_members: Of each stage.
    """
    stage_index, rank = divmod(index, num_members)
    return (f"stage {stage_index}" if num_members == 1 else f"member {rank} of stage {stage_index}"), stage_index


class GraphMismatchError(RayppError):
    """A CUDA graph that no longer does what was captured: found by `graphs.debug_every`."""


class EncoderDiedError(RayppError):
    """The encoders are gone, or one died over and over: requests with images fail, text goes on."""


class DeadlineError(RayppError):
    """Something was waited for in vain."""


class QueueFullError(RayppError):
    """So much waits already that one more request has no prospect of being served soon.

    Args:
        retry_after_s: When it may be worth trying again. Seconds.
        hint: None says just that.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: int,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, got=got, expected=expected, hint=hint or f"try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


def _rebuild(cls: type[RayppError], state: dict[str, object]) -> RayppError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


T = TypeVar("T")

_LEAST_LIKENESS = 0.7  # a wrong suggestion costs more than none
_MAX_CHARS = 100  # of a name: comparing takes longer than linear time, and clients choose the names of fields
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def nearest_name(name: str, names: Iterable[str], least_likeness: float = _LEAST_LIKENESS) -> str | None:
    """Return the name that another one is probably a misspelling or the beginning of; None if none is near.

    Capitals, hyphens and underscores do not count: `topP` is `top_p`.

    Args:
        name: The other one.
        names: Those that there are.
        least_likeness: What a misspelling has in common with what was meant, 0 to 1.
    """
    if len(name) > _MAX_CHARS:
        return None
    plain, by_plain = _plain(name), {_plain(each): each for each in names}
    near = difflib.get_close_matches(plain, by_plain, n=1, cutoff=least_likeness)
    begun = [each for each in by_plain if "_" in plain and each.startswith(f"{plain}_")]  # of one word, too many are
    found = near or begun
    return by_plain[found[0]] if found else None


def refusing_unknown(cls: type[T]) -> type[T]:
    """Let a dataclass of parameters raise RequestError for a name that it does not have, with the nearest one."""
    init: Callable[..., None] = cls.__init__
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        for name in given.keys() - names:
            nearest = nearest_name(name, names)
            raise RequestError(
                f"there is no {cls.__name__}.{name}",
                got=f"{name}={repr(given[name])[:80]}",
                expected="one of " + ", ".join(names) if nearest is None else f"did you mean {nearest}?",
                param=name,
            )
        init(self, *args, **given)

    setattr(cls, "__init__", checked)  # noqa: B010 - an assignment would be another class's to mypy
    return cls


def _plain(name: str) -> str:
    return _HUMP.sub("_", name).lower().replace("-", "_").strip("_")
