"""guidance's model of vLLM: choices, patterns, JSON and rules, in one conversation. Run with the address of /v1."""

from __future__ import annotations

import re
import sys
from typing import Any, Literal

import guidance
from guidance import assistant, gen, select, system, user
from guidance import json as gen_json
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, Field


class Trip(BaseModel):
    """A trip."""

    title: str = Field(max_length=12)
    kind: Literal["walk", "ride"]
    stops: list[Literal["Wien", "Bern"]] = Field(max_length=2)


@guidance(stateless=True)  # type: ignore[untyped-decorator]
def total(lm: Any) -> Any:
    """A sum in brackets: a rule that has itself in it, as often as the model wants."""
    number = gen(regex="[1-9]", list_append=True, name="numbers")
    return lm + select([number, "(" + total() + "+" + number + ")"])


def turn(lm: Any, question: str, answer: Any) -> Any:
    """Ask, and let the model answer under a grammar; the conversation so far is sent along."""
    with user():
        lm += question
    with assistant():
        lm += answer
    return lm


def main(base_url: str) -> None:
    sampling = {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
    lm: Any = VLLMModel("tiny", sampling_params=sampling, base_url=base_url, api_key="none", echo=False)
    with system():
        lm += "You help."
    sky, city = select(["rain", "snow"], name="sky"), select(["Wien", "Bern"], name="city")
    lm = turn(lm, "How will the weather be?", "It will " + sky + " in " + city + ".")
    assert lm["sky"] in ("rain", "snow")
    assert lm["city"] in ("Wien", "Bern")
    lm = turn(lm, "For how many days?", gen(regex="[1-7] days?", name="days"))
    assert re.fullmatch("[1-7] days?", lm["days"]), lm["days"]
    lm = turn(lm, "Plan a trip.", gen_json(name="trip", schema=Trip))
    Trip.model_validate_json(lm["trip"])
    lm = turn(lm, "What does it cost?", total())
    assert lm["numbers"]
    assert all(number in "123456789" for number in lm["numbers"])
    lm = turn(lm, "Thanks.", gen(max_tokens=8, name="last"))
    assert isinstance(lm["last"], str)


if __name__ == "__main__":
    main(sys.argv[1])
