"""The console and the page of the API's documentation on a phone, and which model a view begins with."""

import pytest
from playwright.sync_api import Page, expect

from tests.console.pictures import fill, open_view, run
from tests.console.test_views import FORMS, post

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
TEXTS = ["How do I cancel a task?", "Cancel the scope.", "The soup needs salt."]
MANY = "\n".join(f"This is the text with the number {number}." for number in range(20))
OVERFLOWS = "document.documentElement.scrollWidth > screen.width"
BESIDE_THE_SCREEN = """
() => [...document.querySelectorAll("header *, main button, main select, main input, main textarea, main li")]
  .filter((each) => each.offsetParent !== null)
  .filter((each) => each.getBoundingClientRect().right > screen.width || each.getBoundingClientRect().left < 0)
  .map((each) => each.outerHTML)
"""
"""What a finger has to reach, of what is drawn."""


@pytest.fixture
def phone(visit, server_url) -> Page:
    return visit(server_url, **PHONE)


@pytest.mark.parametrize("view", [pytest.param(view, marks=pytest.mark.slow) for view in FORMS])
def test_a_view_fits_on_a_phone(phone: Page, view: str):
    open_view(phone, view)
    fill(phone, FORMS[view])
    run(phone)
    assert not phone.evaluate(OVERFLOWS)
    assert phone.evaluate(BESIDE_THE_SCREEN) == []


@pytest.mark.slow
def test_ranked_documents_are_whole_on_a_phone(phone: Page):
    long = "A nursery waits for its child tasks, and cancels them if one of them fails or the deadline passes."
    open_view(phone, "rerank")
    fill(phone, {"Model": "minilm", "Query": TEXTS[0], "Documents, one per line": f"{TEXTS[2]}\n{long}"})
    run(phone)
    ranked = phone.get_by_role("list", name="By relevance").locator("li").first
    expect(ranked.locator(".text")).to_have_text(long)
    assert ranked.evaluate("row => [...row.children].every((each) => each.scrollWidth <= each.offsetWidth)")
    expect(phone.get_by_role("list", name="As given")).to_be_hidden()


def test_a_cell_of_the_heat_map_is_chosen_by_a_finger(phone: Page):
    open_view(phone, "similarity")
    fill(phone, {"Texts, one per line": MANY})
    run(phone)
    assert not phone.evaluate(OVERFLOWS)
    canvas = phone.locator(".heat canvas")
    box = canvas.bounding_box()
    assert box["height"] / 21 > 22  # pixels of a cell; a wider map scrolls in its box
    canvas.tap(position={"x": box["width"] - 12, "y": box["height"] - 12})
    expect(phone.locator(".heat .readout")).to_contain_text("number 19. × This is the text with the number 19.")


@pytest.mark.slow
def test_charts_without_data_are_collapsed_and_a_viewers_choice_stays(phone: Page, server_url: str):
    post(server_url, "/v1/embeddings", model="minilm", input=TEXTS)
    charts = {title: phone.locator(".charts details", has_text=title) for title in ("Tokens per second", "by reason")}
    tokens, refused = charts.values()
    expect(tokens).to_have_attribute("open", "")
    expect(refused.locator("summary")).to_contain_text("nothing to show")
    expect(refused).not_to_have_attribute("open", "")
    for chart in charts.values():
        chart.locator("summary").click()
    note = phone.locator("main > .hint").inner_text()
    expect(phone.locator("main > .hint")).not_to_have_text(note)  # there is another sample
    expect(refused.locator("canvas")).to_be_visible()
    expect(tokens.locator("canvas")).to_be_hidden()
    expect(phone.locator(".chart canvas")).to_have_count(13)
    assert not phone.evaluate(OVERFLOWS)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_of_the_documentation_fits_and_shows_one_example_of_each_dialect(visit, server_url, width):
    page = visit(server_url, "/docs", viewport={"width": width, "height": 844}, is_mobile=width == 390)
    route = page.locator(".opblock", has=page.locator("[data-path='/v1/embeddings']"))
    route.click()
    examples = route.locator("select", has=page.locator("option", has_text="openai"))
    expect(examples.locator("option")).to_have_text(["openai", "voyage", "jina"])
    assert not page.evaluate(OVERFLOWS)


@pytest.mark.slow
def test_a_view_begins_with_a_model_whose_main_task_it_is(visit, server_url):
    page = visit(server_url)
    for view, model in {
        "rerank": "reranker",
        "classify": "classifier",
        "token-classes": "tagger",
        "late-interaction": "colbert",
    }.items():
        open_view(page, view)
        expect(page.get_by_label("Model", exact=True)).to_have_value(model)
