"""Finds a model's directory by its name, and builds a range of its layers, or its vision tower."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from raypp.errors import ModelLoadError
from raypp.models.checkpoint_names import OWN_PREFIX, PICKLED_FILE, has_usual_form
from raypp.models.config import ModelConfig
from raypp.models.mistral_format import PARAMS_FILE

if TYPE_CHECKING:  # planning asks where a model is, and must not wait for torch
    import torch

    from raypp.members import Members
    from raypp.models.decoder import DecoderModel, HeadSupport
    from raypp.models.tower_parts import PatchTower
    from raypp.models.transformers_model import TransformersModel
    from raypp.models.vision_config import TowerKind
    from raypp.models.weights import WeightSource
    from raypp.ops.backend import KernelSet

EMBEDDED_MODELS = ("tiny", "tiny-vl")
"""Models that are part of the package."""

EMBEDDED_DRAFT_HEADS = ("tiny-eagle3",)
"""Draft heads that are part of the package."""

_EXPECTED = f"{', '.join(EMBEDDED_MODELS)}, a directory in Hugging Face layout, or an id such as Qwen/Qwen3-0.6B"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_EXPECTED_HEAD = f"{', '.join(EMBEDDED_DRAFT_HEADS)}, a directory with a head's checkpoint, or a Hugging Face id"
_CONFIG_PATTERNS = [
    "config.json",
    PARAMS_FILE,
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
]
_WEIGHTS = "*.safetensors"
_HUB_PATTERNS = ["*.json", _WEIGHTS, "*.jinja", "tokenizer*", "merges.txt", "vocab.txt", "*.py"]
_UNREAD = f"*/{_WEIGHTS}"
"""Weights in folders: the same once more, as their makers store them (gpt-oss)."""


def build_model(
    config: ModelConfig,
    *,
    start_layer: int,
    end_layer: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet | None = None,
    head_support: HeadSupport | None = None,
    path: Path | None = None,
    members: Members | None = None,
) -> DecoderModel | TransformersModel:
    """Return the layers [start_layer, end_layer) of a model, still without weights.

    Args:
        config: The whole model's.
        start_layer: First layer; with 0 comes the embedding.
        end_layer: One past the last layer; with `config.num_layers` come the final norm and the LM head.
        dtype: Of weights and activations.
        device: Where they are.
        kernels: What it computes with; None: what `choose_kernels` takes for one-token decode rows.
        head_support: What it does for a draft head; None: there is none.
        path: The directory of config.json, which transformers' modules are made of.
        members: Of the stage, if it has several; the configuration is that of one of them.
    """
    from raypp.models.decoder import DecoderModel
    from raypp.ops.device_kernels import choose_kernels

    if config.measured is not None:
        from raypp.models.transformers_model import TransformersModel

        assert path is not None
        return TransformersModel(
            config,
            path,
            start_layer=start_layer,
            end_layer=end_layer,
            dtype=dtype,
            device=device,
            kernels=kernels or choose_kernels(device, dtype),
            members=members,
        )
    return DecoderModel(
        config,
        start_layer=start_layer,
        end_layer=end_layer,
        dtype=dtype,
        device=device,
        kernels=kernels or choose_kernels(device, dtype),
        head_support=head_support,
        members=members,
    )


def build_encoder(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, source: WeightSource) -> PatchTower:
    """Return the vision tower of a model that has one, with its weights.

    Args:
        config: The whole model's.
        dtype: Of weights and activations; the stages' own.
        device: Where they are.
        source: The checkpoint, or random weights.

    Raises:
        ModelLoadError: a tensor is missing, has the wrong shape, or cannot be read.
    """
    from raypp.models.gemma3_tower import Gemma3VisionTower
    from raypp.models.gemma4_tower import Gemma4VisionTower
    from raypp.models.qwen3_vl import Qwen3VLVisionTower
    from raypp.models.vision_config import AUDIO_PREFIXES
    from raypp.models.weights import warn_of_unread

    assert config.vision is not None, f"{config.architecture} reads text alone"
    towers: dict[TowerKind, type[Qwen3VLVisionTower | Gemma3VisionTower | Gemma4VisionTower]] = {
        "qwen3_vl": Qwen3VLVisionTower,
        "gemma3": Gemma3VisionTower,
        "gemma4": Gemma4VisionTower,
    }
    tower = towers[config.vision.kind](config.vision, dtype, device, source)
    others = (config.weight_prefix, "lm_head.", *AUDIO_PREFIXES)
    warn_of_unread(source, "the vision tower", lambda name: not name.startswith(others))
    return tower


def resolve_model_path(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model: one of the embedded models, a directory, or a Hugging Face id.

    An id's files are downloaded to the Hugging Face cache, or found there: of two forms of a checkpoint one.

    Args:
        model: Its name.
        revision: Which version of an id: a branch, a tag or a commit; None: its main branch.

    Raises:
        ModelLoadError: it is none of these, cannot be downloaded, has no versions, or files without their content.
    """
    return _resolve(model, EMBEDDED_MODELS, _EXPECTED, _HUB_PATTERNS, revision)


def resolve_config_path(model: str, revision: str | None = None) -> Path:
    """Return a directory with a model's config.json, found as `resolve_model_path` finds the model.

    Of a Hugging Face id its configuration alone is downloaded, a few kilobytes, no weights.

    Raises:
        ModelLoadError: there is no such model, or its configuration cannot be downloaded.
    """
    try:
        return _resolve(model, EMBEDDED_MODELS, _EXPECTED, _CONFIG_PATTERNS, revision)
    except ModelLoadError as error:
        if error.hint is not None and "network" in error.hint:
            error.hint += "; or name a directory that holds the model's config.json: no weights are needed"
        raise


def resolve_draft_head_path(model: str) -> Path:
    """Return the directory of a draft head, found as `resolve_model_path` finds a model.

    Raises:
        ModelLoadError: it is none, or cannot be downloaded.
    """
    return _resolve(model, EMBEDDED_DRAFT_HEADS, _EXPECTED_HEAD, [*_HUB_PATTERNS, PICKLED_FILE])


def _resolve(
    model: str, embedded: Sequence[str], expected: str, patterns: list[str], revision: str | None = None
) -> Path:
    directory = Path(model).expanduser()
    if directory.suffix.lower() == ".gguf":
        raise _gguf_error(model)
    if model in embedded or (model and directory.is_dir()):
        if revision is not None:
            raise ModelLoadError(
                f"{model!r} has no revisions: it is not of the Hugging Face Hub",
                got=f"revision={revision!r}",
                expected="revision beside an id such as Qwen/Qwen3-0.6B",
                hint="leave revision out",
            )
        return _embedded_model(model) if model in embedded else _checked(directory)
    if not _HUB_ID.fullmatch(model) or directory.is_file():
        raise ModelLoadError(
            f"there is no model {model!r}",
            got="a file" if directory.is_file() else "no such directory, and no Hugging Face id",
            expected=expected,
        )
    try:
        return _checked(_download(model, expected, patterns, revision))
    except ModelLoadError as error:
        if nearest := difflib.get_close_matches(model, embedded, n=1, cutoff=0.5):
            raise ModelLoadError(
                f"there is no model {model!r}; did you mean {nearest[0]}?", expected=expected, hint=error.hint
            ) from error
        raise


def _checked(directory: Path) -> Path:
    """Return a directory that may hold a model.

    Raises:
        ModelLoadError: it holds another format, or files of which Git LFS has not fetched the content.
    """
    if not (directory / "config.json").is_file() and (found := sorted(directory.glob("*.gguf"))):
        raise _gguf_error(str(found[0]))
    files = sorted(file for file in directory.iterdir() if file.is_file())
    if pointers := [file.name for file in files if _is_lfs_pointer(file)]:
        raise ModelLoadError(
            f"{directory}: files of the model are not there, only pointers of Git LFS to them",
            got=", ".join(pointers),
            expected="the files themselves",
            hint=f"git lfs install && git -C {directory} lfs pull; or give the Hugging Face id, which is downloaded",
        )
    return directory


def _is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is a pointer (git-lfs, docs/spec.md): of at most 1024 bytes, with the version first."""
    with file.open("rb") as opened:
        return file.stat().st_size <= 1024 and opened.read(len(_LFS_POINTER)) == _LFS_POINTER


def _gguf_error(name: str) -> ModelLoadError:
    return ModelLoadError(
        "raypp reads no GGUF files",
        got=name,
        expected="weights in safetensors files, beside config.json and tokenizer.json",
        hint="take the model that the GGUF file was made from: its page on the Hugging Face Hub names it",
    )


def _embedded_model(model: str) -> Path:
    directory = Path(str(resources.files("raypp") / "assets" / model))
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"the embedded model {model!r} is not in this installation of raypp",
            got=f"no {directory / 'config.json'}",
            hint="install raypp again",
        )
    return directory


def _download(model_id: str, expected: str, patterns: list[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    download = partial(snapshot_download, model_id, revision=revision, allow_patterns=patterns)
    try:
        directory = Path(download(ignore_patterns=[_UNREAD, f"{OWN_PREFIX}*"]))  # a repository may hold both forms
        if _WEIGHTS in patterns and not has_usual_form(directory):
            directory = Path(download())
        return directory
    except (OSError, HFValidationError) as error:  # the hub's own errors are OSErrors
        raise ModelLoadError(
            f"there is no directory {model_id!r}, and the Hugging Face model of that id cannot be downloaded"
            + (f" in revision {revision!r}" if revision else ""),
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no further word'}",
            expected=expected,
            hint="check the spelling, the network, HF_HUB_OFFLINE, and for gated models HF_TOKEN",
        ) from error
