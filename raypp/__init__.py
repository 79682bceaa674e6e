"""raypp: pipeline-parallel inference on Ray.

The public names. Each is imported when it is first used, so that `import raypp` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypp.api.async_llm import AsyncLLM as AsyncLLM
    from raypp.api.beam_search import BeamSearchOutput as BeamSearchOutput
    from raypp.api.beam_search import BeamSearchParams as BeamSearchParams
    from raypp.api.llm import LLM as LLM
    from raypp.config.engine_config import EngineConfig as EngineConfig
    from raypp.errors import ConfigError as ConfigError
    from raypp.errors import ContextLengthError as ContextLengthError
    from raypp.errors import DeadlineError as DeadlineError
    from raypp.errors import EncoderDiedError as EncoderDiedError
    from raypp.errors import EngineDeadError as EngineDeadError
    from raypp.errors import FatalRequestError as FatalRequestError
    from raypp.errors import GraphMismatchError as GraphMismatchError
    from raypp.errors import ModelLoadError as ModelLoadError
    from raypp.errors import NonFiniteLogitsError as NonFiniteLogitsError
    from raypp.errors import QueueFullError as QueueFullError
    from raypp.errors import RayppError as RayppError
    from raypp.errors import RequestError as RequestError
    from raypp.errors import ResourceError as ResourceError
    from raypp.errors import StageDiedError as StageDiedError
    from raypp.tracing import bubble_fraction as bubble_fraction
    from raypp.types import CompletionOutput as CompletionOutput
    from raypp.types import Logprob as Logprob
    from raypp.types import RequestMetrics as RequestMetrics
    from raypp.types import RequestOutput as RequestOutput
    from raypp.types import SamplingParams as SamplingParams

    __version__: str

_MODULE_OF = {
    "LLM": "raypp.api.llm",
    "AsyncLLM": "raypp.api.async_llm",
    "BeamSearchOutput": "raypp.api.beam_search",
    "BeamSearchParams": "raypp.api.beam_search",
    "EngineConfig": "raypp.config.engine_config",
    "SamplingParams": "raypp.types",
    "RequestOutput": "raypp.types",
    "Logprob": "raypp.types",
    "CompletionOutput": "raypp.types",
    "RequestMetrics": "raypp.types",
    "RayppError": "raypp.errors",
    "ConfigError": "raypp.errors",
    "RequestError": "raypp.errors",
    "ContextLengthError": "raypp.errors",
    "ModelLoadError": "raypp.errors",
    "NonFiniteLogitsError": "raypp.errors",
    "ResourceError": "raypp.errors",
    "EncoderDiedError": "raypp.errors",
    "EngineDeadError": "raypp.errors",
    "FatalRequestError": "raypp.errors",
    "StageDiedError": "raypp.errors",
    "DeadlineError": "raypp.errors",
    "GraphMismatchError": "raypp.errors",
    "QueueFullError": "raypp.errors",
    "bubble_fraction": "raypp.tracing",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _installed_version()
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _installed_version() -> str:
    """Return the version of the package as it was installed, which git's tags said then; `0+unknown` if it was not."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("raypp")
    except PackageNotFoundError:  # run from a folder on PYTHONPATH
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
