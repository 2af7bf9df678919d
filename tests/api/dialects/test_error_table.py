"""docs/errors-by-dialect.md, and the requests in the files beside this one show what a server responds."""

import re

import pytest

from tests.api.dialects.error_table import EVERY_TASK, PAGE, enums_of, page, wrong_requests, wrong_values
from tests.api.dialects.recorded_requests import ANSWERED_REQUESTS, REFUSED_REQUESTS, asker, recorded
from trio_pool_serve.api.dialects import DIALECTS

WRITTEN_BY = "it is written by: python -m tests.api.dialects.error_table"


def test_wrong_requests_are_of_every_dialect_and_each_is_refused():
    headings, sections = zip(*wrong_requests(), strict=True)
    requests = [line for lines in sections for line in lines]
    assert len(set(requests)) == len(requests) >= 60
    statuses = re.findall(r"^\| `[A-Z]+ /.*?` \| (\d+) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert len(statuses) == len(requests)
    assert min(map(int, statuses)) >= 400
    assert {dialect.name for dialect in DIALECTS} <= {name for heading in headings for name in heading.split(", ")}


@pytest.mark.parametrize("path", [REFUSED_REQUESTS, ANSWERED_REQUESTS], ids=lambda path: path.stem)
async def test_recorded_requests_get_the_response_of_their_file_and_leave_nothing_behind(
    scripted_folder, chat_folder, path
):
    assert await recorded(path, scripted_folder, chat_folder) == path.read_text(), WRITTEN_BY


async def test_the_page_is_what_a_server_responds_and_no_value_is_accepted_that_a_field_does_not_have(scripted_folder):
    async with asker(scripted_folder, EVERY_TASK) as asking:
        assert await page(asking) == PAGE.read_text(), WRITTEN_BY
        wrong = await wrong_values(asking)
    assert len(wrong) == sum(len(enums_of(endpoint)) for dialect in DIALECTS for endpoint in dialect.endpoints) > 40
    for name, status, message, _ in wrong:
        assert status in (400, 422)
        assert message.startswith(name)
        assert message.endswith(", not 'other'.")
