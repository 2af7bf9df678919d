"""Line 6: conversations."""

from typing import Any

from tests.compatibility.vllm_cases.case import (
    ASSISTANT,
    DOCUMENTS,
    OTHER,
    SENTENCE,
    USER,
    Case,
    get,
    post,
    post_fields,
)

CHAT = ("chat", "chat with another template")
DEVELOPER = {"role": "developer", "content": "Be short."}
SYSTEM = {"role": "system", "content": "Be kind."}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}
TALK = [USER, ASSISTANT]
BOTH = {"continue_final_message": True, "add_generation_prompt": True}
UNTRUSTED = ("--trust-request-chat-template",)


def tokenize(name: str, kinds: str | tuple[str, ...] = CHAT, **body: Any) -> Case:
    return post_fields(name, "/tokenize", kinds, **body)


def embed(name: str, kinds: str | tuple[str, ...] = "chat", **body: Any) -> Case:
    return post_fields(name, "/v1/embeddings", kinds, **body)


TOKENIZE = (
    tokenize("`messages`", messages=[USER]),
    tokenize("`messages`, `return_token_strs`", messages=[USER], return_token_strs=True),
    tokenize("`prompt`, `return_token_strs`", ("chat", "embedding"), prompt=SENTENCE, return_token_strs=True),
    tokenize("`add_generation_prompt: false`", messages=[USER], add_generation_prompt=False),
    tokenize("`add_special_tokens: true`", messages=[USER], add_special_tokens=True),
    tokenize("`continue_final_message`", messages=TALK, continue_final_message=True, add_generation_prompt=False),
    tokenize(
        "`continue_final_message` alone",
        "chat",
        messages=TALK,
        continue_final_message=True,
        reason="implies `add_generation_prompt: false`",
        status=200,
    ),
    tokenize(
        "`continue_final_message`, `add_generation_prompt`",
        "chat",
        messages=TALK,
        **BOTH,
        says=("continue_final_message", "add_generation_prompt"),
    ),
    tokenize("`tools`", messages=[USER], tools=[TOOL]),
    tokenize("`chat_template_kwargs`", "chat", messages=[USER], chat_template_kwargs={"enable_thinking": False}),
    tokenize("role `developer`", messages=[DEVELOPER, USER]),
    tokenize("role `developer`, last", messages=[USER, DEVELOPER]),
    tokenize("roles `system`, `developer`", messages=[SYSTEM, USER, DEVELOPER]),
    tokenize("`chat_template` of the request", "chat", messages=[USER], chat_template="{{ 1 }}", says=UNTRUSTED),
    tokenize("no messages", "chat", messages=[]),
    tokenize("`messages`, no template", "embedding", messages=[USER], says=("chat template",)),
    tokenize("several conversations", "chat", messages=[[USER], [USER]]),
)

EMBED = (
    embed("`messages`", CHAT, messages=[USER]),
    embed(
        "`messages`, parts",
        CHAT,
        messages=[{"role": "user", "content": [{"type": "text", "text": t} for t in (SENTENCE, OTHER)]}],
    ),
    embed("`messages`, several conversations", CHAT, messages=[[USER], TALK]),
    embed("`messages`, one of them empty", messages=[[USER], []]),
    embed("`input` of messages", CHAT, input=[USER]),
    embed("`input` of several conversations", CHAT, input=[[USER], TALK]),
    embed(
        "`input` of messages, beside `messages`",
        input=[USER],
        messages=TALK,
        reason="vLLM ignores one of them",
        status=400,
    ),
    embed("`add_generation_prompt`", messages=[USER], add_generation_prompt=True),
    embed(
        "`add_generation_prompt` in `chat_template_kwargs`",
        messages=[USER],
        chat_template_kwargs={"add_generation_prompt": True},
        reason="is heeded; vLLM overrides it with the default of its own field",
        differs=("data", "usage"),
    ),
    embed(
        "`enable_thinking` in `chat_template_kwargs`",
        messages=[USER],
        add_generation_prompt=True,
        chat_template_kwargs={"enable_thinking": False},
    ),
    embed(
        "a name that no template has in `chat_template_kwargs`", messages=[USER], chat_template_kwargs={"colour": "red"}
    ),
    embed("`continue_final_message`", CHAT, messages=TALK, continue_final_message=True),
    embed(
        "`continue_final_message`, `add_generation_prompt`",
        messages=TALK,
        **BOTH,
        says=("continue_final_message", "add_generation_prompt"),
    ),
    embed("role `developer`", CHAT, messages=[DEVELOPER, USER]),
    embed("role `robot`", messages=[{"role": "robot", "content": SENTENCE}]),
    embed("a message without content", messages=[{"role": "user"}]),
    embed("a message without role", messages=[{"content": SENTENCE}]),
    embed("no messages", messages=[]),
    embed("`chat_template` of the request", messages=[USER], chat_template="{{ 1 }}", says=UNTRUSTED),
    embed("`add_special_tokens: true`", messages=[USER], add_special_tokens=True),
    embed("`messages`, no template", "embedding", messages=[USER], says=("chat template",)),
)

JUDGES = ("generative reranker", "cross-encoder")
RERANK = {"query": SENTENCE, "documents": DOCUMENTS}
SCORE = {"text_1": SENTENCE, "text_2": DOCUMENTS}
ASKED = {"chat_template_kwargs": {"instruction": "Find it."}}
ONLY_TEMPLATES = "puts the instruction in front of the query of a model that has no template"

RERANKERS = (
    post("a pair", "/score", "generative reranker", SCORE),
    post("a query", "/rerank", "generative reranker", RERANK),
    post("`instruction`", "/rerank", "generative reranker", {**RERANK, "instruction": "Find it."}),
    post("`instruction` in `chat_template_kwargs`", "/rerank", "generative reranker", {**RERANK, **ASKED}),
    post("`instruction` in `chat_template_kwargs`", "/score", "generative reranker", {**SCORE, **ASKED}),
    post("both", "/rerank", "generative reranker", {**RERANK, **ASKED, "instruction": "Find another."}),
    post(
        "`instruction` in `chat_template_kwargs`",
        "/rerank",
        "cross-encoder",
        {**RERANK, "chat_template_kwargs": {"instruction": "Yes"}},
        reason=ONLY_TEMPLATES,
        differs=("results", "usage"),
    ),
    post(
        "`instruction`",
        "/rerank",
        ("cross-encoder", "embedding"),
        {**RERANK, "instruction": "Yes"},
        reason=ONLY_TEMPLATES,
        differs=("results", "usage"),
    ),
)

CASES: tuple[Case, ...] = (
    *TOKENIZE,
    *EMBED,
    post("`messages`", "/pooling", "chat", {"messages": [USER]}),
    post(
        "`messages`, several conversations",
        "/pooling",
        "chat",
        {"messages": [[USER], [USER]]},
        reason="as on `/v1/embeddings`",
        status=200,
    ),
    post("`input` of messages", "/pooling", "chat", {"input": [USER]}, reason="as on `/v1/embeddings`", status=200),
    get(
        "/tokenizer_info",
        "chat",
        reason="names of files and of vLLM's own class; only what tokenizer_config.json has",
        differs=(
            "tokenizer_class",
            "name_or_path",
            "is_local",
            "local_files_only",
            "truncation_side",
            "added_tokens_decoder",
        ),
    ),
    get("/tokenizer_info", "embedding", name="without the flag", reason="it is always served", status=200),
    post("token ids", "/detokenize", ("chat", "embedding"), {"tokens": [5, 6, 7]}),
    post("no token ids", "/detokenize", "chat", {"tokens": []}),
    post("a negative id", "/detokenize", "chat", {"tokens": [-1]}),
    post(
        "an unknown id",
        "/detokenize",
        "chat",
        {"tokens": [99999]},
        reason="an id that the tokenizer does not have is an error",
        status=400,
    ),
    *RERANKERS,
)
