"""Conversations and contents to token ids, as transformers' own tokenizers make them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import transformers
import trio

from tests.model_folders import write_json
from tests.rendering.chat.chat_folders import CHATML, HEADERS, PARTS, SPECIAL, TURNS, forget_template, write_chat_folder
from tests.rendering.scripted_images import ScriptedFormat, ScriptedLoader
from trio_pool_serve.errors import ContextLengthError, EmptyInputError, InvalidRequestError, MediaError
from trio_pool_serve.models.embedding import Embedding
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.renderer_loading import renderer_of
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.prompts import (
    ChatMessage,
    ChatPrompt,
    ContentPrompt,
    ImagePart,
    RenderingParams,
    TextPart,
    TextPrompt,
    TokensPrompt,
)
from trio_pool_serve.rendering.chat import template_sandbox
from trio_pool_serve.rendering.chat.chat_pair import ChatFormat
from trio_pool_serve.rendering.chat.chat_templates import ChatTemplates
from trio_pool_serve.rendering.chat.conversations import MAX_TEMPLATE_CHARACTERS
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.threads.offload import Offload

MAX_MODEL_LEN = 512
IMAGE = SPECIAL.index("<|image|>")
NO_SPECIAL = RenderingParams(add_special_tokens=False)


CONVERSER = Embedding(
    modules=(), conversation=ChatFormat(structured=True, options={"add_generation_prompt": True, "mood": "calm"})
)
"""Reads every input as a conversation, which is followed by the beginning of an answer."""


@asynccontextmanager
async def rendering(folder: Path, **given: Any) -> AsyncIterator[Renderer]:
    """A renderer as the service makes it; on the loop, where nothing has to be killed."""
    given = {"in_processes": False, "uses_chat_template": False} | given
    processes = WorkerProcesses(1, template_sandbox.prepare, in_processes=given.pop("in_processes"))
    offload = Offload()
    read = read_model_folder(folder)
    if given.pop("uses_chat_template"):
        read = attrs.evolve(read, spec=CONVERSER)
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        templates = ChatTemplates({"template": processes, "client_template": processes}, offload)
        yield renderer_of(read, load_tokenizer(read), offload, workers=1, templates=templates, **given)
        nursery.cancel_scope.cancel(reason="the test is over")


def says(*messages: tuple[str, str], **given: Any) -> ChatPrompt:
    said = tuple(ChatMessage(role, (TextPart(text),)) for role, text in messages)
    return ChatPrompt(messages=said, **given)


HELLO = says(("user", "Hello"))


async def refusal(
    renderer: Renderer, prompt: Any, told: str | None = None, params: RenderingParams = NO_SPECIAL, error: Any = None
) -> str:
    """Return the field of the error that rendering raises."""
    with pytest.raises(error or InvalidRequestError, match=told) as refused:
        await renderer.render(prompt, params)
    return getattr(refused.value, "field", "")


async def text_of(renderer: Renderer, prompt: Any, params: RenderingParams = NO_SPECIAL) -> str:
    rendered = await renderer.render(prompt, params)
    return await renderer.detokenize(rendered.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML, HEADERS, TURNS, PARTS], ids=["chatml", "headers", "turns", "parts"])
async def test_conversations_become_the_ids_that_transformers_makes(tmp_path, template):
    folder = write_chat_folder(tmp_path / "model", template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    said = (("user", "  Hello "), ("assistant", "Good day.\n"), ("user", "ünïcödé 🙂 <|im_end|>"))
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if template is PARTS else text}
        for role, text in said
    ]
    async with rendering(folder) as renderer:
        rendered = await renderer.render(says(*said), NO_SPECIAL)
        assert rendered.token_ids.tolist() == theirs.apply_chat_template(messages, return_dict=False)


async def test_a_template_may_be_a_file_of_its_own(tmp_path):
    folder = write_chat_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ 'mine' }}")
    async with rendering(folder) as renderer:
        assert await text_of(renderer, HELLO) == "mine"


async def test_one_of_several_templates_is_asked_for_by_name(tmp_path):
    named = [{"name": "default", "template": "{{ 'usual' }}"}, {"name": "rag", "template": "{{ 'with sources' }}"}]
    async with rendering(write_chat_folder(tmp_path / "model", named)) as renderer:
        assert await text_of(renderer, HELLO) == "usual"
        assert await text_of(renderer, says(("user", "Hello"), chat_template="rag")) == "with sources"
    async with rendering(write_chat_folder(tmp_path / "other", named[1:])) as renderer:
        await refusal(renderer, HELLO, "no default.* rag")


async def test_a_model_without_a_template_reads_no_messages(tmp_path):
    folder = write_chat_folder(tmp_path / "model")
    async with rendering(folder) as renderer:
        assert await refusal(renderer, HELLO, "no chat template") == "prompts"
        brought = attrs.evolve(HELLO, chat_template="{{ 1 }}")
        assert await refusal(renderer, brought, "--trust-request-chat-template") == "chat_template"
    async with rendering(folder, trusts_request_templates=True) as renderer:
        for brought, expected in (
            ("{{ bos_token }}{{ messages[0].content }}", "<s>Hello"),
            ("{{ messages[0].content[0].text }}", "Hello"),
        ):
            assert await text_of(renderer, attrs.evolve(HELLO, chat_template=brought)) == expected
        long = attrs.evolve(HELLO, chat_template="x" * (MAX_TEMPLATE_CHARACTERS + 1))
        await refusal(renderer, long, f"the limit is {MAX_TEMPLATE_CHARACTERS}")


@pytest.mark.parametrize(("form", "expected"), [("structured", "list"), ("flat", "string"), ("auto", "string")])
async def test_the_files_can_say_how_the_template_wants_texts(tmp_path, form, expected):
    kind = "{% if messages[0].content is string %}{{ 'string' }}{% else %}{{ 'list' }}{% endif %}"
    folder = write_chat_folder(tmp_path / "model", kind)
    states = {"method": "forward", "method_output_name": "last_hidden_state"}
    write_json(folder / "sentence_bert_config.json", {"modality_config": {"message": {"format": form, **states}}})
    async with rendering(folder) as renderer:
        assert await text_of(renderer, HELLO) == expected


async def test_a_conversation_is_cut_or_refused_as_a_text_is(tmp_path):
    folder = write_chat_folder(tmp_path / "model", "{{ messages[0].content }}")
    async with rendering(folder) as renderer:
        long = says(("user", "x" * 600))
        assert await refusal(renderer, long, "has 600 tokens", error=ContextLengthError) == "prompts"
        right = RenderingParams(add_special_tokens=False, truncate_to=3)
        assert await text_of(renderer, says(("user", "abcdef")), right) == "abc"
        left = attrs.evolve(right, truncation_side="left")
        assert await text_of(renderer, says(("user", "abcdef")), left) == "def"
        await refusal(renderer, says(("user", "")), "no tokens")
        await refusal(renderer, says(), error=EmptyInputError)
        most = renderer.conversations.max_characters
        await refusal(renderer, says(("user", "x" * (most + 1))), f"the limit is {most}", right)


async def test_texts_that_make_one_input_are_a_line_each(tmp_path):
    async with rendering(write_chat_folder(tmp_path / "model", CHATML)) as renderer:
        content = ContentPrompt((TextPart("one"), TextPart("two")))
        assert await text_of(renderer, content) == "one\ntwo"
        params = RenderingParams(add_special_tokens=False, instruction="query: ", max_text_tokens=5)
        assert await text_of(renderer, content, params) == "query: one\nt"


async def test_a_model_that_converses_reads_everything_as_a_user_s_message(tmp_path):
    template = CHATML + "{{ mood }}"
    async with rendering(write_chat_folder(tmp_path / "model", template), uses_chat_template=True) as renderer:
        asked = "<|im_start|>system\nFind it.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\ncalm"
        params = RenderingParams(instruction="Find it.")
        assert await text_of(renderer, TextPrompt("hello"), params) == asked.format("hello")
        content = ContentPrompt((TextPart("one"), TextPart("two")))
        assert await text_of(renderer, content, params) == asked.format("one\ntwo")
        cut = attrs.evolve(params, max_text_tokens=2)
        assert await text_of(renderer, TextPrompt("hello"), cut) == asked.format("he")
        # A conversation of the client's own begins an answer only if it says so.
        assert (await text_of(renderer, HELLO)).endswith("Hello<|im_end|>\ncalm")
        long = TextPrompt("x" * 600)
        assert await refusal(renderer, long, params=params, error=ContextLengthError) == "prompts"


def sees(*urls: str, text: str = "look") -> ChatPrompt:
    parts = (*map(ImagePart, urls), TextPart(text))
    return ChatPrompt(messages=(ChatMessage("user", parts),))


@pytest.fixture
def loader() -> ScriptedLoader:
    loader = ScriptedLoader()
    loader.gate.set()
    return loader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_chat_folder(tmp_path / "model", PARTS)


def reads_images(loader: ScriptedLoader, **format_: Any) -> dict[str, Any]:
    return {"media": loader, "image_format": ScriptedFormat(IMAGE, **format_)}


async def test_images_take_their_places_among_the_tokens_in_order(folder, loader):
    async with rendering(folder, **reads_images(loader)) as renderer:
        prompt = sees("tokens:3", "tokens:2")
        assert await text_of(renderer, prompt) == f"<|im_start|>user\n{'<|image|>' * 5}look<|im_end|>\n"
        images = (await renderer.render(prompt, NO_SPECIAL)).images
        assert images.tokens == (3, 2)
        assert images.arrays["pixel_values"].tolist() == [[3, 3], [2, 2]]
        content = ContentPrompt((ImagePart("tokens:1"), TextPart("look")))
        text = await text_of(renderer, content, RenderingParams(instruction="Find it."))
        assert text == "<|im_start|>system\nFind it.<|im_end|>\n<|im_start|>user\n<|image|>look<|im_end|>\n"


async def test_an_image_alone_is_read_by_itself_where_the_model_does_that(folder, loader):
    alone = ContentPrompt((ImagePart("tokens:4"),))
    async with rendering(folder, **reads_images(loader, alone_has_a_form=True)) as renderer:
        rendered = await renderer.render(alone, RenderingParams())
        assert rendered.token_ids.tolist() == [0] * 4
        assert rendered.images.tokens == (4,)
    async with rendering(folder, **reads_images(loader)) as renderer:
        assert (await text_of(renderer, alone)).startswith("<|im_start|>user\n<|image|><|image|>")
    forget_template(folder)
    async with rendering(folder, **reads_images(loader, alone_has_a_form=True)) as renderer:
        assert (await renderer.render(alone, RenderingParams())).images.tokens == (4,)
        both = ContentPrompt((ImagePart("tokens:4"), TextPart("look")))
        await refusal(renderer, both, "one text or one image", RenderingParams())


async def test_a_placeholder_without_an_image_is_refused_wherever_it_stands(folder, loader):
    """The model would take the image of another row of the batch for it."""
    written = "what is <|image|> here"
    async with rendering(folder, **reads_images(loader)) as renderer:
        for prompt in (TextPrompt(written), TokensPrompt(np.array([IMAGE])), says(("user", written))):
            await refusal(renderer, prompt, "1 places for 0 images")
        for text in (written, "hello " * MAX_MODEL_LEN + written):  # also in the last window of a long text
            texts = [(TextPrompt(each), NO_SPECIAL, True) for each in ("hello " * MAX_MODEL_LEN, text)]
            with pytest.raises(InvalidRequestError, match="1 places for 0 images"):
                await renderer.render_plain(texts)
        assert await renderer.render_plain(texts[:1])


async def test_what_is_too_long_with_its_images_is_refused_and_never_cut(folder, loader):
    async with rendering(folder, **reads_images(loader)) as renderer:
        short = len((await renderer.render(sees("tokens:1"), NO_SPECIAL)).token_ids)
        fits = await renderer.render(sees(f"tokens:{MAX_MODEL_LEN - short + 1}"), NO_SPECIAL)
        assert len(fits.token_ids) == MAX_MODEL_LEN
        too_long = sees(f"tokens:{MAX_MODEL_LEN - short + 2}")
        for params in (NO_SPECIAL, attrs.evolve(NO_SPECIAL, truncate_to=MAX_MODEL_LEN)):
            await refusal(renderer, too_long, f"has {MAX_MODEL_LEN + 1} tokens", params, ContextLengthError)
        for prompt in (sees("tokens:1"), sees("tokens:1", text="x" * 600)):
            await refusal(renderer, prompt, None, attrs.evolve(NO_SPECIAL, truncate_to=5), ContextLengthError)
        alone = ContentPrompt((ImagePart("tokens:600"),))
        await refusal(renderer, alone, None, RenderingParams(), ContextLengthError)


async def test_images_that_are_too_long_together_end_the_loading_of_the_rest(folder, loader):
    half = MAX_MODEL_LEN // 2 + 1
    async with rendering(folder, **reads_images(loader)) as renderer:
        with trio.fail_after(10), pytest.raises(ContextLengthError, match=f"has at least {2 * half} tokens"):
            await renderer.render(sees(f"tokens:{half}", "slow:1", f"tokens:{half}", "slow:2"), NO_SPECIAL)
    assert sorted(loader.cancelled) == ["slow:1", "slow:2"]
    assert loader.loading == 0


async def test_images_are_loaded_at_once_and_the_first_failure_ends_the_rest(folder):
    loader = ScriptedLoader()
    async with rendering(folder, **reads_images(loader)) as renderer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(renderer.render, sees("tokens:1", "tokens:2", "tokens:3"), NO_SPECIAL)
            await trio.testing.wait_all_tasks_blocked()
            assert loader.loading == 3
            nursery.cancel_scope.cancel(reason="the caller leaves")
        assert sorted(loader.cancelled) == ["tokens:1", "tokens:2", "tokens:3"]
        assert loader.loading == 0
        loader.cancelled.clear()
        await refusal(renderer, sees("tokens:1", "broken:", "tokens:3"), "broken", error=MediaError)
        assert sorted(loader.cancelled) == ["tokens:1", "tokens:3"]
        assert loader.loaded == []


async def test_a_template_that_fails_ends_the_loading_of_images(tmp_path):
    loader, folder = ScriptedLoader(), write_chat_folder(tmp_path / "model", "{{ raise_exception('no') }}")
    async with rendering(folder, in_processes=True, **reads_images(loader)) as renderer:
        await refusal(renderer, sees("tokens:1", "tokens:2"), "no")
    assert sorted(loader.cancelled) == ["tokens:1", "tokens:2"]
