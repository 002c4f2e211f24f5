from __future__ import annotations

import math

import pytest

from router.simulator.length_curve import LengthCurve


def test_curve_passes_through_its_quantiles_and_is_even_in_the_logarithm_between() -> None:
    curve = LengthCurve((0, 1), (0.5, 4), (1, 64))
    assert [curve.value(share) for share in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx([1, 2, 4, 16, 64])


def test_curve_mean_is_the_integral() -> None:
    # of 1 * 10^x over 0..1: 9 / ln 10; a flat half adds its own value
    assert LengthCurve((0, 1), (1, 10)).mean() == pytest.approx(9 / math.log(10))
    assert LengthCurve((0, 3), (0.5, 3), (1, 30)).mean() == pytest.approx(0.5 * 3 + 0.5 * 27 / math.log(10))


@pytest.mark.parametrize(
    "quantiles",
    [((0, 1),), ((0, 1), (0.9, 2)), ((0.1, 1), (1, 2)), ((0, 2), (1, 1)), ((0, 0), (1, 2)), ((0, 1), (0.5, 2), (0.5, 3), (1, 4))],
    ids=["one", "no maximum", "no minimum", "falling", "zero", "twice"],
)
def test_curve_of_bad_quantiles_is_refused(quantiles: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="quantiles must ascend from share 0 to share 1 with values above 0"):
        LengthCurve(*quantiles)
