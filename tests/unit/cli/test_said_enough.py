"""Mistakes of a new user: the error says what is wrong, and what to do about it."""

from __future__ import annotations

import shutil
from email.message import Message
from importlib import metadata, resources
from pathlib import Path

import pytest

from raypp.cli.main import main
from raypp.config.engine_config import EngineConfig
from raypp.config.names import check_sections
from raypp.errors import ConfigError, ModelLoadError, page
from raypp.models.registry import resolve_config_path, resolve_draft_head_path, resolve_model_path

TINY = Path(str(resources.files("raypp") / "assets/tiny"))
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3144\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of tiny."""
    return Path(shutil.copytree(TINY, tmp_path / "clone"))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_git_lfs_has_not_fetched(clone: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (clone / name).write_text(POINTER)
    for resolve in (resolve_model_path, resolve_config_path, resolve_draft_head_path):
        with pytest.raises(ModelLoadError, match=rf"only pointers of Git LFS.*{name}.*lfs pull"):
            resolve(str(clone))
    assert main(["info", str(clone)]) == 2
    assert "Git LFS" in capsys.readouterr().err


def test_gguf_files_are_called_by_their_name(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for model in (file, tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(ModelLoadError, match=r"reads no GGUF files.*\.gguf.*safetensors.*was made from"):
            resolve_model_path(str(model))


def test_a_model_beside_which_a_gguf_file_lies_is_one(clone: Path) -> None:
    (clone / "model.gguf").write_bytes(b"GGUF")
    assert resolve_model_path(str(clone)) == clone


@pytest.mark.parametrize(("given", "means"), [("half", "float16"), ("float", "float32")])
def test_types_of_other_names(given: str, means: str) -> None:
    assert EngineConfig.from_flat("tiny", dtype=given).model.dtype == means


def test_a_cache_in_fp8_of_its_full_name() -> None:
    assert EngineConfig.from_flat("tiny", kv_cache_dtype="fp8_e4m3").cache.kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        EngineConfig.from_flat("tiny", kv_cache_dtype="fp8_e5m2")  # which raypp does not have


def test_a_setting_is_named_by_its_option_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "tiny", "--speculative", "eagle3"]) == 2
    assert "speculative.model is --draft-model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["info", "tiny", "--speculative.model", "tiny-eagle3"])
    assert "speculative.model is --draft-model" in capsys.readouterr().err


def test_pages_are_on_the_site_that_the_package_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert page("configuration").startswith("docs/configuration.md")
    declared = Message()
    declared["Project-URL"] = "Source, https://example.org/source"
    declared["Project-URL"] = "Documentation, https://example.org/raypp/"
    monkeypatch.setattr(metadata, "metadata", lambda _: declared)
    assert page("configuration") == "https://example.org/raypp/configuration.html"
    with pytest.raises(ConfigError, match=r"https://example\.org/raypp/configuration\.html"):
        check_sections({"model": {"enable_lora": True}})


def test_no_error_names_a_page_that_an_installed_server_lacks() -> None:
    package = Path(str(resources.files("raypp")))
    files = [file for folder in (package, package.parent / "serve_app") for file in folder.rglob("*.py")]
    lines = [
        f"{file.name}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        if "docs/" in line and ".md" in line and any(word in line for word in ("hint=", "expected=", "got=", "_LOG"))
    ]
    assert lines == []
