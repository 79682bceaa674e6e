"""`LLM`: the engine for scripts and notebooks. Every call blocks until its result is there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from raypp.api.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from raypp.api.event_loop_thread import EventLoopThread
from raypp.api.exit_hook import ExitHook
from raypp.api.frontend import Frontend
from raypp.api.launch import EngineHandle, Launch, Model, launch_on_ray, open_engine
from raypp.api.per_request import Params, Priority
from raypp.api.picture_prompts import EncodedPrompt
from raypp.api.prompt_forms import is_one_prompt
from raypp.api.rendering import Rendering, RenderingOptions
from raypp.api.running_request import PreparedRequest
from raypp.api.timeline import Timeline
from raypp.api.timeline_reader import read_timeline
from raypp.api.tokenizer import ChatMessage
from raypp.config.engine_config import EngineConfig
from raypp.errors import EngineDeadError, RequestError
from raypp.types import Prompt, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from raypp.stage.build_stage import StageFactory  # imports torch


class LLM:
    """A model, ready to generate.

        with LLM("tiny", num_stages=2) as llm:
            outputs = llm.generate(["def main("], SamplingParams(max_tokens=64))

    Works in a script and inside a running event loop; may be used from several threads. Close it, or leave its `with`
    block, to stop the engine; a forgotten one is closed when it is collected, at the latest at exit.
    """

    def __init__(
        self,
        model: Model,
        *,
        stage_factory: StageFactory | None = None,
        launch: Launch = launch_on_ray,
        freeze_gc: bool = True,
        **settings: object,
    ) -> None:
        """Start an engine. Blocks until it can be used.

        Args:
            model: `tiny`, a directory, a Hugging Face model id; or a whole EngineConfig, or the path of one, `*.toml`.
            stage_factory: Makes a stage in place of the model's own; for tests.
            launch: Starts the engine.
            freeze_gc: Once the first engine of this process has started, collect garbage and call `gc.freeze()`, so
                that later collections do not visit what the start left behind, which stops all requests for 0.2 s.
            **settings: Fields of EngineConfig by their names alone, e.g. `num_stages=2`.

        Raises:
            ConfigError: a setting that cannot be.
            RayppError: the engine cannot start.
        """
        self._engine = open_engine(model, settings, stage_factory, launch, freeze_gc=freeze_gc)
        thread = EventLoopThread("raypp-llm")
        try:
            self._frontend = thread.call(lambda: Frontend(self._engine))
        except BaseException:
            thread.close()
            self._engine.handle.close()
            raise
        self._thread = thread
        self._end = ExitHook(self, partial(_shut_down, self._frontend, thread, self._engine.handle))

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

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, a `PreTrainedTokenizerBase` of transformers. Do not change it.

        Raises:
            RequestError: the engine has none.
        """
        if self._engine.tokenizer is None:
            raise RequestError(
                "the engine has no tokenizer",
                got="skip_tokenizer_init=True",
                expected="an engine with one",
                hint="start the engine without skip_tokenizer_init",
            )
        return self._engine.tokenizer.transformers_tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        request_ids: Sequence[str] | None = None,
        priority: Priority = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts and return the outputs, in order. Ctrl-C aborts them.

        Args:
            prompts: One or more, each a str, a list of token ids, `{"prompt": "..."}` or `{"prompt_token_ids": [...]}`;
                the latter two may have `multi_modal_data` and `cache_salt`, see `raypp.types.PromptDetails`.
            sampling_params: One for all, or one per prompt; None: those of `get_default_sampling_params`. What is
                given holds as it is, whatever the model's generation_config.json says.
            request_ids: Their public ids, to abort them by; made up by default.
            priority: One for all, or one per prompt; smaller is served first, 0 by default.
            use_tqdm: Show a progress bar.

        Raises:
            RequestError: one cannot be run; then none was.
            EngineDeadError: the engine died.
        """
        listed: Any = [prompts] if is_one_prompt(prompts) else prompts
        prepared = self._engine.preparer.prompts(listed, sampling_params, request_ids, priority)
        return self._complete(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: Params = None,
        *,
        request_ids: Sequence[str] | None = None,
        priority: Priority = None,
        use_tqdm: bool = False,
        **rendering: Unpack[RenderingOptions],
    ) -> list[RequestOutput]:
        """Answer conversations and return the outputs, in order; a list also for a single one.

        Args:
            messages: One conversation, or several: lists of `{"role": ..., "content": ...}`. Content is a str or a list
                of parts: `{"type": "text", "text": ...}`; for models that take images also
                `{"type": "image", "image": X}` with a PIL image, a path, bytes or an array,
                `{"type": "image_url", "image_url": {"url": "data:..."}}`, and
                `{"type": "video", "video": [X, ...], "fps": 2.0}`.
            sampling_params: One for all, or one per conversation; None as for `generate`.
            request_ids: Their public ids, to abort them by; made up by default.
            priority: One for all, or one per conversation; smaller is served first, 0 by default.
            use_tqdm: Show a progress bar.
            **rendering: What the chat template is told besides: fields of `raypp.api.rendering.Rendering`, such as
                `tools`, `continue_final_message`, or `chat_template_kwargs={"enable_thinking": False}`.

        Raises:
            RequestError: one cannot be run; then none was.
            EngineDeadError: the engine died.
        """
        is_one = isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        prepared = self._engine.preparer.chats(
            conversations, sampling_params, request_ids, Rendering(**rendering), priority
        )
        return self._complete(prepared, use_tqdm)

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the likeliest continuations of prompts, in order, each prompt's best first.

        Every token of a beam is a request of its own; the model's log-probabilities count, whatever its
        generation_config.json says. Prompts with images are refused.

        Args:
            prompts: As for `generate`.
            params: How to search. Twice `beam_width` is at most the engine's `max_logprobs`.

        Raises:
            RequestError: a prompt that cannot be run, or too many beams; then nothing was run.
            EngineDeadError: the engine died.
        """
        listed: Any = [prompts] if is_one_prompt(prompts) else prompts
        engine, most = self._engine, self.config.model.max_logprobs
        if -1 < most < 2 * params.beam_width:
            raise RequestError(
                "beam_width is larger than the engine's log-probabilities allow",
                got=params.beam_width,
                expected=f"at most {most // 2}, half of max_logprobs = {most}",
                hint="start the engine with a larger max_logprobs (-1: no limit)",
                param="beam_width",
            )
        prepared = engine.preparer.prompts(listed)
        for request in (one.request for one in prepared):
            if request.items is not None:
                raise RequestError(
                    "beam search takes no images", got="a prompt with images", expected="text", hint="use generate"
                )
        found = search_beams(
            [EncodedPrompt(one.request.prompt_token_ids, cache_salt=one.request.cache_salt) for one in prepared],
            params,
            lambda asked, one: self._complete(engine.preparer.prompts(asked, one), use_tqdm=False),
            eos=engine.eos_token_ids,
            max_model_len=int(engine.handle.model_info["max_model_len"]),
        )
        for sequence in (one for output in found for one in output.sequences):
            sequence.text = None if engine.tokenizer is None else engine.tokenizer.decode(sequence.tokens)
        return found

    def stream(
        self,
        prompt: Prompt | Sequence[ChatMessage],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **rendering: Unpack[RenderingOptions],
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, or answer one conversation, and yield the outputs so far whenever there are new tokens.

        Leaving the iterator early, or Ctrl-C, aborts the request.

        Args:
            prompt: A prompt as for `generate`, or a conversation: a list of `{"role": ..., "content": ...}`.
            sampling_params: How to sample; None as for `generate`.
            request_id: Its public id; made up by default.
            **rendering: Of a conversation: what the chat template is told besides, as for `chat`.

        Raises:
            RequestError: it cannot be run.
            EngineDeadError: the engine died.
        """
        preparer, ids = self._engine.preparer, None if request_id is None else [request_id]
        given: Any = prompt
        if is_one_prompt(given):
            (prepared,) = preparer.prompts([given], sampling_params, ids)
        else:
            (prepared,) = preparer.chats([given], sampling_params, ids, Rendering(**rendering))
        return self._stream(prepared)

    def abort(self, request_id: str) -> None:
        """End a request with what it has. An id that is not running is ignored."""
        self._thread.call(lambda: self._frontend.abort([request_id]))

    def reset_prefix_cache(self) -> None:
        """Let later requests find nothing in the prefix cache of what earlier ones computed: for measurements.

        Requests that run are not disturbed. What is cached stays in memory until its blocks are needed.
        """
        self._engine.preparer.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters, since it was started or started again, and how often that was.

        While it is started again this returns at once, with `is_recovering` and what there is to tell.

        Raises:
            DeadlineError: the driver does not answer.
            EngineDeadError: the engine died for good.
        """
        return self._thread.run(self._frontend.stats(self.config.faults.step_timeout_s))

    def timeline(self, last_s: float | None = None) -> Timeline:
        """Return what the stages did during the last burst of work: in a notebook, an image.

        Args:
            last_s: Keep at most this many seconds of it, the last ones.

        Raises:
            ConfigError: the engine has not worked yet.
            EngineDeadError: the engine died.
        """
        timeout_s = self.config.faults.step_timeout_s
        return self._thread.run(read_timeline(self._frontend, self.plan(), last_s=last_s, timeout_s=timeout_s))

    def restart(self, config: EngineConfig | None = None, **settings: object) -> None:
        """Start the engine again with other settings, under its requests, which go on with the same texts.

            llm.restart(num_stages=2, layer_partition=None)

        What may change: stages, layers and links, KV blocks, graphs, speculation, encoders, rows and tokens of steps.

        Args:
            config: The whole configuration; None: the present one.
            settings: What is to be different, by name.

        Raises:
            ConfigError: a setting that cannot be, or cannot change while requests run.
            ResourceError, ModelLoadError, DeadlineError: it does not start so, and goes on as it was.
            EngineDeadError: the engine died for good, or was closed.
        """
        self._engine.restart(config, settings)

    def plan(self) -> dict[str, Any]:
        """Return layers, bytes and blocks per stage."""
        return self._engine.handle.plan()

    def processes(self) -> dict[str, Any]:
        """Return `{"driver": pid, "stages": [pid, ...], "encoders": [...]}`."""
        return self._engine.handle.processes()

    def close(self) -> None:
        """Stop the engine. Requests that still run end with EngineDeadError. Twice, or in a fork, it does nothing."""
        self._end()

    def close_when_replaced(self) -> None:
        """Stop the engine: a notebook's cell is about to start another under the same name."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, prepared: PreparedRequest) -> Iterator[RequestOutput]:
        outputs = self._frontend.stream(prepared)
        try:
            while (output := self._thread.run(_next_of(outputs))) is not None:
                yield output
        finally:
            with contextlib.suppress(EngineDeadError):
                self._thread.finish(outputs.aclose())

    def _complete(self, prepared: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        with _progress(len(prepared), use_tqdm) as on_end:
            return self._thread.run(self._frontend.complete(prepared, on_end))


async def _next_of(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(outputs, None)


@contextlib.contextmanager
def _progress(total: int, enabled: bool) -> Iterator[Callable[[], None] | None]:
    if not enabled:
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="request") as bar:
        yield lambda: bar.update(1)


def _shut_down(frontend: Frontend, thread: EventLoopThread, handle: EngineHandle) -> None:
    try:
        thread.call(frontend.close)
        thread.close()
    finally:
        handle.close()
