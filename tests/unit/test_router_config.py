from __future__ import annotations

from typing import Any

import pytest

from router.config import RouterConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "best"}, "policy must be one of scoring, least_loaded"),
        ({"orders": ("lifo",)}, "orders must be taken from fcfs, priority, fair, slo"),
        ({"orders": ("fair", "priority")}, "orders must be in the order priority, fair, slo, fcfs"),
        ({"orders": ("fair", "fair")}, "orders must be without repeats"),
        ({"dispatch_ahead": 0}, "dispatch_ahead must be at least 1, or null"),
        ({"aging_s": 0.0}, "aging_s must be above 0"),
        ({"max_wait_s": -1.0}, "max_wait_s must be above 0, or null"),
        ({"max_wait_s_by_priority": {1: 0.0}}, "max_wait_s_by_priority must be above 0"),
        ({"tenant_weights": {"a": 0.0}}, "tenant_weights must be above 0"),
        ({"fair_input_weight": -1.0}, "fair_input_weight must be at least 0"),
    ],
)
def test_config_bad_value_names_field_and_allowed_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(**fields)


def test_wait_limit_falls_back_to_the_general_one() -> None:
    config = RouterConfig(max_wait_s=30.0, max_wait_s_by_priority={2: 5.0})
    assert (config.wait_limit_s(0), config.wait_limit_s(2)) == (30.0, 5.0)
