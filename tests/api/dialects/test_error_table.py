"""docs/errors-by-dialect.md shows what a server responds."""

from tests.api.dialects.error_table import PAGE, enums_of, page
from trio_pool_serve.api.dialects import DIALECTS


async def test_the_page_is_what_a_server_responds_and_no_value_is_accepted_that_a_field_does_not_have(scripted_folder):
    written = await page(scripted_folder)
    rows = written.partition("## Values")[2].splitlines()[5:]
    assert len(rows) == sum(len(enums_of(endpoint)) for dialect in DIALECTS for endpoint in dialect.endpoints) > 40
    assert [line for line in rows if not ("| 400 | Invalid enum" in line or "| 422 | Invalid enum" in line)] == []
    assert PAGE.read_text() == written, "it is written by: python -m tests.api.dialects.error_table"
