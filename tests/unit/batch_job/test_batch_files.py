"""Input, output and manifest: what is wrong is said before work starts, what is torn is repaired."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.batch_job.id_index import IdIndexBuilder
from raypp.batch_job.input_file import scan_input, stream_lines
from raypp.batch_job.manifest import Manifest
from raypp.batch_job.output_file import OutputFile
from raypp.errors import ConfigError, ResourceError


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=30))
def test_index_finds_what_a_dict_finds(ids: list[str | None]) -> None:
    builder = IdIndexBuilder()
    lines: dict[str, list[int]] = {}
    for line, custom_id in enumerate(ids):
        if custom_id is None:
            builder.add_blank()
        else:
            builder.add(custom_id)
            lines.setdefault(custom_id, []).append(line)
    index = builder.build()
    groups = sorted(numbers for numbers in lines.values() if len(numbers) > 1)
    assert index.duplicates(max_groups=100) == (len(groups), groups)
    assert index.num_ids == sum(map(len, lines.values()))
    assert index.is_blank.tolist() == [custom_id is None for custom_id in ids]
    wanted = [*lines, "never there"]
    found = index.find(wanted).tolist()
    assert found[-1] == -1
    assert all(line == lines[custom_id][0] for line, custom_id in zip(found, lines, strict=False))


def test_lines_are_streamed_without_blanks_and_bom(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"custom_id": "a"}\r\n\n  \n{"custom_id": "\xc3\xa9"}')
    scanned = scan_input(path)
    assert (scanned.num_lines, scanned.ids.num_ids, scanned.num_bytes) == (4, 2, path.stat().st_size)
    lines = list(stream_lines(path, scanned.ids.is_blank))
    assert [(line.index, line.custom_id) for line in lines] == [(0, "a"), (3, "\u00e9")]
    done = scanned.ids.is_blank.copy()
    done[0] = True
    assert [line.custom_id for line in stream_lines(path, done)] == ["\u00e9"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"custom_id": "a"}\n{"custom_id"\n',
            ["1 line of the input cannot be answered: it is no JSON", "line 2: not JSON"],
        ),
        ("[]\n", ["line 1: not a JSON object"]),
        ('{"custom_id": 7}\n{"custom_id": ""}\n{}\n', ["3 lines of the input", "line 1: no usable custom_id, 7"]),
        ('{"custom_id": "a"}\n{"custom_id": "a"}\n', ["1 custom_id of the input is not unique", "'a' on lines 1, 2"]),
        ("", ["the input has no lines"]),
        ("\n\n", ["the input has no lines"]),
        (
            "".join(f'{{"custom_id": "{name}"}}\n' for name in "abacabd"),
            ["2 custom_ids", "'a' on lines 1, 3, 5", "'b' on lines 2, 6", "no line was run"],
        ),
    ],
)
def test_inputs_that_cannot_be_answered_line_by_line(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        scan_input(path)
    for word in words:
        assert word in str(caught.value)


def test_an_input_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        scan_input(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        scan_input(tmp_path)


def test_an_input_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "a"}\n')
    scanned = scan_input(path)
    path.write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n')
    with pytest.raises(ConfigError, match="grew"):
        list(stream_lines(path, scanned.ids.is_blank))


def index_of(*ids: str) -> IdIndexBuilder:
    builder = IdIndexBuilder()
    for custom_id in ids:
        builder.add(custom_id)
    return builder


def locked(path: Path) -> OutputFile:
    output = OutputFile(path)
    asyncio.run(output.lock())
    return output


@pytest.mark.parametrize("torn", [b"", b'{"custom_id": "c"}', b'{"custom', b"\0" * 100, b"garbage\n"])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    whole = b'{"custom_id": "b"}\n{"custom_id": "a"}\n'
    path.write_bytes(whole + torn)
    output = locked(path)
    assert output.repair(index_of("a", "b", "c").build()).tolist() == [True, True, False]
    assert path.read_bytes() == whole
    output.append(b'{"custom_id": "c"}')
    output.sync()
    output.close()
    assert path.read_bytes() == whole + b'{"custom_id": "c"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"custom_id": "x"}\n', "'x' is not in the input"),
        (b'{"custom_id": "a"}\n{"custom_id": "a"}\n', "'a' is there twice"),
        (b'garbage\n{"custom_id": "a"}\n', "line 1 is no line of an output"),
    ],
)
def test_an_output_of_someone_else_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    output = locked(path)
    with pytest.raises(ConfigError, match=words):
        output.repair(index_of("a", "b").build())
    output.close()
    assert path.read_bytes() == content


def test_an_output_has_one_writer(tmp_path: Path) -> None:
    first = locked(tmp_path / "out.jsonl")
    second = OutputFile(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="another process is writing"):
        asyncio.run(second.lock(timeout_s=0))
    first.close()
    asyncio.run(second.lock(timeout_s=0))
    second.close()
    with pytest.raises(ConfigError, match="cannot be written"):
        OutputFile(tmp_path / "no" / "out.jsonl")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    output = locked(path)
    output.append(b'{"custom_id": "a"}')
    write = os.write

    def write_a_little(fd: int, data: memoryview) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:5])

    monkeypatch.setattr(os, "write", write_a_little)
    with pytest.raises(ResourceError, match="No space left"):
        output.append(b'{"custom_id": "b"}')
    output.close()
    assert path.read_bytes() == b'{"custom_id": "a"}\n'


def test_a_disk_that_does_not_even_let_go_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = locked(tmp_path / "out.jsonl")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(ResourceError, match="No space left"):
        output.append(b'{"custom_id": "b"}')
    with pytest.raises(ResourceError, match="No space left"):
        output.clear()
    output.close()


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null"])
def test_an_output_that_cannot_be_gone_on_with_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"no regular file; got: {path}"):
        OutputFile(Path(path))


def test_many_lines_of_output_are_found_again(tmp_path: Path) -> None:
    ids = [f"id-{i}" for i in range(20_000)]
    path = tmp_path / "out.jsonl"
    path.write_text("".join(f'{{"custom_id": "{custom_id}"}}\n' for custom_id in reversed(ids[5:])))
    output = locked(path)
    done = output.repair(index_of(*ids).build())
    output.close()
    assert np.flatnonzero(~done).tolist() == [0, 1, 2, 3, 4]


def test_manifest_round_trip(tmp_path: Path) -> None:
    manifest = Manifest("ab", 3, 1, {"model": "tiny", "default stop": ["x"]})
    path = tmp_path / "job.json"
    assert Manifest.read(path) is None
    manifest.write(path)
    assert json.loads(path.read_text())["num_requests"] == 1
    earlier = Manifest.read(path)
    assert earlier is not None
    manifest.check_same_job(earlier, path)
    assert [p.name for p in tmp_path.iterdir()] == ["job.json"]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Manifest.read(path)
