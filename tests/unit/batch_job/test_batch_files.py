"""Input, output and manifest: what is wrong is said before work starts, what is torn is repaired."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from contextlib import nullcontext
from hashlib import file_digest, sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypp.batch_job import input_file, line
from raypp.batch_job.input_file import IdIndex, bad_lines, digest_of, scan_input, stream_lines
from raypp.batch_job.output_file import Manifest, OutputFile
from raypp.errors import ConfigError, ResourceError


@given(st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=30))
def test_index_finds_what_a_dict_finds(ids: list[str | None]) -> None:
    first_lines: dict[str, int] = {}
    for number, custom_id in enumerate(ids):
        if custom_id is not None:
            first_lines.setdefault(custom_id, number)
    index = index_of(*ids)
    assert index.is_duplicate.tolist() == [i is not None and first_lines[i] != n for n, i in enumerate(ids)]
    assert index.find([*first_lines, "never there"]).tolist() == [*first_lines.values(), -1]


def test_lines_are_streamed_without_blanks_and_bom(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"custom_id": "a"}\r\n\n  \n{"custom_id": "\xc3\xa9"}')
    scanned = scan_input(path)
    assert (len(scanned.is_blank), scanned.num_requests, scanned.num_bytes) == (4, 2, path.stat().st_size)
    assert scanned.sha256 == sha256(path.read_bytes()).hexdigest()
    lines = list(stream_lines(scanned, scanned.is_blank))
    assert [(one.index, one.custom_id) for one in lines] == [(0, "a"), (3, "\u00e9")]
    done = scanned.is_blank.copy()
    done[0] = True
    assert [one.custom_id for one in stream_lines(scanned, done)] == ["\u00e9"]


@pytest.mark.parametrize(
    ("bad_line", "words"),
    [
        (b'{"custom_id"', "not valid JSON; got: EOF while parsing an object at column 12; expected"),
        (b'{"custom_id": "b"} {}', "not valid JSON"),
        (b'{"custom_id": "b", "prompt": "\xff"}', "not valid UTF-8; got: the byte 0xff at position 30"),
        (b'{"custom_id": "b", "prompt": NaN}', "not valid JSON"),
        (b"[]", "not a JSON object; got: []"),
        (b"{}", "no valid custom_id; got: None"),
        (b'{"custom_id": 7}', "no valid custom_id; got: 7"),
        (b'{"custom_id": ""}', "no valid custom_id"),
        (b'{"custom_id": "%s"}' % (b"b" * 513), "1 to 512 characters"),
        (b'{"custom_id": "good"}', "an earlier line has; got: 'good', as on line 1"),
        (b'{"custom_id": "b", "method": "GET", "body": {}}', "a method that no URL takes; got: 'GET'; expected: POST"),
        (b'{"custom_id": "b", "url": "/v1/embeddings", "body": {}}', "does not serve; got: '/v1/embeddings'"),
        (b'{"custom_id": "b", "url": [], "body": {}}', "does not serve; got: []"),
        (b'{"custom_id": "b", "url": "/v1/responses"}', "the body of the line is no object"),
        (b"[" * 100_000, "nesting of the line is too deep"),
    ],
)
def test_a_bad_line_is_known_before_anything_is_run(tmp_path: Path, bad_line: bytes, words: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"custom_id": "good"}\n\n' + bad_line + b'\n{"custom_id": "last"}')
    scanned = scan_input(path)
    assert scanned.num_requests == 3
    assert [one.index for one in stream_lines(scanned, scanned.is_blank)] == [0, 3]
    [(index, error)] = bad_lines(scanned, scanned.is_blank)
    assert index == 2
    assert words in str(error)
    assert error.custom_id == (
        "good" if b"good" in bad_line else "b" if b"body" in bad_line or b"url" in bad_line else None
    )
    scanned.is_bad[2] = False
    with pytest.raises(ConfigError, match="changed while it was read") if b"good" not in bad_line else nullcontext():
        list(stream_lines(scanned, scanned.is_blank))


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (line, input_file):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        start = b'{"custom_id": "long", "prompt": "'
        for num_bytes in (100, 101, 201, 202):
            file.write(start + b"x" * (num_bytes - len(start) - 2) + b'"}\n')
        file.write(b'{"custom_id": "last"}\n' + b"x" * 300)
    scanned = scan_input(path)
    assert scanned.is_bad.tolist() == [False, True, True, True, False, True]
    assert [one.custom_id for one in stream_lines(scanned, scanned.is_blank)] == ["long", "last"]
    assert ["too long" in str(error) for _, error in bad_lines(scanned, scanned.is_blank)] == [True] * 4
    with path.open("rb") as file:
        assert scanned.sha256 == file_digest(file, "sha256").hexdigest()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf\r\n"])
def test_an_input_of_no_lines(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="the input has no lines"):
        scan_input(path)


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
        list(stream_lines(scanned, scanned.is_blank))


def index_of(*ids: str | None) -> IdIndex:
    return IdIndex(b"".join(map(digest_of, ids)))


def repaired(output: OutputFile, *ids: str | None) -> list[bool]:
    """Return which lines of an input with these ids are answered in a file."""
    is_done = np.zeros(len(ids), np.bool_)
    assert output.repair(index_of(*ids), is_done) == is_done.sum()
    return is_done.tolist()


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
    assert repaired(output, "a", "b", "c") == [True, True, False]
    assert path.read_bytes() == whole
    output.append(b'{"custom_id": "c"}')
    output.sync()
    output.close()
    assert path.read_bytes() == whole + b'{"custom_id": "c"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"custom_id": "x"}\n', "'x' is not in the input"),
        (b'{"custom_id": "a"}\n{"custom_id": "a"}\n', "line 1, custom_id 'a', is there twice"),
        (b'{"custom_id": "a", "error": {"line": 3}}\n', "'a' is not on line 3"),
        (b'{"custom_id": "b", "error": {"line": 1}}\n', "'b' is not on line 1"),
        (b'{"custom_id": null, "error": {"line": 5}}\n', "None is not on line 5"),
        (b'{"custom_id": null, "error": {"line": 0}}\n', "None is not on line 0"),
        (b'{"custom_id": null, "error": {"line": 2}}\n{"custom_id": null, "error": {"line": 2}}\n', "line 2, .* twice"),
        (b'{"custom_id": null, "error": null}\n{"custom_id": "a"}\n', "line 1 is no line of an output"),
        (b'garbage\n{"custom_id": "a"}\n', "line 1 is no line of an output"),
    ],
)
def test_an_output_of_someone_else_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    output = locked(path)
    with pytest.raises(ConfigError, match=words):
        repaired(output, "a", None, "b", "b")
    output.close()
    assert path.read_bytes() == content


def test_errors_say_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "errors.jsonl"
    answers = [("a", 3), (None, 2), ("b", 4)]
    path.write_text("".join(json.dumps({"custom_id": i, "error": {"line": n}}) + "\n" for i, n in answers))
    output = locked(path)
    assert repaired(output, "a", None, "a", "b", "c") == [False, True, True, True, False]
    output.close()


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
    done = repaired(output, *ids)
    output.close()
    assert done == [False] * 5 + [True] * (len(ids) - 5)


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
