"""Completions as a step of a Ray Data pipeline.

    dataset.map_batches(Completer, fn_constructor_kwargs={"model": "tiny"}, batch_size=256, concurrency=1)

The actor that Ray Data makes of it starts an engine of its own, with its stages in their own placement group beside it:
`concurrency` engines in all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from raypp.api.launch import Launch, launch_on_ray
from raypp.api.llm import LLM
from raypp.api.picture_prompts import PROMPT_FORMS
from raypp.errors import ConfigError, EngineDeadError, RayppError, RequestError
from raypp.types import RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

Column = npt.NDArray[Any]


class Completer:
    """Adds the completions of one column's prompts to a batch: text, finish reason, number of tokens, error."""

    def __init__(
        self,
        model: str,
        *,
        prompt_column: str = "prompt",
        messages_column: str | None = None,
        output_column: str = "completion",
        sampling_params: Mapping[str, Any] | None = None,
        launch: Launch = launch_on_ray,
        **settings: Any,
    ) -> None:
        """Start the engine.

        Args:
            model: As of `LLM`.
            prompt_column: Texts to continue.
            messages_column: Conversations to answer (lists of `{"role": ..., "content": ...}`), instead of prompts.
            output_column: Where the texts go. `<output_column>_finish_reason`, `..._num_tokens` and `..._error` are
                added beside it; a row has either a text or an error.
            sampling_params: Fields of SamplingParams, for all rows; others are the model's defaults.
            launch: Starts the engine; for tests.
            **settings: As of `LLM`.

        Raises:
            RayppError: as of `LLM`.
        """
        given = sampling_params or {}
        SamplingParams(**given)  # so that mistakes raise before an engine starts
        self._is_chat = messages_column is not None
        self._input_column = messages_column if messages_column is not None else prompt_column
        self._output_column = output_column
        self._llm = LLM(model, launch=launch, **settings)
        self._params = SamplingParams(**{**self._llm.sampling_defaults, **given})

    def __call__(self, batch: dict[str, Column]) -> dict[str, Column]:
        """Return the batch with the added columns.

        Raises:
            ConfigError: it has no column of that name.
            EngineDeadError: the engine died; Ray Data starts the actor, and so the engine, again.
        """
        if self._input_column not in batch:
            raise ConfigError("the batch lacks a column", got=sorted(batch), expected=self._input_column)
        answers = self._complete([_plain(prompt) for prompt in batch[self._input_column]])
        outputs = [answer.outputs[0] if isinstance(answer, RequestOutput) else None for answer in answers]
        errors = [None if isinstance(answer, RequestOutput) else answer for answer in answers]
        name = self._output_column
        return {
            **batch,
            name: _column([output.text if output else None for output in outputs]),
            f"{name}_finish_reason": _column([output.finish_reason if output else None for output in outputs]),
            f"{name}_num_tokens": np.array([len(output.token_ids) if output else 0 for output in outputs], np.int64),
            f"{name}_error": _column(errors),
        }

    def _complete(self, prompts: list[Any]) -> list[RequestOutput | str]:
        """Run all rows together; where one of them fails, each by itself: a row has its output, or its error."""
        if not prompts:
            return []
        try:
            return [*self._run(prompts)]
        except EngineDeadError:
            raise
        except Exception:  # which row's error it is shows below
            num_threads = 2 * self._llm.config.scheduler.max_num_seqs  # so many keep the engine full
            with ThreadPoolExecutor(min(num_threads, len(prompts)), "raypp-row") as threads:
                return list(threads.map(self._run_alone, prompts))

    def _run_alone(self, prompt: Any) -> RequestOutput | str:
        try:
            [output] = self._run([prompt])
        except EngineDeadError:
            raise
        except RayppError as error:
            return str(error)
        except Exception as error:  # a fault of raypp's own must not keep the other rows from their answers
            logger.exception("a row of column %s", self._input_column)
            return f"internal error: {type(error).__name__}"
        return output

    def _run(self, prompts: list[Any]) -> list[RequestOutput]:
        forms, expected = (list, "a list of messages") if self._is_chat else (str | list | dict, PROMPT_FORMS)
        for prompt in prompts:  # a number or a message would be taken for a part of a single prompt
            if not isinstance(prompt, forms):
                got = f"{repr(prompt)[:80]} ({type(prompt).__name__})"
                raise RequestError(f"column {self._input_column} has another value", got=got, expected=expected)
        return (self._llm.chat if self._is_chat else self._llm.generate)(prompts, self._params)


def _plain(prompt: Any) -> Any:
    """Return a prompt as Python has it: Arrow's lists come as arrays, and its structs have nulls for absent fields."""
    if isinstance(prompt, np.ndarray | list):
        return [_plain(item) for item in prompt]
    if isinstance(prompt, dict):
        return {name: _plain(value) for name, value in prompt.items() if value is not None}
    return prompt.item() if isinstance(prompt, np.generic) else prompt


def _column(values: list[str | None]) -> Column:
    column = np.empty(len(values), object)
    column[:] = values
    return column
