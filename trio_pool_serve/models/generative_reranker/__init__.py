"""Causal language models that score how relevant a document is for a query, by the logits of the next token.

As in Qwen3-Reranker, the prompt demands "yes" or "no". sentence-transformers saves such a model as a cross-encoder
with a LogitScore module. Without one, a folder is a reranker if its chat template has the roles query and document.
Qwen3-Reranker was first published without either: its config and its chat template do not differ from other Qwen3
models, but its model card does. It is recognised by that card, or by ``--task score``.
"""

from contextlib import suppress

import numpy as np
from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.classification import score_activation
from trio_pool_serve.models.embedding import GENERATORS
from trio_pool_serve.models.files.chat_settings import names_both_texts, read_chat_format, read_chat_template
from trio_pool_serve.models.files.folder_files import FolderFiles, find_token_id, read_text
from trio_pool_serve.models.model_kind import ModelKind, ModelSpec
from trio_pool_serve.prompts import PairPrompt, RenderingParams
from trio_pool_serve.rendering.chat.chat_pair import ChatFormat, chat_pair, shortened_pair
from trio_pool_serve.rendering.text.long_text import encode_input
from trio_pool_serve.rendering.text.pair_format import PairFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, all_ids
from trio_pool_serve.types import RenderedPrompt

QWEN3 = "Qwen3ForCausalLM"
JUDGE = "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
OF_CARD = "README.md is Qwen3-Reranker's model card: pairs are scored with its prompt. For vectors, set --task embed."
OF_FLAG = "The folder declares no prompt for pairs and is scored with Qwen3-Reranker's, which other models do not know."


@frozen(kw_only=True)
class RerankerTemplate(PairFormat):
    """The prompt of Qwen3-Reranker's model card: prefix and suffix are never truncated, the body may be.

    It is the pair format of models without a chat template for pairs.
    """

    prefix: str = (
        f'<|im_start|>system\n{JUDGE} Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix: str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction: str = "Given a web search query, retrieve relevant passages that answer the query"

    def body(self, first: str, second: str, instruction: str) -> str:
        """Return the text between prefix and suffix."""
        return f"<Instruct>: {instruction or self.instruction}\n<Query>: {first}\n<Document>: {second}"

    def render(
        self, tokenizer: Tokenizer, prompt: PairPrompt, params: RenderingParams, max_model_len: int
    ) -> RenderedPrompt:
        """Return the tokens of prefix, body and suffix, each tokenised by itself."""
        prefix, suffix = (all_ids(tokenizer, tokenizer.encode(text)) for text in (self.prefix, self.suffix))
        text = self.body(*shortened_pair(tokenizer, prompt), params.instruction)
        excerpt, keep = encode_input(tokenizer, text, params, max_model_len, len(prefix) + len(suffix), "template")
        body = tokenizer.finish(excerpt.encoded, keep, params.truncation_side, add_special_tokens=False)
        return RenderedPrompt(np.concatenate([prefix, body, suffix]))


@frozen(kw_only=True)
class GenerativeReranker(ModelSpec):
    """Scores a pair by logit(true) − logit(false), or by logit(true) if there is no ``false_token_id``."""

    true_token_id: int
    false_token_id: int | None
    score_activation: str
    template: ChatFormat | RerankerTemplate | None
    """``None``: the tokenizer joins both texts."""

    tasks = frozenset({"score"})
    scoring = "pairs"


def read_generative_reranker(files: FolderFiles, config: ModelConfig) -> GenerativeReranker | None:
    """Read causal language models whose files, or ``--task score``, make them rerankers."""
    template: ChatFormat | RerankerTemplate | None
    if files.modules:
        if files.encoder_class != "CrossEncoder" or files.transformer_task != "text-generation":
            return None
        template = read_chat_format(files)
        true_token_id, false_token_id = _logit_score_tokens(files)
    elif files.is_saved_from(GENERATORS):
        if files.is_saved_from("ForCausalLM") and names_both_texts(read_chat_template(files)):
            template = read_chat_format(files)
        elif config.task == "score" or (config.task is None and has_card(files)):
            template = _of_qwen3_reranker(files)
        else:
            return None
        true_token_id, false_token_id = _token_id(files, "yes"), _token_id(files, "no")
    else:
        return None
    assumption = OF_CARD if config.task is None else "" if has_card(files) else OF_FLAG
    return GenerativeReranker(
        true_token_id=true_token_id,
        false_token_id=false_token_id,
        score_activation=score_activation(files, 1),
        template=template,
        assumption=assumption if isinstance(template, RerankerTemplate) else "",
    )


def has_card(files: FolderFiles) -> bool:
    """Return whether a folder contains Qwen3-Reranker's model card, whatever the folder's name is."""
    with suppress(OSError, ValueError):
        card = read_text(files.path / "README.md")
        return JUDGE in card and "pipeline_tag: text-ranking" in card and files.architectures == (QWEN3,)
    return False


def _of_qwen3_reranker(files: FolderFiles) -> RerankerTemplate:
    """Return the prompt of Qwen3-Reranker. Raises ``ModelLoadError`` for models of other classes or vocabularies."""
    name = files.architectures[0]
    require(
        name == QWEN3,
        f"--task score: the prompt of a {name} is not known. Of rerankers that declare none, only Qwen3-Reranker "
        f"({QWEN3}) is supported, not mxbai-rerank-v2, bge-reranker-v2-gemma or monoT5. A reranker declares "
        "its prompt by a chat template with the roles query and document.",
    )
    for token in ("<|im_start|>", "<|im_end|>"):
        _token_id(files, token)
    return RerankerTemplate()


def _logit_score_tokens(files: FolderFiles) -> tuple[int, int | None]:
    if (names := [module.name for module in files.modules[1:]]) != ["LogitScore"]:
        raise ModelLoadError(f"A generative reranker requires one LogitScore module, not {names or 'none'}.")
    config = files.modules[1].config
    require(
        config.get("module_input_name", "causal_logits") == "causal_logits",
        f"LogitScore works on {config.get('module_input_name')!r}, which is not supported.",
    )
    require(isinstance(config.get("true_token_id"), int), "LogitScore has no true_token_id.")
    return config["true_token_id"], config.get("false_token_id")


def _token_id(files: FolderFiles, token: str) -> int:
    if (found := find_token_id(files, token)) is None:
        raise ModelLoadError(f"The vocabulary has no token {token!r}, which a generative reranker requires.")
    return found


GENERATIVE_RERANKER = ModelKind(
    read=read_generative_reranker,
    load="trio_pool_serve.models.generative_reranker.loading:load_generative_reranker",
    pair_format=lambda spec, tokenizer: (
        spec.template if isinstance(spec.template, RerankerTemplate) else chat_pair(spec.template, tokenizer)
    ),
)
