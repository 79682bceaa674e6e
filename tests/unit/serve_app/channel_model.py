"""A folder with a tokenizer and a chat template like gpt-oss's: its special tokens, and what its template asks for."""

from __future__ import annotations

import json
from pathlib import Path

import raypp

RENAMED = {
    "<|im_start|>": "<|start|>",
    "<|im_end|>": "<|return|>",
    "<|vision_start|>": "<|channel|>",
    "<|vision_end|>": "<|message|>",
    "<|vision_pad|>": "<|end|>",
    "<|image_pad|>": "<|call|>",
    "<|video_pad|>": "<|constrain|>",
}
# As gpt-oss's own: a thought is `thinking`, and beside a call that or content, shown until an answer follows; results
# name the last call's function; each function has a description.
TEMPLATE = """{{- '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort or 'medium') ~ '<|end|>' -}}
{%- if tools -%}
{{- '<|start|>developer<|message|>' -}}
{%- for tool in tools -%}
{{- '// ' + tool.function.description + '\\n' -}}
{{- 'type ' ~ tool.function.name ~ ' = (_: any) => any;\\n' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(name=none) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and 'tool_calls' in message -%}
{%- set later = namespace(answer=false) -%}
{%- for other in messages[loop.index:] -%}
{%- if other.role == 'assistant' and 'tool_calls' not in other -%}{%- set later.answer = true -%}{%- endif -%}
{%- endfor -%}
{%- if message.content and message.thinking -%}
{{- raise_exception('content and thinking beside a call') -}}
{%- endif -%}
{%- if (message.content or message.thinking) and not later.answer -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ (message.content or message.thinking) ~ '<|end|>' -}}
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{%- set last.name = call.name -%}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' -}}
{{- (call.arguments | tojson) ~ '<|call|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content ~ '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{%- if last.name is none -%}{{- raise_exception('a result without a call') -}}{%- endif -%}
{{- '<|start|>functions.' ~ last.name ~ ' to=assistant<|channel|>commentary<|message|>' -}}
{{- (message.content | tojson) ~ '<|end|>' -}}
{%- else -%}
{{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""


def make_folder(folder: Path) -> Path:
    """Write the embedded model's tokenizer and configuration, with gpt-oss's special tokens, and the template."""
    tiny = Path(raypp.__file__).parent / "assets" / "tiny"
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = RENAMED.get(token["content"], token["content"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = (tiny / "tokenizer_config.json").read_text()
    for theirs, ours in RENAMED.items():
        settings = settings.replace(theirs, ours)
    (folder / "tokenizer_config.json").write_text(settings)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").symlink_to(tiny / "config.json")
    return folder
