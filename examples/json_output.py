"""Get JSON that follows a schema, given as a pydantic class. Every token is chosen among those that keep to it.

    python examples/json_output.py

The same over HTTP is `response_format`; regular expressions, choices and grammars: docs/structured_outputs.md.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from raypp import LLM, SamplingParams


class Person(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=20)]
    age: Annotated[int, Field(ge=0, le=150)]
    role: Literal["author", "reader"]


if __name__ == "__main__":
    params = SamplingParams(max_tokens=100, structured_outputs={"json_schema": Person})
    with LLM("tiny", num_stages=2) as llm:
        for output in llm.generate(["The author as JSON: ", "A reader as JSON: "], params):
            person = Person.model_validate_json(output.outputs[0].text)
            print(f"{output.prompt!r} -> {person!r}")
