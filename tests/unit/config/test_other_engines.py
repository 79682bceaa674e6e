"""Every name of another engine leads to a setting that raypp has, or to words."""

from __future__ import annotations

from dataclasses import fields

import pytest

from raypp.config.names import SECTION_OF_SETTING, unknown_name
from raypp.config.options import VARIABLES
from raypp.config.other_engines import (
    OF_LLAMA_CPP,
    OF_OTHER_ENGINES,
    OF_SGLANG,
    OF_VLLM,
    SHORT_OF_OTHER_ENGINES,
)
from raypp.sampling_params import SamplingParams

KEYS = {setting.key for setting in VARIABLES.values()}
OPTIONS = {setting.option[2:].replace("-", "_") for setting in VARIABLES.values()}


@pytest.mark.parametrize("name", OF_OTHER_ENGINES)
def test_what_there_is_in_place_of_it_exists(name: str) -> None:
    own = OF_OTHER_ENGINES[name]
    assert own.setting in KEYS or (own.setting is None and own.about)
    assert name not in OPTIONS, "raypp has it itself"
    said = str(unknown_name("setting", name, dict.fromkeys(SECTION_OF_SETTING, "")))
    assert "did you mean" not in said
    assert own.about in said
    assert own.setting is None or own.setting.partition(".")[2] in said


def test_each_name_is_in_one_table() -> None:
    assert len(OF_OTHER_ENGINES) == len(OF_VLLM) + len(OF_SGLANG) + len(OF_LLAMA_CPP)
    of_requests = {field.name for field in fields(SamplingParams)}
    assert set(SHORT_OF_OTHER_ENGINES.values()) <= OF_OTHER_ENGINES.keys() | of_requests
