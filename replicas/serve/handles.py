"""How one deployment calls another."""

from __future__ import annotations

from typing import Any


def over_grpc(handle: Any) -> Any:
    """`handle` with its calls over Serve's gRPC transport, whatever process created the handle.

    In Serve's other transport a stream is a streaming actor task. While its caller does not take items, Ray blocks inside the
    callee's event loop, so one stopped caller would stop the callee for all others (Ray 2.60,
    `TaskGeneratorBackpressureWaiter`). A handle keeps the default transport of the process that created it, which an
    environment variable sets; setting the transport here makes that variable irrelevant.
    """
    return handle.options(_by_reference=False)
