"""Which calls of a step take how long: counted in steps of the stepping thread alone, and never twice."""

import json
import threading

import pytest
from host_calls import ELSE, RAN, STEP, StepTimes, read_calls
from step_overhead import spent

from raypp.tracing import now_ns


class Device:
    def copy(self):
        return self.wait()

    def wait(self):
        return "waited"


@pytest.fixture
def device(tmp_path):
    class Watched(Device):  # the patches are of its class
        pass

    times = StepTimes(tmp_path / "stage-0.jsonl")
    times.watch(Watched, "copy", "copies")
    times.watch(Watched, "wait", "waits")
    return Watched(), times


def test_calls_are_counted_by_kind_and_the_outer_one_alone(device, tmp_path):
    device, times = device

    def step(num_waits):
        other = threading.Thread(target=device.wait)
        other.start()
        other.join(10)
        assert device.copy() == "waited"
        return [device.wait() for _ in range(num_waits)]

    step = times.of_steps(step)
    device.wait()  # in no step
    begun_ns = now_ns()
    assert step(3) == ["waited"] * 3
    (kinds,) = read_calls(tmp_path, 1, (begun_ns, now_ns()), 10)
    assert {kind: of["calls"] for kind, of in kinds.items()} == {"copies": 1, "waits": 3, STEP: 0, RAN: 0, ELSE: 0}
    parts = sum(kinds[kind]["us"] for kind in ("copies", "waits", ELSE))
    assert kinds[STEP]["us"] == pytest.approx(parts)
    assert "1 copies" in spent(kinds)
    assert "3 waits" in spent(kinds)


def test_the_last_steps_of_a_stretch_count(device, tmp_path):
    device, times = device
    step = times.of_steps(lambda num_waits: [device.wait() for _ in range(num_waits)])
    moments = [now_ns()]
    for counts in ((9, 9), (1, 2, 2), (5,)):
        for count in counts:
            step(count)
        moments.append(now_ns())
    (kinds,) = read_calls(tmp_path, 1, (moments[1], moments[2]), 2)
    assert kinds["waits"]["calls"] == 2
    assert len((tmp_path / "stage-0.jsonl").read_text().splitlines()) == 6


def test_a_step_that_fails_is_written_down(device, tmp_path):
    _, times = device
    with pytest.raises(ZeroDivisionError):
        times.of_steps(lambda: 1 / 0)()
    assert json.loads((tmp_path / "stage-0.jsonl").read_text())["calls"] == {}
