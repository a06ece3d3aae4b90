"""The measures of error that users of ``attngrad.testing`` compare by."""

from __future__ import annotations

import numpy as np
import pytest

from attngrad.testing import relative_error, rms_error, rounding_bound

ERRORS = pytest.mark.parametrize("error", [relative_error, rms_error])
LSE = np.array([-np.inf, 1.0, 2.0])  # its first row sees no key


@ERRORS
def test_an_infinity_is_right_where_both_have_it_and_wrong_elsewhere(error):
    assert error(LSE, LSE) == 0.0
    assert error(LSE, np.array([0.0, 1.0, 2.0])) == error(np.array([0.0, 1.0, 2.0]), LSE) == error(LSE, -LSE) == np.inf
    assert 0.0 < error(LSE, LSE + np.array([0.0, 0.0, 0.5])) < np.inf


@ERRORS
def test_a_nan_is_wrong_and_another_shape_refused(error):
    assert error(LSE, LSE * np.nan) == error(LSE * np.nan, LSE) == np.inf
    with pytest.raises(ValueError, match="shapes differ"):
        error(LSE, LSE[:2])


def test_the_rounding_bound_goes_by_the_largest_finite_result():
    assert rounding_bound(LSE, LSE, eps=0.125) == 2.0
