"""docs/errors-by-dialect.md, and the requests in the files beside this one show what a server responds."""

import pytest

from tests.api.dialects.error_table import EVERY_TASK, PAGE, WRONG_REQUESTS, answered, enums_of, page, wrong_values
from tests.api.dialects.recorded_requests import ANSWERED_REQUESTS, REFUSED_REQUESTS, asker, recorded, sections
from trio_pool_serve.api.dialects import DIALECTS

WRITTEN_BY = "it is written by: python -m tests.api.dialects.error_table"


async def test_wrong_requests_get_the_status_and_the_message_of_the_table(scripted_folder):
    async with asker(scripted_folder, EVERY_TASK) as asking:
        assert await answered(asking) == WRONG_REQUESTS.read_text(), WRITTEN_BY
    requests = [line for _, rows in sections(WRONG_REQUESTS) for line, _ in rows]
    assert len(set(requests)) == len(requests) >= 60
    assert all(int(answer[:3]) >= 400 for _, rows in sections(WRONG_REQUESTS) for _, answer in rows)
    assert {dialect.name for dialect in DIALECTS} <= {
        name for heading, _ in sections(WRONG_REQUESTS) for name in heading.split(", ")
    }


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
