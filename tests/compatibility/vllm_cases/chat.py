"""Line 6: conversations."""

from typing import Any

from tests.compatibility.vllm_cases.case import (
    ASSISTANT,
    OTHER,
    SENTENCE,
    USER,
    Case,
    get,
    post,
    post_fields,
    rerank,
    score,
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
IGNORED = "vLLM ignores one of the two fields"
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
    tokenize("`continue_final_message`, `add_generation_prompt`", "chat", messages=TALK, **BOTH, says=tuple(BOTH)),
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
    embed("`input` of messages, beside `messages`", input=[USER], messages=TALK, reason=IGNORED, status=400),
    embed("`add_generation_prompt`", messages=[USER], add_generation_prompt=True),
    embed(
        "`add_generation_prompt` in `chat_template_kwargs`",
        messages=[USER],
        chat_template_kwargs={"add_generation_prompt": True},
        reason="has an effect; vLLM overrides it with the default of its own field",
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
    embed("`continue_final_message`, `add_generation_prompt`", messages=TALK, **BOTH, says=tuple(BOTH)),
    embed("role `developer`", CHAT, messages=[DEVELOPER, USER]),
    embed("role `robot`", messages=[{"role": "robot", "content": SENTENCE}]),
    embed("a message without content", messages=[{"role": "user"}]),
    embed("a message without role", messages=[{"content": SENTENCE}]),
    embed("no messages", messages=[]),
    embed("`chat_template` of the request", messages=[USER], chat_template="{{ 1 }}", says=UNTRUSTED),
    embed("`add_special_tokens: true`", messages=[USER], add_special_tokens=True),
    embed("`messages`, no template", "embedding", messages=[USER], says=("chat template",)),
)

ASKED = {"chat_template_kwargs": {"instruction": "Find it."}}
ONLY_TEMPLATES = {
    "reason": "if the model has no template, the instruction is put in front of the query",
    "differs": ("results", "usage"),
}

RERANKERS = (
    score("a pair", "generative reranker"),
    rerank("a query", "generative reranker"),
    rerank("`instruction`", "generative reranker", instruction="Find it."),
    rerank("`instruction` in `chat_template_kwargs`", "generative reranker", **ASKED),
    score("`instruction` in `chat_template_kwargs`", "generative reranker", **ASKED),
    rerank("both", "generative reranker", **ASKED, instruction="Find another."),
    rerank(
        "`instruction` in `chat_template_kwargs`",
        "cross-encoder",
        chat_template_kwargs={"instruction": "Yes"},
        **ONLY_TEMPLATES,
    ),
    rerank("`instruction`", ("cross-encoder", "embedding"), instruction="Yes", **ONLY_TEMPLATES),
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
        reason="returns `tokenizer_config.json`; vLLM adds names of files and of its own class",
        differs=(
            "tokenizer_class",
            "name_or_path",
            "is_local",
            "local_files_only",
            "truncation_side",
            "added_tokens_decoder",
        ),
    ),
    get("/tokenizer_info", "embedding", name="without the flag", reason="always served; no flag is needed", status=200),
    post("token ids", "/detokenize", ("chat", "embedding"), {"tokens": [5, 6, 7]}),
    post("no token ids", "/detokenize", "chat", {"tokens": []}),
    post("a negative id", "/detokenize", "chat", {"tokens": [-1]}),
    post(
        "an unknown id",
        "/detokenize",
        "chat",
        {"tokens": [99999]},
        reason="an unknown token id is an error",
        status=400,
    ),
    *RERANKERS,
)
