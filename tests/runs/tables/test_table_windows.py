"""Where the windows of a table end depends on its rows alone."""

import pytest

from trio_pool_serve.bulk.table_task import TABLE_TASKS, TaskOptions
from trio_pool_serve.runs.tables.input_rows import InputRow
from trio_pool_serve.runs.tables.table_windows import (
    TOKEN_WINDOW_CHARACTERS,
    WINDOW_CHARACTERS,
    cut_windows,
    window_characters,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("task", TABLE_TASKS)
def test_a_window_with_a_vector_for_each_token_is_bounded_by_their_numbers(task):
    """However long its vectors are: 8192 tokens of English text, and the row by which it has them."""
    columns = TaskOptions(task=task, columns=("text",)).output_columns(384)
    rows = [InputRow(number, "", number, ("x" * 1000,)) for number in range(5000)]
    windows = [*cut_windows(rows, characters=window_characters(columns))]
    assert [row.number for window in windows for row in window.rows] == [*range(5000)]
    most = max(sum(len(row.values[0]) for row in window.rows) for window in windows)
    expected = TOKEN_WINDOW_CHARACTERS if task == "token-embed" else min(WINDOW_CHARACTERS, 2048 * 1000)
    assert expected <= most < expected + 1000
