"""What counts of a generation_config.json, and what is left out with a warning."""

from __future__ import annotations

import json

import pytest

from raypp.errors import ModelLoadError
from raypp.models.generation_config import read_sampling_defaults


def test_what_makers_recommend_by_our_names(tmp_path, caplog):
    assert read_sampling_defaults(tmp_path) == {}
    values = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "max_new_tokens": 2048,
        "do_sample": True,
        "eos_token_id": [1, 2],
        "transformers_version": "4.51.0",
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert read_sampling_defaults(tmp_path) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
    }
    assert not caplog.records


def test_values_that_cannot_be_are_left_out_with_a_warning(tmp_path, caplog):
    values = {"temperature": -1, "top_p": 0, "top_k": -1, "min_p": None, "max_new_tokens": "many"}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert read_sampling_defaults(tmp_path) == {"top_k": 0}
    said = [record.getMessage() for record in caplog.records]
    assert [message.split(": ")[1] for message in said] == [
        "temperature is ignored; got",
        "top_p is ignored; got",
        "max_new_tokens is ignored; got",
    ]
    assert "got: -1; expected: a number from 0 to 1e30" in said[0]


def test_a_file_that_is_no_object(tmp_path):
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json is not a JSON object"):
        read_sampling_defaults(tmp_path)
