"""What the log says of speculation."""

from __future__ import annotations

import logging
from dataclasses import replace

from raypp.driver.engine_loop import DraftLog
from raypp.messages import BlockGroup
from raypp.scheduler.limits import SchedulerLimits
from raypp.scheduler.scheduler import Scheduler


def test_a_line_tells_what_became_of_the_drafts_since_the_last_one(caplog):
    limits = SchedulerLimits(
        num_stages=1,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=8,
        block_size=4,
        groups=(BlockGroup(4),),
        enable_prefix_caching=False,
        max_drafts=2,
    )
    none = Scheduler(limits).stats()
    some = replace(
        none,
        num_draft_tokens=20,
        num_accepted_tokens=10,
        num_verified_rows=10,
        drafted_by_position=[10, 10],
        accepted_by_position=[7, 3],
    )
    more = replace(
        some, num_draft_tokens=24, num_accepted_tokens=10, num_verified_rows=12, drafted_by_position=[12, 12]
    )
    with caplog.at_level(logging.INFO, logger="raypp"):
        log = DraftLog()
        for stats, now_s in ((none, 0.0), (some, 5.0), (some, 11.0), (more, 12.0), (more, 22.0), (more, 40.0)):
            log.note(stats, now_s)
    assert [record.getMessage() for record in caplog.records] == [
        "speculation: 20 drafts, 50 % accepted, 2.00 tokens per row and step; by position 0.70 0.30",
        "speculation: 4 drafts, 0 % accepted, 1.00 tokens per row and step; by position 0.00 0.00",
    ]
