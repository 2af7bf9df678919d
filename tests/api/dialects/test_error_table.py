"""docs/errors-by-dialect.md, wrong_requests.txt and refused_requests.txt show what a server responds."""

from tests.api.dialects.error_table import (
    PAGE,
    REFUSED_REQUESTS,
    WRONG_REQUESTS,
    answered,
    asker,
    enums_of,
    page,
    refusals,
    sections,
    wrong_values,
)
from tests.api.scripted_models import Everything
from trio_pool_serve.api.dialects import DIALECTS

WRITTEN_BY = "it is written by: python -m tests.api.dialects.error_table"


async def test_wrong_requests_get_the_status_and_the_message_of_the_table(scripted_folder):
    async with asker(scripted_folder, Everything()) as asking:
        assert await answered(asking) == WRONG_REQUESTS.read_text(), WRITTEN_BY
    requests = [line for _, rows in sections() for line, _ in rows]
    assert len(set(requests)) == len(requests) >= 60
    assert all(int(answer[:3]) >= 400 for _, rows in sections() for _, answer in rows)
    assert {dialect.name for dialect in DIALECTS} <= {name for heading, _ in sections() for name in heading.split(", ")}


async def test_refused_requests_name_the_field_are_answered_before_they_are_computed_and_leave_nothing_behind(
    scripted_folder, chat_folder
):
    found = await refusals(scripted_folder, chat_folder)
    assert found == REFUSED_REQUESTS.read_text(), WRITTEN_BY
    assert found.count(", computed ") == 1


async def test_the_page_is_what_a_server_responds_and_no_value_is_accepted_that_a_field_does_not_have(scripted_folder):
    async with asker(scripted_folder, Everything()) as asking:
        assert await page(asking) == PAGE.read_text(), WRITTEN_BY
        wrong = await wrong_values(asking)
    assert len(wrong) == sum(len(enums_of(endpoint)) for dialect in DIALECTS for endpoint in dialect.endpoints) > 40
    for name, status, message, _ in wrong:
        assert status in (400, 422)
        assert message.startswith(name)
        assert message.endswith(", not 'other'.")
