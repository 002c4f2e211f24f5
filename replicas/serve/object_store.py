"""Ray's object store behind the protocol of `kvcache.transfer.object_store`."""

from __future__ import annotations

import json
from typing import Any

import ray


class RayObjectStore:
    """Ray's store, for messages between replicas without a faster transport. Owns the refs of the objects put here.

    A ref that is pickled outside of Ray's calls pins its object until the process ends. So a ticket holds the parts of a ref
    (id, owner, status), and the object lives exactly as long as the ref kept here.
    """

    errors: tuple[type[Exception], ...] = (ray.exceptions.RayError,)

    def __init__(self) -> None:
        """Raises RuntimeError if this version of Ray lacks the methods that serialize refs."""
        self.name = str(ray.get_runtime_context().gcs_address)
        self._core: Any = ray._private.worker.global_worker.core_worker
        for method in ("serialize_object_ref", "deserialize_and_register_object_ref"):
            if not hasattr(self._core, method):
                raise RuntimeError(f"this version of Ray has no CoreWorker.{method}; install the pinned requirements.txt")
        self._refs: dict[str, Any] = {}  # ticket -> ref that keeps the object

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
        """Drops the ref; Ray frees the memory within a second, or together with a hundred other objects."""
        self._refs.pop(ticket, None)


def object_store_transport(device: Any) -> Any:
    """The transport over Ray's store for KV on `device`. Works only in a process that Ray started."""
    from kvcache.transfer.object_store import ObjectStoreTransport

    return ObjectStoreTransport(RayObjectStore(), device)
