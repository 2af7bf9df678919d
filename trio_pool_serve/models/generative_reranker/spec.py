"""Causal language models that judge how relevant a document is for a query, by the words they would say next.

Qwen3-Reranker's way: the model is asked for "yes" or "no". sentence-transformers saves such a model as a
cross-encoder with a LogitScore module. Without that a folder is a language model like any other, unless its
chat template has a place for a query and a document, or the person at the terminal says ``--task score``.
"""

import re
from typing import TypeAlias

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.classification.spec import is_cross_encoder, score_activation, transformer_task
from trio_pool_serve.models.files.chat_template import chat_template, read_chat_format
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.files.vocabulary import find_token
from trio_pool_serve.models.model_spec import ModelSpec
from trio_pool_serve.rendering.chat.chat_format import ChatFormat


@frozen(kw_only=True)
class JudgeFormat:
    """The prompt of Qwen3-Reranker's model card: a frame that is always whole around a body that may be cut."""

    prefix: str = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix: str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction: str = "Given a web search query, retrieve relevant passages that answer the query"

    def body(self, first: str, second: str, instruction: str) -> str:
        """Return the text between the frame's halves."""
        return f"<Instruct>: {instruction or self.instruction}\n<Query>: {first}\n<Document>: {second}"


PairTemplate: TypeAlias = ChatFormat | JudgeFormat


@frozen(kw_only=True)
class GenerativeReranker(ModelSpec):
    """``yes`` and ``no`` are token ids; without ``no`` the logit of yes alone is the score."""

    yes: int
    no: int | None
    score_activation: str
    template: PairTemplate | None
    """``None`` joins both texts as the tokenizer joins a pair."""

    tasks = frozenset({"score"})
    scoring = "pairs"


def read_generative_reranker(files: FolderFiles, config: ModelConfig) -> GenerativeReranker | None:
    """Take causal language models of which something says that they rerank."""
    template: PairTemplate | None
    if files.modules:
        if not is_cross_encoder(files) or transformer_task(files) != "text-generation":
            return None
        template = read_chat_format(files)
        yes, no = _words_of_module(files)
    elif any(name.endswith("ForCausalLM") for name in files.architectures):
        if _names_both_roles(chat_template(files) or ""):
            template = read_chat_format(files)
        elif config.task == "score":
            template = _judge_format(files)
        else:
            return None
        yes, no = _token(files, "yes"), _token(files, "no")
    else:
        return None
    return GenerativeReranker(yes=yes, no=no, score_activation=score_activation(files, 1), template=template)


def _names_both_roles(template: str) -> bool:
    return all(re.search(rf"""["']{role}["']""", template) for role in ("query", "document"))


def _words_of_module(files: FolderFiles) -> tuple[int, int | None]:
    names = [module.name for module in files.modules[1:]]
    if names != ["LogitScore"]:
        raise ModelLoadError(
            f"A language model that reranks needs a LogitScore module alone, and has {names or 'none'}."
        )
    config = files.modules[1].config
    if config.get("module_input_name", "causal_logits") != "causal_logits":
        raise ModelLoadError(f"LogitScore works on {config['module_input_name']!r}, which is not supported.")
    if not isinstance(config.get("true_token_id"), int):
        raise ModelLoadError("LogitScore names no true_token_id.")
    return config["true_token_id"], config.get("false_token_id")


def _judge_format(files: FolderFiles) -> JudgeFormat:
    for mark in ("<|im_start|>", "<|im_end|>"):
        if find_token(files, mark) is None:
            raise ModelLoadError(
                f"--task score: the vocabulary has no {mark}, so Qwen3-Reranker's prompt does not fit."
            )
    return JudgeFormat()


def _token(files: FolderFiles, word: str) -> int:
    found = find_token(files, word)
    if found is None:
        raise ModelLoadError(f"The vocabulary has no token {word!r}, by which a language model would judge.")
    return found
