"""What of Ray's processes and of Ray's own reports reaches the terminal."""

from __future__ import annotations

import logging

import pytest

from raypp.actors import cluster
from raypp.config.env import is_log_line, log_to_stderr

_PAGE = (
    "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, "
    "check the logs for the dead worker. Lease ID: 04 Worker ID: a1 Node ID: 33 Worker IP address: 127.0.0.1 Worker "
    "port: 36157 Worker PID: 358 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file. Some common causes include: (1) the process was killed"
)


def test_rays_page_about_a_dead_worker_is_one_line() -> None:
    printed: list[list[str]] = []
    cluster._to_stderr(lambda data: printed.append(data["lines"]), {"lines": [_PAGE, "another"], "is_err": False})
    assert printed == [
        [
            "A worker died or was killed: pid 358, SYSTEM_ERROR: "
            "Worker unexpectedly exits with a connection error code 2.",
            "another",
        ]
    ]


def test_log_lines_of_raypp_alone_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("raypp", "serve_app"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    log_to_stderr()
    [handler] = logging.getLogger("serve_app").handlers
    line = handler.format(logging.LogRecord("serve_app.replica", logging.ERROR, "", 0, "dead", None, None))
    assert is_log_line(line)
    others = [":job_id:01000000", "INFO 2026-11-23 22:14:18,422 raypp_engine x -- GET /health 200 20.4ms"]
    cluster._print_log_lines({"lines": [others[0], line, others[1]], "is_err": True})
    assert capsys.readouterr().err.splitlines() == [line]
