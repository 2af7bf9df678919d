"""Each view of the console, used in a browser by mouse and by keyboard, and what it shows held against the API."""

import csv
import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from tests.console.conftest import HOSTILE, HOSTILE_NAME
from tests.console.pictures import VIEWS, fill, open_view, run
from tests.lanes import sampled
from tests.server.server_process import ROOT

FORMS = {view: fields for view, fields in VIEWS.items() if view != "live"} | {
    "late-interaction": {"Query": "can a task", "Document": "a task is here", "Model": "colbert"}
}
"""By tab: what is filled in; short texts, as the tiny models have few tokens."""


def post(url: str, path: str, **body: Any) -> Any:
    return httpx.post(f"{url}{path}", json=body, timeout=60).raise_for_status().json()


@pytest.fixture
def page(visit, server_url) -> Page:
    return visit(server_url)


def done(page: Page, view: str, fields: Mapping[str, str]) -> Page:
    """Fill in the form of a view, send it, and wait for the result."""
    open_view(page, view)
    fill(page, fields)
    run(page)
    return page


def exported(page: Page, kind: str) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name=kind, exact=True).click()
    return Path(download.value.path()).read_text()


@sampled("scheme", ["light", "dark"], keep=["light"])
@sampled("view", VIEWS, keep=["live", "similarity"])
def test_every_view_is_accessible_in_both_themes(visit, server_url, view, scheme):
    page = visit(server_url, color_scheme=scheme)
    open_view(page, view)
    if view == "live":
        expect(page.locator(".chart canvas")).to_have_count(13)
    else:
        fill(page, FORMS[view])
        run(page)
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    serious = [each for each in found.response["violations"] if each["impact"] in ("serious", "critical")]
    assert not serious, json.dumps(serious, indent=1)[:4000]


def tab_to(page: Page, control: Locator, key: str = "Tab") -> None:
    """Press a key until a control has the focus."""
    for _ in range(40):
        page.keyboard.press(key)
        if control.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError("the control cannot be reached")


def test_every_view_is_used_by_keyboard_alone(visit, server_url):
    page = visit(server_url)
    page.get_by_role("tab", name="Sparse").wait_for()
    tab_to(page, page.locator("#tab-live"))
    for view, fields in FORMS.items():
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{view}")).to_be_focused()
        for label in sorted(fields, key=["Model", "Query", "Document", "Text", "Texts, one per line"].index):
            control = page.get_by_label(label, exact=True).first
            tab_to(page, control)
            if label == "Model":
                page.keyboard.type(fields[label])  # as a list of choices is searched
                expect(control).to_have_value(fields[label])
            else:
                page.keyboard.press("Control+A")
                page.keyboard.type(fields[label])
        if not fields:
            tab_to(page, page.locator("main textarea").first)
        page.keyboard.press("Control+Enter")
        expect(page.locator("main form [role=status].readout")).to_contain_text("Done")
        tab_to(page, page.locator(f"#tab-{view}"), "Shift+Tab")
    page.keyboard.press("Home")
    expect(page.locator("#tab-live")).to_be_focused()


def cosines(vectors: np.ndarray) -> np.ndarray:
    return vectors @ vectors.T / np.outer(*[np.linalg.norm(vectors, axis=1)] * 2)


def test_the_heat_map_is_the_cosine_of_the_vectors(page, server_url):
    texts = ["How do I cancel a task?", "Cancel the scope.", "The soup needs salt."]
    done(page, "similarity", {"Texts, one per line": "\n".join(texts)})
    answer = post(server_url, "/v1/embeddings", model="minilm", input=texts)
    expected = cosines(np.array([each["embedding"] for each in answer["data"]]))
    (shown,) = json.loads(exported(page, "JSON"))["results"]
    assert np.abs(np.array(shown["cosine"]) - expected).max() <= 1e-5
    canvas = page.locator(".heat canvas")
    canvas.focus()
    for key, at in (("ArrowRight", (0, 0)), ("ArrowRight", (0, 1)), ("ArrowDown", (1, 1))):
        page.keyboard.press(key)
        assert abs(float(canvas.get_attribute("data-value")) - expected[at]) <= 1e-5
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + box["height"] / 6)
    expect(page.locator(".heat .readout")).to_contain_text(f"{texts[0]} × {texts[2]}")


@pytest.mark.slow
def test_two_models_are_compared_side_by_side(page):
    open_view(page, "similarity")
    page.get_by_role("group", name="Compare with").get_by_label("Model").select_option("clip")
    fill(page, {"Texts, one per line": "a task\nsoup"})
    run(page)
    expect(page.locator(".heat canvas")).to_have_count(2)
    assert [each["model"] for each in json.loads(exported(page, "JSON"))["results"]] == ["minilm", "clip"]


@pytest.mark.slow
def test_two_prompts_are_compared_side_by_side(page, server_url):
    texts = ["how to cancel", "a scope"]
    open_view(page, "similarity")
    first, second = (page.get_by_role("group", name=name, exact=True) for name in ("Model", "Compare with"))
    first.get_by_label("Prompt").select_option("query")
    second.get_by_label("Model").select_option("minilm")
    second.get_by_label("Prompt").select_option("document")
    fill(page, {"Texts, one per line": "\n".join(texts)})
    run(page)
    shown = json.loads(exported(page, "JSON"))["results"]
    assert [each["prompt"] for each in shown] == ["query", "document"]
    for each in shown:
        answer = post(server_url, "/v1/embeddings", model="minilm", input=texts, prompt_name=each["prompt"])
        expected = cosines(np.array([row["embedding"] for row in answer["data"]]))
        assert np.abs(np.array(each["cosine"]) - expected).max() <= 1e-5
    assert shown[0]["cosine"] != shown[1]["cosine"]


GIVE_FILE = """
(element, [kind, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], `${kind}.png`, { type: "image/png" }));
  const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
    : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
  element.dispatchEvent(event);
}
"""


@pytest.mark.slow
def test_images_that_are_chosen_dropped_and_pasted_are_compared_with_texts(page, tmp_path):
    file = tmp_path / "red.png"
    Image.new("RGB", (40, 40), "red").save(file)
    open_view(page, "similarity")
    page.get_by_role("group", name="Model", exact=True).get_by_label("Model").select_option("clip")
    page.get_by_label("Images", exact=True).set_input_files(str(file))
    expect(page.get_by_alt_text("red.png")).to_be_visible()
    for kind, place in (("drop", page.locator(".drop")), ("paste", page.get_by_label("Texts, one per line"))):
        place.evaluate(GIVE_FILE, [kind, [*file.read_bytes()]])
        expect(page.get_by_alt_text(f"{kind}.png")).to_be_visible()
    fill(page, {"Texts, one per line": "a task"})
    run(page)
    shown = json.loads(exported(page, "JSON"))
    assert shown["inputs"] == ["a task", "red.png", "drop.png", "paste.png"]
    cosine = np.array(shown["results"][0]["cosine"])
    assert cosine[1:, 1:] == pytest.approx(np.ones((3, 3)), abs=1e-5)  # the same image
    assert abs(cosine[0, 1]) < 0.99


TOO_MANY = {"Texts, one per line": "\n".join(map(str, range(65)))}


@pytest.mark.parametrize(
    ("view", "fields", "said", "expected"),
    [
        pytest.param("similarity", TOO_MANY, "There are 65 inputs; at most 64", "", marks=pytest.mark.slow),
        ("sparse", {"Text": "task " * 500}, "400: input has ", "status of 400"),
    ],
    ids=["by the page", "by the server"],
)
def test_a_request_that_is_refused_says_why(visit, server_url, view, fields, said, expected):
    page = visit(server_url, expected=expected)
    open_view(page, view)
    fill(page, fields)
    page.locator("main form button.primary").click()
    expect(page.locator("main form [role=status].readout")).to_contain_text(said)


@pytest.mark.slow
def test_documents_move_to_where_the_api_ranks_them_also_by_a_link(visit, page, server_url):
    documents, query = ["Season the soup.", "Cancel the scope.", "A tram."], "How do I cancel <b>&</b> stop?"
    done(page, "rerank", {"Model": "minilm", "Query": query, "Documents, one per line": "\n".join(documents)})
    results = post(server_url, "/v1/rerank", model="minilm", query=query, documents=documents)["results"]
    ranked = [documents[each["index"]] for each in results]
    rows = list(csv.DictReader(exported(page, "CSV").splitlines()))
    assert [(row["document"], int(row["was"])) for row in rows] == [
        (text, each["index"] + 1) for text, each in zip(ranked, results, strict=True)
    ]
    assert "tab=rerank" in page.url
    for shown in (page, visit(server_url, page.url.removeprefix(server_url))):
        items = shown.get_by_role("list", name="By relevance").locator("li")
        expect(items).to_have_count(3)
        assert [each.locator(".text").inner_text() for each in items.all()] == ranked
        expect(items.first.locator(".move")).to_contain_text("▲ 1")
        assert shown.get_by_label("Query", exact=True).input_value() == query


@pytest.mark.slow
def test_labels_have_the_api_s_probabilities(page, server_url):
    done(page, "classify", {"Model": "classifier", "Texts, one per line": "a task\nis here"})
    answer = post(server_url, "/classify", model="classifier", input=["a task", "is here"])
    shown = json.loads(exported(page, "JSON"))["results"]
    for result, each in zip(shown, answer["data"], strict=True):
        assert sorted(value for _, value in result["scores"]) == pytest.approx(sorted(each["probs"]), abs=1e-6)
        assert result["scores"][0][0] == each["label"]


@pytest.mark.slow
def test_tokens_are_marked_where_they_are_in_the_text(page):
    text = "É a 🙂 task is"
    done(page, "token classes", {"Model": "tagger", "Text": text})
    assert page.locator(".text-view").inner_text() == text
    tokens, units = json.loads(exported(page, "JSON"))["tokens"], text.encode("utf-16-le")
    for token in tokens:
        if not token["special"] and token["text"] != "[UNK]" and token["begin"] is not None:
            assert units[2 * token["begin"] : 2 * token["end"]].decode("utf-16-le") == token["text"]
    assert {token["label"] for token in tokens} <= {"O", "B-PER", "I-PER", "B-LOC", "I-LOC"}


@pytest.mark.slow
def test_the_picture_of_tokens_adds_up_to_the_api_s_score(page, server_url):
    shown = json.loads(exported(done(page, "late interaction", FORMS["late-interaction"]), "JSON"))
    answer = post(server_url, "/score", model="colbert", text_1="can a task", text_2="a task is here")
    assert shown["max_sim"] == pytest.approx(answer["data"][0]["score"], rel=1e-5)
    similarities = np.array(shown["similarities"])
    assert similarities.max(axis=1).sum() == pytest.approx(shown["max_sim"], rel=1e-6)
    best = page.locator("[data-best=true]")
    for number, point_at in ((2, Locator.hover), (0, Locator.focus)):
        point_at(page.locator("button.token").nth(number))
        expect(best).to_have_count(1)
        assert best.inner_text() == shown["document"][int(similarities[number].argmax())]["piece"].strip()


@pytest.mark.slow
def test_sparse_weights_are_those_of_the_api(page, server_url):
    shown = json.loads(exported(done(page, "sparse", {"Text": "the task is"}), "JSON"))
    asked = {"model": "splade", "task": "sparse_embed", "input": "the task is", "input_type": "document"}
    (answer,) = post(server_url, "/pooling", **asked)["data"]
    expected = {each["index"]: each["value"] for each in answer["data"]}
    assert {each["index"]: each["value"] for each in shown["weights"]} == pytest.approx(expected, abs=1e-5)
    assert page.locator(".text-view").inner_text() == "the task is"
    assert page.locator(".bars .bar").count() == min(40, len(expected))


def test_texts_labels_and_names_stay_texts(page):
    done(page, "classify", {"Model": HOSTILE_NAME, "Texts, one per line": HOSTILE})
    expect(page.locator(".text-view")).to_have_text(HOSTILE)
    expect(page.locator(".bar .name", has_text=HOSTILE)).to_have_count(1)
    assert page.evaluate("window.hacked") is None
    open_view(page, "live")
    expect(page.get_by_role("region", name="Models").get_by_text(HOSTILE_NAME)).to_be_visible()
    assert page.locator("body script").count() == 0


@pytest.mark.slow
def test_a_report_is_one_file_that_asks_for_nothing(page, browser, tmp_path):
    done(page, "similarity", {"Texts, one per line": f"a task\n{HOSTILE}"})
    file = tmp_path / "report.html"
    file.write_text(exported(page, "HTML"))
    requests: list[str] = []
    with browser.new_context(offline=True) as context:
        report = context.new_page()
        report.on("request", lambda request: requests.append(request.url))
        report.goto(file.as_uri())
        assert [url for url in requests if not url.startswith("data:")] == [file.as_uri()]
        assert report.evaluate("window.hacked") is None
        expect(report.locator("main")).to_contain_text(HOSTILE)
        assert report.locator("img").first.evaluate("image => image.naturalWidth") > 100


@pytest.mark.slow
def test_a_request_is_repeated_by_what_the_page_shows(page):
    done(
        page,
        "rerank",
        {"Model": "minilm", "Query": 'it\'s a "query"', "Documents, one per line": "a task\n$HOME `id` 🙂"},
    )
    for language in ("curl", "Python"):
        page.locator("summary", has_text=language).click()
    command, program = [each.inner_text() for each in page.locator("details pre").all()]
    by_curl = subprocess.run(["bash", "-c", f"exec {command} --silent"], check=True, capture_output=True).stdout
    assert json.loads(by_curl)["results"][0]["document"]["text"] in ("a task", "$HOME `id` 🙂")
    by_python = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "$HOME `id` 🙂" in by_python


def test_the_documentation_shows_every_view_in_both_themes():
    page = ROOT / "docs" / "console.md"
    for view, scheme in product(VIEWS, ("light", "dark")):
        name = f"pictures/console-{view}-{scheme}.png"
        assert name in page.read_text()
        assert (page.parent / name).is_file()


@pytest.mark.slow
def test_the_time_of_each_stage_is_shown(page):
    bars = done(page, "similarity", {}).locator(".waterfall .bar .name").all_inner_texts()
    assert bars[:2] == ["tokenise", "queue"]
    assert "forward pass" in bars


@pytest.mark.slow
def test_the_link_that_skips_to_the_content_keeps_the_view(page):
    open_view(page, "rerank")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    expect(page.locator("#tab-rerank")).to_have_attribute("aria-selected", "true")


@pytest.mark.slow
def test_a_spreadsheet_computes_no_text(page):
    done(page, "rerank", {"Model": "minilm", "Documents, one per line": "=1+1\n@SUM(A1)"})
    documents = [row["document"] for row in csv.DictReader(exported(page, "CSV").splitlines())]
    assert sorted(documents) == ["'=1+1", "'@SUM(A1)"]
