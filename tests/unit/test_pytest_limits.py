"""A test that hangs, is busy for ever or ends its process fails, and all others are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAIT_S = 150.0  # each of five tests takes its limit

FILES = {
    "test_waits.py": """
        import threading

        def test_before(): pass
        def test_waits_for_ever(): threading.Event().wait()
        def test_after(): pass
    """,
    "test_works.py": """
        def test_works_for_ever():
            while True:
                pass

        def test_after(): pass
    """,
    "test_deaf.py": """
        import signal, time

        def test_before(): pass

        def test_takes_no_signals():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGPROF})
            time.sleep(1000)

        def test_after(): pass
    """,
    "test_ends.py": """
        import os, pytest

        @pytest.fixture
        def ends_its_process(): os._exit(1)

        def test_before(): pass
        def test_with_a_fixture(ends_its_process): pass
        def test_after(): pass
    """,
    "test_swallows.py": """
        import threading

        def test_swallows_errors():
            try:
                threading.Event().wait()
            except Exception:
                pass
    """,
}
FAILED = {
    "test_waits.py::test_waits_for_ever": r"Failed: no end within 3\.6 seconds, the limit",
    "test_works.py::test_works_for_ever": r"Failed: no end within (1\.8 seconds of .*|3\.6 seconds), the limit",
    "test_deaf.py::test_takes_no_signals": r"worker 'gw\d' crashed",
    "test_ends.py::test_with_a_fixture": r"worker 'gw\d' crashed",
    "test_swallows.py::test_swallows_errors": r"Failed: no end within 3\.6 seconds, the limit",
}


def run(folder: Path, *arguments: str) -> str:
    """Return what pytest prints of tests in a folder of their own, with a limit of 4 s."""
    (folder / "pytest.ini").write_text("[pytest]\nfaulthandler_timeout = 4\nfaulthandler_exit_on_timeout = true\n")
    plugins = [part for name in ("xdist", "pytest_limits", "no:cacheprovider") for part in ("-p", name)]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COLUMNS"))}
    # All other plugins that are installed would be imported in each worker. CI: lines are not cut off.
    environment = {**own, "PYTHONPATH": str(ROOT / "tools"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": "true"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("num_more_files", [pytest.param(0, marks=pytest.mark.full), 6])
def test_the_run_goes_on_and_names_what_failed(tmp_path: Path, num_more_files: int) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(re.sub(r"^        ", "", text, flags=re.MULTILINE))
    for index in range(num_more_files):
        (tmp_path / f"test_z{index}.py").write_text("def test_more(): pass\n")
    said = run(tmp_path, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert f"5 failed, {7 + num_more_files} passed" in said, said
    for name, why in FAILED.items():
        assert re.search(rf"^FAILED {name} - {why}", said, re.MULTILINE), said


def test_a_worker_that_has_ended_loses_its_work_to_others(tmp_path: Path) -> None:
    """Its end is not known yet when a test of it is reported as done and new work is sent: here it ends before that."""
    (tmp_path / "conftest.py").write_text(
        "from xdist.workermanage import WorkerController\n"
        "send = WorkerController.send_runtest_some\n"
        "def send_to_one_that_ended(self, indices):\n"
        "    self.num_sent = getattr(self, 'num_sent', 0) + 1\n"
        "    if self.num_sent == 2 and self.gateway.id == 'gw0':\n"
        "        self.gateway._io.kill()\n"
        "        self.gateway._io.wait()\n"
        "        raise OSError('cannot send (already closed?)')\n"
        "    send(self, indices)\n"
        "WorkerController.send_runtest_some = send_to_one_that_ended\n"
    )
    for index in range(6):
        (tmp_path / f"test_z{index}.py").write_text("def test_more(): pass\n")
    said = run(tmp_path, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert "1 failed, 5 passed" in said, said
    assert re.search(r"worker 'gw0' crashed", said), said


def test_processor_time_is_that_of_its_own_process(tmp_path: Path) -> None:
    text = "import threading\ndef test_works():\n    while True: pass\ndef test_after(): pass\n"
    (tmp_path / "test_one.py").write_text(text)
    said = run(
        tmp_path, "-o", "faulthandler_timeout=8", "-o", "faulthandler_exit_on_timeout=false", "-k", "after or works"
    )
    assert "1 failed, 1 passed" in said
    assert "no end within" in said


def test_one_worker_runs_folders_that_share_one_and_its_successor_the_rest(tmp_path: Path) -> None:
    note = 'Path("{0}.worker").write_text(os.environ["PYTEST_XDIST_WORKER"] + " " + str(os.nice(0)))'
    test = f"def test_{{0}}(): {note}\n"
    head = "import os, time\nfrom pathlib import Path\n"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    # The other worker begins its last test when it has been told that there is no more: it takes no rest.
    ends = "def test_ends():\n    while not Path('z3.worker').exists(): time.sleep(0.01)\n    os._exit(1)\n"
    (tmp_path / "a/test_a.py").write_text(head + test.format("first") + ends + test.format("rest"))
    (tmp_path / "b/test_b.py").write_text(head + test.format("shared") + test.format("shared_too"))
    for index in range(4):
        (tmp_path / f"test_z{index}.py").write_text(head + test.format(f"z{index}"))
    said = run(tmp_path, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-o", "one_process=a b")
    assert "1 failed, 8 passed" in said, said
    assert re.search(r"^FAILED a/test_a.py::test_ends - worker 'gw\d' crashed", said, re.MULTILINE), said
    notes = {path.stem: path.read_text().split() for path in tmp_path.glob("*.worker")}
    workers = {name: worker for name, (worker, _) in notes.items()}
    own = os.nice(0)
    for name, (_, niceness) in notes.items():  # others give way
        assert int(niceness) == (max(10, own) if name.startswith("z") else own), notes
    assert workers["first"] != workers["rest"] == workers["shared"] == workers["shared_too"]
