"""Scores to rankings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trio_pool_serve.api.fields.field_values import require_least
from trio_pool_serve.api.fields.ranking import ranked
from trio_pool_serve.errors import InvalidRequestError

pytestmark = pytest.mark.unit

some_scores = hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(-3, 3, width=16).map(round))


@given(some_scores)
def test_the_best_come_first_and_equal_ones_keep_their_order(scores):
    assert ranked(scores) == sorted(enumerate(scores.tolist()), key=lambda pair: -pair[1])


@given(some_scores, st.integers(0, 30))
def test_the_best_few_are_the_head_of_all_and_no_number_is_all(scores, top_n):
    assert ranked(scores, top_n) == ranked(scores)[: top_n or None]


@pytest.mark.parametrize(("top", "least"), [(0, 1), (-1, 1), (-1, 0)])
def test_fewer_than_the_least_are_refused(top, least):
    with pytest.raises(InvalidRequestError) as raised:
        require_least(top, least=least, param="top_k")
    assert raised.value.param == "top_k"
    require_least(least, least=least)
    require_least(None, least=least)
