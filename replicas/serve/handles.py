"""How one deployment calls another."""

from __future__ import annotations

from typing import Any


def over_grpc(handle: Any) -> Any:
    """`handle` with its calls over Serve's gRPC transport, wherever the handle was made.

    Over Serve's other transport a stream is a streaming actor task. While its caller does not take the items, Ray waits for it
    inside the callee's event loop, so that one stopped caller would stop the callee for all others (Ray 2.60,
    `TaskGeneratorBackpressureWaiter`). A handle takes the transport with it that was the default where it was made, which a
    variable of the environment decides; a wrong one there must not bring this back.
    """
    return handle.options(_by_reference=False)
