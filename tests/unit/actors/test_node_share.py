"""What a node has that differs from the owner's, and ports that cannot be reached: said by name."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from raypp.actors.node_share import NodeShare, files_of, versions_here
from raypp.errors import ConfigError, ModelLoadError, ResourceError
from raypp.models.registry import resolve_model_path
from raypp.transport.reach import check_reach


def _share(versions: dict[str, str] | None = None, files: dict[str, str] | None = None) -> NodeShare:
    return NodeShare("tiny", None, None, versions or {}, files or {})


def test_versions_of_one_node_are_equal_and_another_is_named() -> None:
    here = versions_here()
    assert {"raypp", "torch", "transformers"} <= set(here)
    _share({**here, "flashinfer-python": "0.1"} if "flashinfer-python" not in here else here).check_versions("it", "a")
    with pytest.raises(ConfigError, match=r"the node of stage 1, node-b, has other versions.*torch: .* 0\.1 there"):
        _share({**here, "torch": "0.1"}).check_versions("stage 1", "node-b")


def test_a_file_of_equal_size_that_differs_in_one_byte_is_named(tmp_path: Path) -> None:
    shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    share = _share(files=files_of(resolve_model_path("tiny")))
    share.check_files("stage 1", "node-b", tmp_path / "model")
    [weights] = (tmp_path / "model").glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelLoadError, match=rf"the model of stage 1 on node-b .*{weights.name}: "):
        share.check_files("stage 1", "node-b", tmp_path / "model")
    weights.unlink()  # a node may hold only the files that its stage needs
    share.check_files("stage 1", "node-b", tmp_path / "model")


def test_a_port_that_nobody_listens_on_is_named_with_what_to_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        check_reach("stage 1", "the driver", f"tcp://127.0.0.1:{port}")
    with pytest.raises(ResourceError, match=rf"stage 1 cannot reach the driver; got: 127\.0\.0\.1:{port} .*open TCP"):
        check_reach("stage 1", "the driver", f"tcp://127.0.0.1:{port}")
