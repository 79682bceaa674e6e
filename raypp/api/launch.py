"""From a model and settings to a running engine and what its clients need to talk to it, and to its end.

In a notebook, `llm = LLM(...)` in a cell that runs a second time would first start the new engine and only then let go
of the old one: two models in memory, or none where the old one holds the GPUs. So before an engine starts, those that
the running cell is about to assign anew are closed.
"""

from __future__ import annotations

import ast
import atexit
import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from raypp.api.prepare import RequestPreparer
from raypp.api.tokenizer import Tokenizer
from raypp.config.chat_template import read_chat_template
from raypp.config.engine_config import EngineConfig
from raypp.config.env import read_environment, warn_of_unknown_variables
from raypp.errors import ConfigError, ModelLoadError, RayppError
from raypp.models.config import load_model_config
from raypp.models.registry import resolve_model_path
from raypp.pictures.fetch import Fetcher
from raypp.pictures.reader import PictureReader
from raypp.supervision.supervisor import EngineWatcher, Recovery
from raypp.types import SamplingParams

if TYPE_CHECKING:
    from raypp.stage.build_stage import StageFactory  # imports torch


class ExitHook:
    """Ends what an owner has open: when called, when the owner is collected, or at exit; once.

    A forked child inherits the hook and the owner, but neither the threads nor the connections behind them: there it
    does nothing.
    """

    def __init__(self, owner: object, end: Callable[[], object]) -> None:
        """Begin to watch the owner.

        Args:
            owner: Its end is waited for.
            end: What to do then. It must not hold the owner.
        """
        self._finalizer = weakref.finalize(owner, _end_in_process, os.getpid(), end)
        self._pid = os.getpid()
        # Not the finalizer's own exit hook: that one may run after Ray's, with nothing left to talk to.
        self._finalizer.atexit = False
        atexit.register(self._finalizer)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that opened it."""
        return os.getpid() != self._pid

    def __call__(self) -> None:
        """Do it now. Later calls do nothing."""
        atexit.unregister(self._finalizer)
        self._finalizer()


def _end_in_process(pid: int, end: Callable[[], object]) -> None:
    if os.getpid() == pid:
        end()


@runtime_checkable
class Replaceable(Protocol):
    """An engine as a notebook holds it."""

    def close_when_replaced(self) -> None:
        """Close, from any thread, without waiting for an event loop."""


def close_replaced_engines() -> None:
    """Close the engines whose names the running cell assigns. Outside of a notebook there are none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return
    cells = shell.history_manager.input_hist_parsed  # magics are Python calls here; the running cell is the last
    for engine in engines_replaced_by(str(cells[-1]) if cells else "", shell.user_ns):
        engine.close_when_replaced()


def engines_replaced_by(source: str, namespace: Mapping[str, object]) -> list[Replaceable]:
    """Return the engines that a cell assigns anew.

    Args:
        source: The cell's.
        namespace: What its names mean before it runs.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # it ran, so this is not Python of the kind that binds names
        return []
    found: dict[int, Replaceable] = {}
    for name in _assigned_names(tree):
        value = namespace.get(name)
        if isinstance(value, Replaceable) and not isinstance(value, type):
            found[id(value)] = value
    return list(found.values())


def _assigned_names(tree: ast.Module) -> Iterable[str]:
    """Yield the names that the cell itself binds; what its functions and classes bind inside is theirs."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        waiting.extend(ast.iter_child_nodes(node))


_LOG = logging.getLogger(__name__)

Model = str | os.PathLike[str] | EngineConfig
"""What names a model, or a whole configuration: also as the path of a TOML file."""


class EngineHandle(Protocol):
    """A running engine, held by the process that started it."""

    @property
    def client_address(self) -> str:
        """The zmq address that clients connect to, of the present life: every start has one of its own."""

    @property
    def config(self) -> EngineConfig:
        """The configuration of the present life; while the engine restarts, that of the one that has ended."""

    @property
    def model_info(self) -> Mapping[str, Any]:
        """What clients must know of the model.

        At least vocab_size, max_model_len, eos_token_ids, model_path; `vision`, a `VisionConfig`, if it has one;
        `sampling_defaults`, fields of `SamplingParams` that hold where a request says nothing.
        """

    def plan(self) -> dict[str, Any]:
        """Return layers, bytes and blocks per stage."""

    def processes(self) -> dict[str, Any]:
        """Return the process ids of the driver, the stages and the encoders."""

    def encoder_actors(self) -> list[Any]:
        """Return the Ray actors that encode images; none of a model that reads text alone. Blocks."""

    def watch(self, watcher: EngineWatcher) -> None:
        """Call a watcher, from another thread, when the engine dies, runs again or is dead for good.

        If it does not run now, the watcher is called before this returns. So a caller that watches first and then reads
        `client_address` misses nothing.
        """

    def report_death(self, error: RayppError, client_address: str) -> None:
        """Take in what a client finds out: that the engine has died, or says nothing. From any thread.

        It is ignored while the engine is restarting or closed, and of an earlier life than the present one.

        Args:
            error: What it died of.
            client_address: Where the client was connected; it names the life that has died.
        """

    def excuse_restarts(self, count: int) -> None:
        """Take the latest `count` restarts off those of `max_engine_restarts`: what caused them has ended."""

    def restart(self, config: EngineConfig) -> None:
        """Start the engine again as configured, and return when it runs; its requests wait, and go on then. Blocks.

        Raises:
            ConfigError: a change under which requests could not go on.
            ResourceError, ModelLoadError, DeadlineError: it does not start so, and goes on as it was.
            EngineDeadError: it died for good, or was closed.
        """

    def recoveries(self) -> list[Recovery]:
        """Return the engine's pauses, oldest first."""

    def close(self) -> None:
        """Stop the engine and wait until its processes are gone."""


class Launch(Protocol):
    """Starts an engine, and returns when it can be used."""

    def __call__(self, config: EngineConfig, *, stage_factory: StageFactory | None = None) -> EngineHandle:
        """Start the engine. Blocks."""


def launch_on_ray(config: EngineConfig, *, stage_factory: StageFactory | None = None) -> EngineHandle:
    """Start an engine of Ray actors; the usual way."""
    from raypp.actors.engine_actors import launch_engine  # imports ray

    return launch_engine(config, stage_factory=stage_factory)


@dataclass(frozen=True)
class OpenEngine:
    """A running engine and what belongs to it on the client's side."""

    handle: EngineHandle
    tokenizer: Tokenizer | None
    preparer: RequestPreparer
    pictures: PictureReader | None  # None for a model that takes text alone
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]  # of `SamplingParams`, where a request says nothing

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration; `restart` changes it."""
        return self.handle.config

    def restart(self, config: EngineConfig | None, settings: Mapping[str, object]) -> None:
        """Start it again with a configuration, None: its own, and settings. Blocks; see `EngineHandle.restart`."""
        config = self.config if config is None else config
        self.handle.restart(config.with_settings(**settings) if settings else config)


class EngineOwner:
    """What `LLM` and `AsyncLLM` say alike of their engine."""

    _engine: OpenEngine

    @property
    def config(self) -> EngineConfig:
        """The configuration as it was given."""
        return self._engine.config

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of `SamplingParams` that hold where a request says nothing, of the model's generation_config.json."""
        return self._engine.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a request that comes without any; `dataclasses.replace` changes some of them."""
        return SamplingParams(**self.sampling_defaults)

    def reset_prefix_cache(self) -> None:
        """Let later requests find nothing in the prefix cache of what earlier ones computed: for measurements.

        Requests that run are not disturbed. What is cached stays in memory until its blocks are needed.
        """
        self._engine.preparer.reset_prefix_cache()

    def plan(self) -> dict[str, Any]:
        """Return layers, bytes and blocks per stage."""
        return self._engine.handle.plan()

    def processes(self) -> dict[str, Any]:
        """Return `{"driver": pid, "stages": [pid, ...], "encoders": [...]}`."""
        return self._engine.handle.processes()


@cache
def freeze_start() -> None:
    """Take what exists now out of the garbage collector's sight, the first time that this process calls it.

    A full collection stops the process, and every stream in it, for 1 ms per 1,000 objects: 0.15 s with Ray and
    transformers imported, 0.2 to 0.3 s with torch. Frozen objects are not visited; reference counts free them as
    before. Not repeated: garbage of running requests would be frozen, too.
    """
    gc.collect()
    gc.freeze()


def open_engine(
    model: Model,
    settings: Mapping[str, object],
    stage_factory: StageFactory | None,
    launch: Launch,
    *,
    freeze_gc: bool = True,
) -> OpenEngine:
    """Start an engine and load the model's tokenizer; then `freeze_start`, if `freeze_gc`. Blocks.

    Raises:
        ConfigError: a setting that cannot be.
        RayppError: the engine cannot start; what is wrong with the model or its tokenizer is said before it tries.
    """
    logging.getLogger("raypp").setLevel(read_environment().log_level)
    warn_of_unknown_variables()
    config = _config_of(model, settings)
    tokenizer = load_tokenizer(config)
    close_replaced_engines()
    handle = launch(config, stage_factory=stage_factory)
    try:
        info = handle.model_info
        if tokenizer is not None:
            if tokenizer.model_path != str(info["model_path"]):  # an engine may hold another copy of its model
                given = config.model.chat_template
                template = None if given is None else read_chat_template(given)
                tokenizer = Tokenizer(info["model_path"], chat_template=template)
            tokenizer.max_tokens = info["max_model_len"]
        eos_token_ids = frozenset(info["eos_token_ids"])
        if not eos_token_ids and tokenizer is not None:  # the model's own word counts; not all have one
            eos_token_ids = tokenizer.eos_token_ids
            _check_in_vocabulary(eos_token_ids, info)
        vision, sampling_defaults = info.get("vision"), info.get("sampling_defaults", {})
        pictures = None if vision is None else PictureReader(vision, info["max_model_len"], Fetcher(config.images))
        preparer = RequestPreparer(
            tokenizer,
            vocab_size=info["vocab_size"],
            max_model_len=info["max_model_len"],
            seed=config.model.seed,
            max_logprobs=config.model.max_logprobs,
            eos_token_ids=eos_token_ids,
            pictures=pictures,
            sampling_defaults=sampling_defaults,
        )
    except BaseException:
        handle.close()
        raise
    if sampling_defaults:
        _LOG.warning(
            "default sampling parameters of the model's generation_config.json: %s; "
            "generation_config=none keeps those of raypp",
            ", ".join(f"{name}={value}" for name, value in sampling_defaults.items()),
        )
    if freeze_gc:
        freeze_start()
    return OpenEngine(handle, tokenizer, preparer, pictures, tuple(sorted(eos_token_ids)), sampling_defaults)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Return the tokenizer of a configuration's model; None: it is to have none. Starts nothing.

    Raises:
        ConfigError: the chat template cannot be read, or is broken.
        ModelLoadError: there is no such model, or it has no tokenizer that can be used.
    """
    settings = config.model
    template = None if settings.chat_template is None else read_chat_template(settings.chat_template)
    if settings.skip_tokenizer_init:
        return None
    path = resolve_model_path(settings.model, settings.revision)
    # What is no model at all says so.
    load_model_config(path, impl=settings.model_impl, trusts_code=settings.trust_remote_code)
    return Tokenizer(path, chat_template=template)


def _check_in_vocabulary(eos_token_ids: Collection[int], info: Mapping[str, Any]) -> None:
    """Refuse a tokenizer whose end-of-sequence token the model cannot draw; the model's own were checked when read."""
    if max(eos_token_ids, default=0) >= info["vocab_size"]:
        raise ModelLoadError(
            f"{info['model_path']}: the tokenizer's end-of-sequence token is outside of the model's vocabulary",
            got=sorted(eos_token_ids),
            expected=f"token ids from 0 to {info['vocab_size'] - 1}",
            hint="the tokenizer does not belong to this model, or config.json lacks eos_token_id",
        )


def _config_of(model: Model, settings: Mapping[str, object]) -> EngineConfig:
    if isinstance(model, EngineConfig):
        return model.with_settings(**settings) if settings else model
    if isinstance(model, str | os.PathLike):
        if os.fspath(model).endswith(".toml"):
            return EngineConfig.from_toml(model, **settings)
        return EngineConfig.from_flat(model, **settings)
    raise ConfigError("no model is named", got=repr(model), expected="a name, a directory or an EngineConfig")
