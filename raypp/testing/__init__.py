"""Stand-ins that tests and measurements use in place of real parts; shipped, so that users can test with them too."""

from raypp.testing.fake_stage import FakeStage
from raypp.testing.local_engine import LocalEngine, LocalPipeline, build_local_pipeline, build_local_stages
from raypp.testing.threaded_engine import ThreadedEngine, launch_in_threads

__all__ = [
    "FakeStage",
    "LocalEngine",
    "LocalPipeline",
    "ThreadedEngine",
    "build_local_pipeline",
    "build_local_stages",
    "launch_in_threads",
]
