"""The Ray actor of one encoder. It holds an `EncoderWorker` and has no logic of its own.

Ray makes it again when it dies; then the group calls `load` and `join` again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from raypp.actors.processes import ActorProcess, collector_paused, live_with, local_device
from raypp.models.registry import resolve_model_path

if TYPE_CHECKING:
    from raypp.encoder.delivery import Parcel
    from raypp.encoder.protocol import EncoderSpec, ItemFault, SupportsEncoderCudaGraph
    from raypp.encoder.worker import Way
    from raypp.models.config import ModelConfig
    from raypp.prompt_items import EncoderItem


class EncoderActor:
    """Hosts one encoder. Called in this order: `load`, `join`; then `deliver` and the others, also side by side.

    It is made without arguments: Ray may have lost them by the time that it makes it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def process(self) -> ActorProcess:
        """Return this process."""
        return ActorProcess.of_this_process()

    @ray.method(max_task_retries=-1)  # it waits for a process that is just being made, as often as Ray makes one
    def load(
        self, owner: ActorProcess, spec: EncoderSpec, config: ModelConfig, model: tuple[str, str | None] | None
    ) -> ActorProcess:
        """Load the model and capture its graphs; return this process, which from now on ends with its owner's.

        Args:
            owner: The driver.
            spec: What the encoder is to be.
            config: The whole model's.
            model: Its name and revision, if files lie elsewhere on this node than where the plan was made.

        Raises:
            ModelLoadError, ResourceError: it cannot be read, or does not fit.
        """
        process = live_with(owner)
        with collector_paused():
            import torch

            from raypp.encoder.build_encoder import build_manager
            from raypp.encoder.worker import EncoderWorker
            from raypp.stage.build_stage import configure_torch

        spec = replace(spec, device=local_device(spec.device))
        if model is not None:
            spec = replace(spec, model_path=str(resolve_model_path(*model)))
        self._spec = spec
        configure_torch(spec.num_threads, spec.device)
        self._device = torch.device(spec.device)
        manager = build_manager(_build_model(spec, config), spec)
        self._worker = EncoderWorker(manager, spec.cache_bytes, self._device)
        return process

    def join(self, first_stage: Sequence[Any]) -> None:
        """Find the ways to the first stage: to the actors of its members."""
        from raypp.encoder.delivery import ItemSender
        from raypp.transport.ipc.cuda_device import CudaDevice
        from raypp.transport.link_choice import StagePlace

        spec = self._spec
        place = StagePlace.here(self._device)
        handles = ray.get([each.open_items.remote(spec.encoder_index, place, spec.link_bytes) for each in first_stage])
        self._ways: list[Way] = []
        for member, handle in zip(first_stage, handles, strict=True):
            device = None if handle is None else CudaDevice(self._device)
            sender = ItemSender(self._device, device, handle or b"", spec.link_bytes)
            self._ways.append((sender, partial(self._put, member)))

    def live(self) -> None:
        """Never return: the call ends with the process, so its caller notices at once."""
        threading.Event().wait()

    def deliver(self, items: Sequence[EncoderItem]) -> tuple[list[ItemFault], dict[str, Any]]:
        """Encode items and bring them to the first stage; return those that cannot be encoded, and the counters."""
        with self._lock:
            self._enter()
            return self._worker.deliver(items, self._ways), self.stats()

    def prepare(self, items: Sequence[EncoderItem]) -> None:
        """Encode items and keep what comes of them. `deliver` returns what cannot be encoded."""
        with self._lock:
            self._enter()
            self._worker.encode(items)

    def encode(self, items: Sequence[EncoderItem]) -> dict[bytes, Any]:
        """Return what the encoder makes of each item, by key: float32 [1 + L, N, H], or the error."""
        from raypp.errors import RayppError

        with self._lock:
            self._enter()
            encoded = self._worker.encode(items)
            return {
                key: result if isinstance(result, RayppError) else result.rows.float().cpu().numpy()
                for key, result in encoded.items()
            }

    def stats(self) -> dict[str, Any]:
        """Return counters and figures, as plain data."""
        writes = all(sender.writes_to_receiver for sender, _ in self._ways)
        return self._worker.stats() | {"writes_to_first_stage": writes}

    def _put(self, member: Any, parcel: Parcel) -> None:
        ray.get(member.put_items.remote(self._spec.encoder_index, parcel))

    def _enter(self) -> None:
        from raypp.stage.build_stage import enter_device

        enter_device(self._spec.device)


def _build_model(spec: EncoderSpec, config: ModelConfig) -> SupportsEncoderCudaGraph[Any]:
    import torch

    from raypp.models.registry import build_encoder
    from raypp.models.weights import open_weights

    dtype, device = getattr(torch, spec.dtype), torch.device(spec.device)
    source = open_weights(spec.load_format, spec.model_path, spec.seed, device)
    return build_encoder(config, dtype=dtype, device=device, source=source)
