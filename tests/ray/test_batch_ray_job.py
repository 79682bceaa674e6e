"""A real Ray job: submitted, stopped, submitted again, complete."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from batch_jobs import DEADLINE_S, num_lines, texts_by_id, wait_for, write_prompts
from ray.job_submission import JobSubmissionClient
from sizes import IS_FULL, sized

pytestmark = pytest.mark.ray

NUM_LINES = sized(10, 50)
NUM_BEFORE_STOP = 5  # lines
POLL_S = 0.25  # Ray's dashboard answers each time, and takes the processor from what is waited for


@pytest.fixture(scope="module")
def dashboard(no_ray: None) -> Iterator[str]:
    """A local Ray that takes jobs; yields the address that they are submitted to.

    A job finds its cluster by a file that `ray start` writes. Without it, it would take any cluster of this machine.
    """
    folder = tempfile.mkdtemp(prefix="ray-")
    context = ray.init(
        _temp_dir=folder,
        address="local",
        num_cpus=2,
        include_dashboard=True,
        dashboard_port=0,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    try:
        (Path(folder) / "ray_current_cluster").write_text(context["gcs_address"])
        address = f"http://{context.dashboard_url}"
        # In vain while another Ray has its port, 52365.
        wait_for(lambda: _takes_jobs(address), "Ray's job agent", poll_s=POLL_S)
        yield address
    finally:  # else the tests of other modules would find this Ray
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _takes_jobs(address: str) -> bool:
    """Return whether the agent that runs jobs is there yet; it comes a while after Ray itself."""
    try:
        JobSubmissionClient(address).submit_job(entrypoint="true")
    except RuntimeError as error:
        if "No available agent" not in str(error):
            raise
        return False
    return True


class Jobs:
    """Ray jobs with an empty working directory."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self._client = JobSubmissionClient(address)
        self._folder = folder
        folder.mkdir()

    def type_submit(self, submission_id: str, *arguments: str) -> None:
        """Submit a batch job as a user types it: `ray job submit ...`, from an empty working directory."""
        ray_command = str(Path(sys.executable).parent / "ray")
        options = ["--address", self._address, "--no-wait", "--submission-id", submission_id, "--working-dir", "."]
        done = subprocess.run(
            [ray_command, "job", "submit", *options, "--", sys.executable, "-m", "raypp.batch", *arguments],
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def submit(self, submission_id: str, *arguments: str) -> None:
        """Submit a batch job as that command does, which would start a Python."""
        self._client.submit_job(
            entrypoint=shlex.join([sys.executable, "-m", "raypp.batch", *arguments]),
            submission_id=submission_id,
            runtime_env={"working_dir": str(self._folder)},
        )

    def stop(self, submission_id: str) -> None:
        """Stop a job: Ray sends it SIGTERM."""
        self._client.stop_job(submission_id)  # the command would take longer than the job

    def wait(self, submission_id: str, status: str) -> None:
        """Wait until a job has ended in the way that it should."""
        ended = wait_for(lambda: self.end_of(submission_id), f"the end of {submission_id}", poll_s=POLL_S)
        assert ended == status, self.logs(submission_id)

    def logs(self, submission_id: str) -> str:
        """Return what a job has printed."""
        return self._client.get_job_logs(submission_id)  # the command would start a Python

    def end_of(self, submission_id: str) -> str | None:
        """Return how a job ended; None while it runs."""
        # Not `ray job status`: that starts a Python each time.
        now = self._client.get_job_status(submission_id)
        return now.value if now.is_terminal() else None


def test_submitted_stopped_submitted_again(dashboard: str, tmp_path: Path) -> None:
    jobs = Jobs(dashboard, tmp_path / "work")
    output = tmp_path / "out.jsonl"
    write_prompts(tmp_path / "in.jsonl", [f"def f{i}(" for i in range(NUM_LINES)], max_tokens=40, ignore_eos=True)
    engine = ["tiny", "--num-stages", "2", "--temperature", "0", "--max-in-flight", "8"]
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]

    jobs.type_submit("first", *files, *engine)
    if not IS_FULL:
        jobs.wait("first", "SUCCEEDED")
        assert set(texts_by_id(output)) == {f"line-{i}" for i in range(NUM_LINES)}
        return
    wait_for(lambda: num_lines(output) >= NUM_BEFORE_STOP or jobs.end_of("first"), "some lines")
    assert jobs.end_of("first") is None, jobs.logs("first")
    jobs.stop("first")
    jobs.wait("first", "STOPPED")
    num_at_stop = num_lines(output)
    assert NUM_BEFORE_STOP <= num_at_stop < NUM_LINES
    assert "SIGTERM: stopping" in jobs.logs("first")

    jobs.submit("second", *files, *engine)
    jobs.wait("second", "SUCCEEDED")
    logs = jobs.logs("second")
    print(f"\nstopped at {num_at_stop} lines\n{logs}")
    assert f"{NUM_LINES} lines, {num_at_stop} of them answered by earlier runs" in logs
    assert set(texts_by_id(output)) == {f"line-{i}" for i in range(NUM_LINES)}


@pytest.mark.full
def test_a_relative_output_is_refused(dashboard: str, tmp_path: Path) -> None:
    jobs = Jobs(dashboard, tmp_path / "work")
    write_prompts(tmp_path / "in.jsonl", ["a"])
    jobs.submit("relative", "tiny", "--input", str(tmp_path / "in.jsonl"), "--output", "out.jsonl")
    jobs.wait("relative", "FAILED")
    assert "a relative output inside a Ray job" in jobs.logs("relative")
    assert os.listdir(tmp_path / "work") == []
