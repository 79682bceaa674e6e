"""What a step costs beyond the model, read from a trace."""

from step_overhead import host_us, per_token, within

from raypp.tracing import DRIVER_LANE, FORWARD, HOST, Lane, TraceEvent

MS = 1_000_000


def _lane(index, num_steps):
    """A step takes 10 ms; stage 0 computes 3 of them, stage 1 then 4; each host works for 0.1 ms."""
    events = []
    for step in range(num_steps):
        start = step * 10 * MS + index * 3 * MS
        events.append(TraceEvent(FORWARD, step, start, start + (3 + index) * MS))
        events.append(TraceEvent(HOST, step, start, start + MS // 10))
    return Lane(f"stage {index}", events)


def test_what_is_not_computed_is_overhead():
    figures = per_token([_lane(0, 40), _lane(1, 40)], num_steps=30)
    assert figures == {
        "per_token_ms": 10.0,
        "forward_ms": 7.0,
        "overhead_ms": 3.0,
        "overhead_p99_ms": 3.0,
        "num_steps": 29,
    }


def test_the_hosts_time_is_that_of_the_last_steps():
    slow = Lane("stage 0", [TraceEvent(HOST, -1, 0, 90 * MS), *_lane(0, 30).events])
    assert host_us([slow], num_steps=30) == [{"median_us": 100.0, "p99_us": 100.0}]


def test_stages_within_a_stretch_of_time():
    lanes = within([Lane(DRIVER_LANE, []), _lane(0, 10)], 20 * MS, 35 * MS)
    assert [(event.name, event.step_id) for lane in lanes for event in lane.events] == [
        (FORWARD, 2),
        (HOST, 2),
        (FORWARD, 3),
        (HOST, 3),
    ]
