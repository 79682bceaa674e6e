"""`import raypp` gives every public name, and costs nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import raypp
from raypp import errors


def test_all_is_complete_and_every_name_is_there() -> None:
    error_classes = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.RayppError)}
    promised = {
        *("LLM", "AsyncLLM", "EngineConfig", "SamplingParams", "RequestOutput", "CompletionOutput", "RequestMetrics"),
        *("Logprob", "BeamSearchParams", "BeamSearchOutput"),
        *("bubble_fraction", "__version__"),
        *error_classes,
    }
    assert set(raypp.__all__) == promised
    assert promised <= set(dir(raypp))
    for name in raypp.__all__:
        value = getattr(raypp, name)
        assert getattr(value, "__name__", name) == name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(raypp, "LLMM")


def test_version_is_that_of_the_package() -> None:
    assert raypp.__version__ == metadata.version("raypp")


def test_a_folder_that_is_not_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_found)
    assert raypp._installed_version() == "0+unknown"


def test_importing_costs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, raypp; heavy = {'ray', 'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy;"
        "raypp.LLM, raypp.AsyncLLM, raypp.EngineConfig, raypp.SamplingParams, raypp.bubble_fraction;"
        "import raypp.cli.main; heavy = {'ray', 'torch', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
