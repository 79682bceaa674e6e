"""Fields of other servers that raypp does not have: which values ask for nothing, and why others are refused.

One table for the checks of bodies, for error messages and for docs/http_api.md. Clients send the defaults of other
servers as a matter of course: a value that asks for nothing is taken. Any other would change the answer, so it is
refused with the reason, whatever the setting `unknown_fields` says. A field that changes no answer is ignored, with a
warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class ForeignField(NamedTuple):
    """A field that is known, but not supported."""

    reason: str
    """Why, or what there is in its place."""
    nothing: tuple[Any, ...] = ()
    """The values that ask for nothing. None, which does everywhere, is not among them."""
    has_effect: bool = True
    """Whether other values would change the answer; else the field is ignored, with a warning."""

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether this value is one of `nothing`. JSON's `true` is not 1."""
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.nothing)


def _ignored(reason: str) -> ForeignField:
    return ForeignField(reason, has_effect=False)


_LENGTH = "`max_tokens` has it; in `/v1/responses` `max_output_tokens`"
_THINKS = (
    "`reasoning_effort` has it, `none` for no thoughts; in `/v1/responses` `reasoning`, in `/v1/messages` `thinking`; "
    "in `/v1/completions` the prompt decides"
)
_FORM = "`structured_outputs` has it"
_IN_BODY = "its content belongs into the body itself"
_NO_SAMPLER = "there is no such sampler: `min_p` cuts unlikely tokens, `repetition_penalty` lowers repeated ones"
_SYSTEM = (
    "the first of `messages` has it, with the role `system`; in `/v1/responses` `instructions`, in `/v1/messages` "
    "`system`, in `/v1/completions` the prompt"
)
_NO_TEMPLATE = "; `/v1/completions` has no template"

OF_ALL: Mapping[str, ForeignField] = MappingProxyType(
    {
        # vLLM's
        "use_beam_search": ForeignField("`LLM.beam_search` has it, HTTP has not", (False,)),
        "length_penalty": ForeignField("of beam search: `LLM.beam_search` has it, HTTP has not", (1,)),
        "early_stopping": ForeignField("of beam search: `LLM.beam_search` has it, HTTP has not", (False,)),
        "logits_processors": ForeignField("a request brings no programs", ([],)),
        "kv_transfer_params": ForeignField("prompts are computed where they are continued", ({},)),
        "spaces_between_special_tokens": ForeignField("of tokenizers in Python", (True,)),
        "guided_decoding_backend": _ignored("there is nothing to choose: the text is held to the form by any of them"),
        "guided_decoding": ForeignField(_FORM),
        "guided_whitespace_pattern": ForeignField("a `grammar` of `structured_outputs` says where space may be"),
        "truncation_side": ForeignField("prompts are cut at their beginning", ("left",)),
        "chat_template": ForeignField("a template is a program; `chat_template` of the engine replaces the model's"),
        "documents": ForeignField(f"`chat_template_kwargs` passes them to a template{_NO_TEMPLATE}", ([],)),
        "mm_processor_kwargs": ForeignField("images are read as the model was trained", ({},)),
        "media_io_kwargs": ForeignField("images are read as the model was trained", ({},)),
        "vllm_xargs": ForeignField("there are no extensions that would read it", ({},)),
        "include_reasoning": ForeignField("thoughts come apart from the answer, and need not be read", (True,)),
        "thinking_token_budget": ForeignField("thoughts count towards the most tokens to generate"),
        "echo": ForeignField("`/v1/completions` has it", (False,)),
        "best_of": ForeignField("nothing is generated to be thrown away", (1,)),
        "suffix": ForeignField("text is continued at its end only", ("",)),
        "prompt_embeds": ForeignField("prompts are text or tokens"),
        # OpenAI's
        "audio": ForeignField("answers are text"),
        "prediction": ForeignField("speculation is a setting of the engine"),
        "web_search_options": ForeignField("there is no search"),
        "prompt_cache_options": _ignored("here prompts are cached by their tokens and `cache_salt`"),
        "client_metadata": _ignored("notes of the client"),
        # SGLang's
        "regex": ForeignField(f"{_FORM}, as `regex`"),
        "ebnf": ForeignField(f"{_FORM}, as `grammar`"),
        "max_new_tokens": ForeignField(_LENGTH),
        "no_stop_trim": ForeignField("`include_stop_str_in_output` has it", (False,)),
        "separate_reasoning": ForeignField("thoughts always come apart from the answer", (True,)),
        "stream_reasoning": ForeignField("thoughts are streamed as they come", (True,)),
        "return_hidden_states": ForeignField("answers are text", (False,)),
        "custom_logit_processor": ForeignField("a request brings no programs"),
        "lora_path": ForeignField("there are no adapters: merge them into the weights"),
        # llama.cpp's
        "n_predict": ForeignField(_LENGTH, (-1,)),
        "grammar": ForeignField(f"{_FORM}, as `grammar`", ("",)),
        "json_schema": ForeignField(f"{_FORM}, as `json_schema`"),
        "repeat_penalty": ForeignField("`repetition_penalty` has it", (1,)),
        "temp": ForeignField("`temperature` has it"),
        "repeat_last_n": ForeignField("`repetition_penalty` looks at the whole text"),
        "tfs_z": ForeignField(_NO_SAMPLER, (1,)),
        "top_n_sigma": ForeignField(_NO_SAMPLER, (-1,)),
        "typical_p": ForeignField(_NO_SAMPLER, (1,)),
        "mirostat": ForeignField(_NO_SAMPLER, (0,)),
        "dry_multiplier": ForeignField(_NO_SAMPLER, (0,)),
        "xtc_probability": ForeignField(_NO_SAMPLER, (0,)),
        "dynatemp_range": ForeignField(_NO_SAMPLER, (0,)),
        "top_a": ForeignField(_NO_SAMPLER, (0,)),
        "samplers": ForeignField("the order of samplers is fixed", ([],)),
        "cache_prompt": _ignored("`enable_prefix_caching` of the engine says whether prompts are cached"),
        "id_slot": _ignored("the scheduler chooses the row of a request"),
        "timings_per_token": _ignored("`/metrics` has times"),
        # Ollama's, as clients send them to any server
        "num_ctx": _ignored("the context is the engine's `max_model_len`"),
        "keep_alive": _ignored("the model stays loaded"),
        "num_predict": ForeignField(_LENGTH, (-1,)),
        "think": ForeignField(_THINKS, (True,)),
        "format": ForeignField(
            "`response_format` has it; in `/v1/completions` `structured_outputs`, in `/v1/responses` `text`, in "
            "`/v1/messages` `output_config`",
            ("",),
        ),
        "options": ForeignField(_IN_BODY, ({},)),
        # of clients, and of routers that choose between models
        "system": ForeignField(_SYSTEM),
        "system_prompt": ForeignField(_SYSTEM),
        "instructions": ForeignField(_SYSTEM),
        "input": ForeignField("`messages` has it; in `/v1/completions` `prompt`"),
        "do_sample": ForeignField("`temperature` 0 draws no token at random", (True,)),
        "num_beams": ForeignField("`LLM.beam_search` has it, HTTP has not", (1,)),
        "sampling_params": ForeignField(_IN_BODY, ({},)),
        "lora_request": ForeignField("there are no adapters: merge them into the weights"),
        "adapter_id": ForeignField("there are no adapters: merge them into the weights"),
        "stop_sequences": ForeignField("`stop` has it", ([],)),
        "extra_body": ForeignField(f"{_IN_BODY}: `extra_body` is an argument of OpenAI's Python client", ({},)),
        "max_length": ForeignField(_LENGTH),
        "min_length": ForeignField("`min_tokens` has it", (0,)),
        "stop_words": ForeignField("`stop` has it; in `/v1/messages` `stop_sequences`", ([],)),
        "enable_thinking": ForeignField(f"`chat_template_kwargs` passes it to a template{_NO_TEMPLATE}"),
        "models": ForeignField("`model` names the one that answers", ([],)),
        "provider": _ignored("there is one: this server"),
        "usage": _ignored("answers count their tokens; streams of chats and completions do with `stream_options`"),
    }
)
"""Of any body that has no field of this name itself."""

OF_CHAT: Mapping[str, ForeignField] = MappingProxyType(
    {
        **OF_ALL,
        "best_of": ForeignField("nothing is generated to be thrown away: `n` has several answers", (1,)),
        "reasoning": ForeignField(_THINKS, ({},)),
        "thinking": ForeignField(_THINKS),
        "input_ids": ForeignField("`/v1/completions` takes token ids, as `prompt`"),
    }
)

OF_COMPLETIONS: Mapping[str, ForeignField] = MappingProxyType(
    {
        **OF_ALL,
        "response_format": ForeignField(_FORM, ({"type": "text"},)),
        "input_ids": ForeignField("`prompt` takes token ids"),
    }
)

_KEEPS_NOTHING = "no responses are kept here"

OF_RESPONSES: Mapping[str, ForeignField] = MappingProxyType(
    {
        **OF_ALL,
        "previous_response_id": ForeignField(
            f"{_KEEPS_NOTHING}: send the conversation so far as `input`, the `output` of each response as it came"
        ),
        "conversation": ForeignField(f"{_KEEPS_NOTHING}: send the conversation so far as `input`"),
        "background": ForeignField(f"{_KEEPS_NOTHING}: read the answer, or its stream", (False,)),
        "prompt": ForeignField("no templates of prompts are kept here: send `instructions` and `input`"),
        "context_management": ForeignField("conversations are not compacted: leave older items out of `input`", ([],)),
    }
)

OF_MESSAGES: Mapping[str, ForeignField] = MappingProxyType(
    {
        **OF_ALL,
        "mcp_servers": ForeignField("no tools are called here: list those that the client runs as `tools`", ([],)),
        "container": ForeignField("no programs are run here"),
        "inference_geo": _ignored("the server is where it is"),
        "speed": _ignored("there is one"),
        "betas": _ignored("as the header `anthropic-beta` is"),
    }
)
