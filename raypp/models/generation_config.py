"""Reads the values for sampling that a model's makers recommend in its generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from raypp.errors import RequestError
from raypp.models.config_fields import read_json
from raypp.sampling_params import PARAMETERS, SamplingParams

GENERATION_CONFIG = "generation_config.json"
_LOG = logging.getLogger(__name__)
_PARAM_OF_FIELD = {parameter.recommended_as: name for name, parameter in PARAMETERS.items() if parameter.recommended_as}
"""The fields that count, those that count for vllm, and their names in `SamplingParams`."""


def read_sampling_defaults(path: Path) -> dict[str, Any]:
    """Return the sampling parameters in a model directory's generation_config.json, by their names in `SamplingParams`.

    A value that cannot be is left out, and a warning says so: it is a recommendation, and the model runs without it.

    Raises:
        ModelLoadError: the file is no JSON object.
    """
    file = path / GENERATION_CONFIG
    if not file.is_file():
        return {}
    defaults: dict[str, Any] = {}
    for field, value in read_json(file).items():
        name = _PARAM_OF_FIELD.get(field)
        if name is None or value is None:
            continue
        try:
            defaults[name] = getattr(SamplingParams(**{name: value}), name)
        except RequestError as error:
            _LOG.warning("%s: %s is ignored; got: %s; expected: %s", file, field, error.got, error.expected)
    return defaults
