"""Chat templates in processes: what a template cannot do to the server, and to the next one."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil
import pytest
import trio

from tests.conftest import until
from tests.rendering.chat.chat_folders import CHATML
from trio_pool_serve.errors import InvalidRequestError, UnavailableError
from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.prompts import ChatMessage, ChatPrompt, ImagePart, TextPart
from trio_pool_serve.rendering.chat import template_sandbox
from trio_pool_serve.rendering.chat.chat_templates import RESERVED_VARIABLES, ChatTemplate, ChatTemplates
from trio_pool_serve.threads.offload import Offload

ENDLESS = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
ROOMY = 10**8


@asynccontextmanager
async def templates(*, workers: int = 1, timeout_s: float = math.inf, in_processes: bool = True) -> AsyncIterator:
    processes = WorkerProcesses(workers, template_sandbox.prepare, in_processes=in_processes)
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        yield ChatTemplates({"template": processes, "client_template": processes}, Offload(), timeout_s)
        nursery.cancel_scope.cancel(reason="the test is over")


def says(*texts: str, **given: Any) -> ChatPrompt:
    roles = ("user", "assistant")
    messages = [ChatMessage(roles[index % 2], (TextPart(text),)) for index, text in enumerate(texts)]
    return ChatPrompt(messages=tuple(messages), **given)


def template(text: str, *, structured: bool = False, from_request: bool = True, **variables: Any) -> ChatTemplate:
    return ChatTemplate(text=text, variables=variables, structured=structured, is_from_request=from_request)


async def render(to: ChatTemplates, text: str, prompt: ChatPrompt | None = None, most: int = ROOMY) -> str:
    return await to.render(template(text), prompt or says("hello"), max_characters=most)


PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


async def assert_usable(to: ChatTemplates) -> None:
    """The next renders, of this template and of others, are right, and every place is free."""
    assert await render(to, PLAIN) == "user: hello\n"
    assert (await render(to, CHATML)).endswith("<|im_start|>user\nhello<|im_end|>\n")
    assert to.processes["template"].statistics().borrowed == to.processes["template"].statistics().waiting == 0


Check = Callable[[ChatTemplates], Awaitable[None]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Have ``test_each_check_passes_and_the_next_is_not_affected`` call it: all of them share a process."""
    CHECKS.append(function)
    return function


# -- what it makes ---------------------------------------------------------------------------------------


@check
async def a_template_sees_messages_special_tokens_and_the_client_s_variables(to: ChatTemplates) -> None:
    text = "{{ bos_token }}{{ messages[0].content }}{{ mood }}{{ add_generation_prompt }}{{ tools }}"
    prompt = says("hello", template_kwargs={"mood": ["so", {"so": 1}]}, add_generation_prompt=True)
    asked = template(text, bos_token="<s>")
    assert await to.render(asked, prompt, max_characters=100) == "<s>hello['so', {'so': 1}]TrueNone"


async def test_contents_are_texts_or_parts_as_the_template_wants_them_and_images_are_parts():
    parts = (TextPart("see"), TextPart("this"))
    in_parts = "{'type': 'text', 'text': 'see'}, {'type': 'text', 'text': 'this'}"
    with_image = (*parts, ImagePart("data:image/png;base64,x"))
    async with templates(in_processes=False) as to:
        for content, structured, expected in (
            (parts, False, "see\nthis"),
            (parts, True, f"[{in_parts}]"),
            (with_image, False, f"[{in_parts}, {{'type': 'image'}}]"),
            ((), False, ""),
        ):
            asked = template("{{ messages[0].content }}", structured=structured)
            prompt = ChatPrompt(messages=(ChatMessage("user", content),))
            assert await to.render(asked, prompt, max_characters=ROOMY) == expected


@check
async def a_conversation_of_the_largest_body_fits_into_the_memory(to: ChatTemplates) -> None:
    text = "\U0001f642" * 4_000_000
    assert await render(to, PLAIN, says(text)) == f"user: {text}\n"


@check
async def no_variable_has_the_name_of_what_renders(to: ChatTemplates) -> None:
    for name in sorted(RESERVED_VARIABLES):
        with pytest.raises(InvalidRequestError, match=name) as found:
            await render(to, PLAIN, says("hello", template_kwargs={name: "mine"}))
        assert found.value.field == "template_kwargs"
    for name in ("self", "tools", "documents"):  # which are refused for what they are, in the process
        with pytest.raises(InvalidRequestError):
            await render(to, PLAIN, says("hello", template_kwargs={name: "mine"}))


@check
async def what_json_cannot_carry_is_refused(to: ChatTemplates) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"deeper": deep}
    with pytest.raises(InvalidRequestError) as found:
        await render(to, PLAIN, says("hello", template_kwargs=deep))
    assert found.value.field == "template_kwargs"
    with pytest.raises(InvalidRequestError, match="Unicode"):
        await render(to, PLAIN, says("\ud800"))
    with pytest.raises(InvalidRequestError, match="surrogates"):
        await render(to, "{{ '\\ud800' }}")


# -- what it cannot do -----------------------------------------------------------------------------------

REFUSED = {
    "{{ unfinished": "end of template",
    "{% no_such_tag %}": "no_such_tag",
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    "{{ raise_exception('x' * 100000) }}": "x" * 400,
    "{{ missing.field }}": "'missing' is undefined",
    "{{ 1 / 0 }}": "division by zero",
    "{{ range(10 ** 9) }}": "Range too big",
    "{{ messages[0].content.nothing() }}": "has no attribute 'nothing'",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
}

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ self._TemplateReference__context }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '%s' | format(messages) | attr('__class__') }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
    "{% set namespace.__class__ = 1 %}",
    "{{ messages.append({'role': 'user', 'content': 'mine'}) }}",
    "{{ messages[0].update({'content': 'mine'}) }}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
]

POISONS = [
    "{% set messages = [] %}{% set raise_exception = 1 %}ok",
    "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{% set range = none %}{% set dict = none %}ok",
    "{% macro tojson(x) %}mine{% endmacro %}{{ tojson(1) }}",
    "{% generation %}{{ messages }}{% endgeneration %}",
    "{% set loop = 1 %}{% set bos_token = 'mine' %}{% set add_generation_prompt = 'mine' %}ok",
]


async def refusal(to: ChatTemplates, text: str, **given: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as found:
        await render(to, text, **given)
    return found.value


@check
async def a_template_that_fails_says_why(to: ChatTemplates) -> None:
    for text, why in REFUSED.items():
        for prompt, field in ((None, "prompts"), (says("hello", chat_template=text), "chat_template")):
            error = await refusal(to, text, prompt=prompt)
            assert why in str(error)
            assert len(str(error)) < 700
            assert error.field == field


@check
async def no_template_gets_out_of_its_sandbox(to: ChatTemplates) -> None:
    for text in ESCAPES:
        with suppress(InvalidRequestError):
            assert await render(to, text) == "", text


@check
async def what_one_template_changes_no_other_sees(to: ChatTemplates) -> None:
    for text in POISONS:
        before = await render(to, text)
        await assert_usable(to)
        assert await render(to, text) == before
    probe = "{{ range(2) | list }}{{ dict(a=1) }}{{ {} | tojson }}{{ raise_exception('still here') }}"
    assert "still here" in str(await refusal(to, probe))
    assert to.processes["template"].statistics().killed == 0


async def test_an_endless_template_is_killed_and_the_next_is_not_affected():
    async with templates(timeout_s=0.5) as to:
        await assert_usable(to)
        for killed in (1, 2):
            error = await refusal(to, ENDLESS)
            assert "took longer than 0.5 s" in str(error)
            assert to.processes["template"].statistics().killed == killed
            await assert_usable(to)


@pytest.mark.slow
async def test_the_model_s_own_template_that_takes_too_long_is_not_the_client_s_fault():
    async with templates(timeout_s=0.5) as to:
        with pytest.raises(UnavailableError, match=r"longer than 0\.5 s"):
            await to.render(template(ENDLESS, from_request=False), says("hello"), max_characters=ROOMY)
        await assert_usable(to)


@pytest.mark.slow
async def test_a_template_that_fills_the_memory_takes_only_its_process_along():
    at_once = "{{ ('%1000000000d' | format(1)) | length }}"
    bit_by_bit = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    async with templates() as to:
        for bomb in (at_once, bit_by_bit):
            error = await refusal(to, bomb, prompt=says("hello", chat_template=bomb))
            assert "512 MiB" in str(error)
            assert error.field == "chat_template"
            await assert_usable(to)


@check
async def an_output_past_its_bound_is_refused_where_it_is_made(to: ChatTemplates) -> None:
    assert await render(to, "{{ 'x' * 1000 }}", most=1000) == "x" * 1000
    assert "makes 1001 characters of this conversation; the limit is 1000" in str(
        await refusal(to, "{{ 'x' * 1001 }}", most=1000)
    )
    endless = "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"
    assert "the limit is 1000" in str(await refusal(to, endless, most=1000))


@pytest.mark.slow
async def test_templates_are_compiled_and_forgotten_without_end():
    """Each new template of a client leaves something in its process, but never more than there is room for."""
    async with templates() as to:
        for number in range(140):
            assert await render(to, f"{'{{ messages[0].content }}' * 40}{number}") == "hello" * 40 + f"{number}"
        await assert_usable(to)


@pytest.mark.parametrize("in_processes", [True, False])
async def test_each_check_passes_and_the_next_is_not_affected(subtests, in_processes):
    async with templates(in_processes=in_processes) as to:
        for checked in CHECKS:
            with subtests.test(checked.__name__):
                await checked(to)
                await assert_usable(to)


# -- several at once, and none that stays ------------------------------------------------------------------


@pytest.mark.slow
async def test_ten_conversations_at_once_are_not_mixed_up():
    async with templates(workers=2) as to:
        ended = []

        async def one(index: int) -> None:
            for size in (1, 100_000, 3):
                assert await render(to, PLAIN, says(f"{index}" * size)) == f"user: {f'{index}' * size}\n"
            ended.append(index)

        async with trio.open_nursery() as nursery:
            for index in range(10):
                nursery.start_soon(one, index)
        assert len(ended) == 10


async def test_a_process_that_is_killed_is_not_the_template_s_fault():
    async with templates() as to:
        await assert_usable(to)
        (process,) = [child for child in psutil.Process().children() if "spawn_main" in "".join(child.cmdline())]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(killed, to)
            await until(lambda: process.cpu_percent(interval=None), 60)
            process.kill()
        await assert_usable(to)


async def killed(to: ChatTemplates) -> None:
    with pytest.raises(UnavailableError, match="was killed"):
        await render(to, ENDLESS)
