"""Conversations as vLLM's clients send them: several at once, in ``input``, to ``/tokenize``, by another template."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_models import Everything, serve_as
from tests.api.serving import post, refused, serving
from tests.conftest import render_templates_on_the_loop
from tests.rendering.chat.chat_folders import CHATML
from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.service import Service

HELLO = [{"role": "user", "content": "hello"}]
TURNS = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A nursery"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
ROLES = "{% for message in messages %}{{ 'D:' if message.role == 'developer' else 'X:' }}{% endfor %}"


@pytest.fixture
def config(chat_folder: Path) -> Config:
    return Config(models=(str(chat_folder),))


@pytest.fixture
async def service(service: Service) -> Service:
    serve_as(service, Everything())
    render_templates_on_the_loop(service)
    return service


def rows(answer: dict[str, Any]) -> list[Any]:
    return [item.get("embedding", item.get("data", item.get("probs"))) for item in answer["data"]]


# -- several conversations, and conversations in ``input`` ------------------------------------------------


async def test_messages_in_input_take_the_fields_of_conversations(client):
    fields = {"add_generation_prompt": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert rows(await post(client, input=HELLO, **fields)) == rows(await post(client, messages=HELLO, **fields))


async def test_variables_of_the_template_are_bounded_and_its_flags_truth_values(client):
    for count, kwargs, message in (
        (1, {"add_generation_prompt": "maybe"}, "maybe"),
        (100, {"long": "x" * 11_000}, "fewer conversations"),
    ):
        error = await refused(client, messages=[HELLO] * count, chat_template_kwargs=kwargs)
        assert error["param"] == "chat_template_kwargs"
        assert message in error["message"]


async def test_the_two_flags_may_be_among_the_template_s_variables_and_the_fields_count_for_more(client):
    plain = rows(await post(client, messages=TURNS))
    for name in ("add_generation_prompt", "continue_final_message"):
        chosen = rows(await post(client, messages=TURNS, **{name: True}))
        assert chosen != plain
        for spelt in ("true", "True", 1):
            assert rows(await post(client, messages=TURNS, chat_template_kwargs={name: spelt})) == chosen
        kwargs = {"chat_template_kwargs": {name: "false"}}
        assert rows(await post(client, messages=TURNS, **kwargs)) == plain
        kwargs = {"chat_template_kwargs": {name: True}}
        assert rows(await post(client, messages=TURNS, **kwargs)) == chosen
        assert rows(await post(client, messages=TURNS, **kwargs, **{name: False})) == plain


# -- roles and templates -----------------------------------------------------------------------------------


async def test_a_file_of_the_flag_replaces_the_model_s_template(chat_folder, scripted, tmp_path):
    (tmp_path / "template.jinja").write_text(ROLES)
    loading = ModelConfig(chat_template=str(tmp_path / "template.jinja"))
    async with serving(Config(models=(str(chat_folder),), loading=loading), scripted) as (service, client):
        render_templates_on_the_loop(service)
        tokens = (await post(client, "/tokenize", messages=TURNS))["tokens"]
        assert (await post(client, "/detokenize", tokens=tokens))["prompt"] == "X:X:"
        assert (await client.get("/tokenizer_info")).json()["chat_template"] == ROLES


def test_a_template_that_is_no_file_or_cannot_be_parsed_is_refused_at_the_start(chat_folder):
    with pytest.raises(ModelLoadError, match="neither a template nor a file"):
        read_model_folder(chat_folder, ModelConfig(chat_template="/no/such/file.jinja"))
    with pytest.raises(ModelLoadError, match="cannot be parsed"):
        read_model_folder(chat_folder, ModelConfig(chat_template="{% for message in messages"))
    spoken = (
        "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert read_model_folder(chat_folder, ModelConfig(chat_template=spoken)).chat_template == spoken


async def test_the_tokenizer_s_settings_are_told(client):
    info = (await client.get("/tokenizer_info")).json()
    assert info["chat_template"] == CHATML
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (info["model_max_length"], info["eos_token"]) == (512, "</s>")
