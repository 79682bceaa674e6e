"""The Ray actor of one pipeline stage. It holds a `Stage` and has no logic of its own."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ray import cloudpickle

from raypp.actors.deadline import Deadline
from raypp.actors.node_share import NodeShare
from raypp.actors.processes import ActorProcess, collector_paused, live_with, local_device
from raypp.config.env import log_to_stderr
from raypp.errors import name_process
from raypp.models.registry import resolve_draft_head_path, resolve_model_path
from raypp.plan.hardware import Hardware
from raypp.stage.failure import name_failure
from raypp.tracing import TraceEvent, Tracer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raypp.encoder.delivery import Parcel
    from raypp.models.config import ModelConfig
    from raypp.stage.build_stage import StageFactory
    from raypp.stage.stage import Stage
    from raypp.stage.stage_model import StageModel
    from raypp.stage.stage_spec import StageSpec
    from raypp.stage.step_sizes import StageGraphs, StepSizes
    from raypp.step_channel import StageChannel
    from raypp.transport.link_choice import StagePlace
    from raypp.transport.open import StageMembers
    from raypp.transport.rendezvous import Rendezvous, RendezvousServer


_MODULES = ("raypp.stage.build_stage", "raypp.stage.loop", "raypp.encoder.delivery", "raypp.transport.ipc.cuda_device")
_MODULES_FOR_GPUS = ("raypp.ops.cuda.cuda_kernels", "raypp.ops.cuda.kernel_token_choice", "flashinfer")


class StageActor:
    """Hosts one stage. `run` is endless; the other methods answer beside it.

    Called in this order: `process`, `prepare`, `connect`, `pad_to`, `run`. After `stand_by` it begins anew, and keeps
    its weights.
    """

    def __init__(
        self, spec: StageSpec, config: ModelConfig, factory: bytes | None, share: NodeShare | None = None
    ) -> None:
        log_to_stderr()
        if share is not None and share.num_stages is not None:
            spec = replace(spec, num_threads=Hardware.of_this_machine().threads_per_stage(share.num_stages))
        self._share = share
        self._spec = replace(spec, device=local_device(spec.device))
        self._name = name_process(spec.process_index, spec.num_members)[0]
        self._config = config
        with collector_paused():
            self._factory: StageFactory | None = None if factory is None else cloudpickle.loads(factory)
        self._rendezvous: RendezvousServer | None = None
        self._process: ActorProcess | None = None
        self._model: StageModel | None = None
        self._members: StageMembers | None = None
        self._connected: tuple[Stage, StageChannel] | None = None  # until it is closed
        self._has_failed = False  # by itself, or in the middle of something
        self._is_leaving = threading.Event()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._closing = threading.Lock()
        self._tracer = Tracer(f"stage {spec.stage_index}", enabled=spec.trace)
        # While the driver's process starts, and other stages' do.
        threading.Thread(target=_begin_imports, args=(self._spec.device,), name="imports", daemon=True).start()

    def process(self, owner: ActorProcess) -> ActorProcess:
        """Return this process, which from now on ends with its owner's."""
        if self._process is None:
            self._process = live_with(owner)
        return self._process

    def prepare(self, own_host: str) -> Rendezvous | None:
        """Load the model, once; return, on the first of several processes, where they all meet."""
        if self._share is not None:
            self._share.check_versions(self._name, own_host)
        with collector_paused():
            import torch

            from raypp.stage import build_stage
            from raypp.transport.open import make_members
            from raypp.transport.rendezvous import RendezvousServer

        if self._share is not None and self._factory is None and self._model is None:
            self._spec = replace(
                self._spec, model_path=str(resolve_model_path(self._share.model, self._share.revision))
            )
            self._share.check_files(self._name, own_host, Path(self._spec.model_path))
            if self._spec.draft_head is not None and self._spec.is_last:
                of_head = self._spec.draft_head.model
                path = self._spec.model_path if of_head is None else str(resolve_draft_head_path(of_head))
                self._spec = replace(self._spec, draft_head=replace(self._spec.draft_head, path=path))
        build_stage.configure_torch(self._spec.num_threads, self._spec.device)
        if self._model is None:
            spec = self._spec
            self._members = make_members(spec.stage_index, spec.rank, spec.num_members, torch.device(spec.device))
            with self._working():
                self._model = build_stage.build_stage_model(spec, self._config, self._factory, self._members)
        if self._spec.is_first and self._spec.rank == 0 and self._spec.num_stages * self._spec.num_members > 1:
            self._rendezvous = RendezvousServer(own_host)
            return self._rendezvous.address
        return None

    def connect(
        self,
        timeout_s: float,
        *,
        own_host: str,
        rendezvous: Rendezvous | None,
        plan_address: str,
        result_address: str,
        server_key: bytes | None,
    ) -> StageGraphs:
        """Open the links to the neighbours and the step channel to the driver; return what was recorded.

        Args:
            timeout_s: How long the stages may take to meet, and to reach the driver.
            own_host: Of this node, as the neighbours reach it.
            rendezvous: Where the stages meet; None for a single one.
            plan_address: Of the driver's step channel.
            result_address: Of the same.
            server_key: Of the same.
        """
        import torch

        from raypp.encoder.delivery import ItemReceiver
        from raypp.stage import build_stage
        from raypp.step_channel import StageChannel
        from raypp.transport.ipc.cuda_device import CudaDevice
        from raypp.transport.reach import check_reach

        assert self._model is not None
        deadline = Deadline(timeout_s)
        if self._share is not None and rendezvous is not None:
            check_reach(self._name, "the first stage", f"{rendezvous.host}:{rendezvous.port}", timeout_s)
            for address in (plan_address, result_address):
                check_reach(self._name, "the driver", address, timeout_s)
        build_stage.enter_device(self._spec.device)
        self._tracer = Tracer(f"stage {self._spec.stage_index}", enabled=self._spec.trace)
        self._is_leaving.clear()
        with self._working():
            stage = build_stage.build_stage(
                self._spec,
                self._config,
                self._model,
                self._tracer,
                rendezvous=rendezvous,
                own_host=own_host,
                open_timeout_s=timeout_s,
                members=self._members,
            )
            self._device = torch.device(self._spec.device)
            self._items_in = ItemReceiver(self._device, CudaDevice)
            if self._rendezvous is not None:
                self._rendezvous.close()
            channel = StageChannel(
                self._spec.process_index,
                plan_address,
                result_address,
                num_stages=self._spec.num_stages * self._spec.num_members,
                num_members=self._spec.num_members,
                server_key=server_key,
            )
            self._connected = stage, channel
            channel.await_driver(deadline.remaining_s)  # which soon removes the sockets' files
        return stage.graphs

    def pad_to(self, sizes: StepSizes) -> None:
        """Pad steps to these sizes, which all stages have."""
        self._stage.pad_to(sizes)

    def stand_by(self, timeout_s: float) -> bool:
        """End the loop and give up everything but the weights; return whether this stage can begin anew.

        Args:
            timeout_s: How long the loop, and what the device has to do, may take to end.
        """
        deadline = Deadline(timeout_s)
        self._is_leaving.set()
        if self._has_failed or self._model is None:
            return False
        if (connected := self._connected) is not None:
            connected[0].abort()  # it may wait for a neighbour that is gone
        if not self._is_idle.wait(deadline.remaining_s) or self._has_failed:
            return False
        self._disconnect()
        connected = None
        gc.unfreeze()
        gc.collect()
        return self._spec.device == "cpu" or self._is_device_free(deadline)

    def run(self, heartbeat_s: float, silence_timeout_s: float) -> None:
        """Execute plans until the driver says stop, or this stage is to stand by."""
        from raypp.stage.loop import run_stage_loop

        with self._closing:
            if self._connected is None or self._is_leaving.is_set():
                return  # it stands by: that was a driver that is gone
            stage, channel = self._connected
            self._is_idle.clear()
        has_last_words = False
        try:
            run_stage_loop(
                stage,
                channel,
                process_index=self._spec.process_index,
                num_members=self._spec.num_members,
                heartbeat_s=heartbeat_s,
                silence_timeout_s=silence_timeout_s,
                forwards=self._tracer.forwards,
                is_leaving=self._is_leaving,
            )
        except Exception as error:
            self._has_failed = name_failure(self._spec.process_index, self._spec.num_members, error)[1]
            has_last_words = not self._is_leaving.is_set()
            raise
        finally:
            del stage, channel
            self._disconnect(delivers=has_last_words)
            self._is_idle.set()

    def open_items(self, encoder_index: int, place: StagePlace, num_bytes: int) -> bytes | None:
        """Return the handle of memory that an encoder can write embeddings into; None when it cannot reach any.

        First stage only, once it is connected; so are the following.
        """
        from raypp.transport.link_choice import StagePlace, ipc_obstacle

        asked = self._spec.transport
        if asked not in ("auto", "ipc", "local") or ipc_obstacle(place, StagePlace.here(self._device)) is not None:
            return None
        return self._items_in.open(encoder_index, num_bytes)

    def put_items(self, encoder_index: int, parcel: Parcel) -> None:
        """Take in embeddings that an encoder brings."""
        for item in self._items_in.take_in(encoder_index, parcel):
            self._stage.items.put(item)

    def drop_items(self, keys: Sequence[bytes]) -> None:
        """Let go of embeddings."""
        for key in keys:
            self._stage.items.drop(key)

    def trace(self) -> list[TraceEvent]:
        """Return what this stage did when."""
        return self._tracer.events()

    @property
    def _stage(self) -> Stage:
        assert self._connected is not None, "the stage is not connected"
        return self._connected[0]

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count as failed unless all of it is done: half of it may leave anything behind."""
        self._has_failed = True
        yield
        self._has_failed = False

    def _disconnect(self, *, delivers: bool = False) -> None:
        with self._closing:
            connected, self._connected = self._connected, None
            if connected is not None:
                stage, channel = connected
                channel.close(delivers=delivers)
                stage.close()

    def _is_device_free(self, deadline: Deadline) -> bool:
        """Return whether the GPU has nothing to do any more for this stage; what it held is free then."""
        import torch

        from raypp.stage import build_stage
        from raypp.transport.ipc.cuda_device import CudaDevice

        build_stage.enter_device(self._spec.device)
        if not CudaDevice(self._device).drain(deadline.remaining_s):
            return False
        torch.cuda.empty_cache()
        return True


def _begin_imports(device: str) -> None:
    """Import what a stage needs, and wake its GPU: a second or two. What fails here, `prepare` says again."""
    with suppress(Exception), collector_paused():
        for name in _MODULES:
            import_module(name)
        if device != "cpu":
            import_module("raypp.stage.build_stage").enter_device(device)
            for name in _MODULES_FOR_GPUS:
                import_module(name)
