"""Ray's object store as the store of `kvcache.transfer.object_store`."""

from __future__ import annotations

import json
from typing import Any

import ray


class RayObjectStore:
    """Ray's own store, for messages between replicas that have no faster way.

    A ref that is pickled outside of Ray's calls pins its object until the process ends. So a ticket holds what a ref is made
    of, and the object lives exactly as long as the ref here.
    """

    errors: tuple[type[Exception], ...] = (ray.exceptions.RayError,)

    def __init__(self) -> None:
        """Raises RuntimeError with a Ray that makes its refs otherwise."""
        self.name = str(ray.get_runtime_context().gcs_address)
        self._core: Any = ray._private.worker.global_worker.core_worker
        for method in ("serialize_object_ref", "deserialize_and_register_object_ref"):
            if not hasattr(self._core, method):
                raise RuntimeError(f"this version of Ray has no CoreWorker.{method}; install the pinned requirements.txt")
        self._refs: dict[str, Any] = {}  # ticket -> what keeps the object

    def put(self, data: Any) -> str:
        ref = ray.put(data)
        _, owner, status = self._core.serialize_object_ref(ref)
        ticket = json.dumps([part.hex() for part in (ref.binary(), owner, status)])
        self._refs[ticket] = ref
        return ticket

    def get(self, ticket: str, deadline_s: float) -> Any:
        binary, owner, status = (bytes.fromhex(part) for part in json.loads(ticket))
        ref = ray.ObjectRef(binary, owner)
        self._core.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
        return ray.get(ref, timeout=deadline_s)

    def free(self, ticket: str) -> None:
        """Ray gives the memory back within a second, or with a hundred others."""
        self._refs.pop(ticket, None)


def object_store_transport(device: Any) -> Any:
    """The transport over Ray's store, of KV on `device`. In a process of Ray's."""
    from kvcache.transfer.object_store import ObjectStoreTransport

    return ObjectStoreTransport(RayObjectStore(), device)
