"""Classifiers of texts, pairs of texts, or tokens.

transformers' ``*ForSequenceClassification`` and ``*ForTokenClassification``. A sequence classifier with one
label scores pairs: sentence-transformers' cross-encoders are such models. A cross-encoder may also be a transformer
with modules of sentence-transformers after it: they pool its states, and map the vector to a number per label.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.embedding import assumption_of, require_plain_states
from trio_pool_serve.models.files.chat_settings import read_chat_format
from trio_pool_serve.models.files.exported_files import has_exported_file, why_not_torch
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.files.pooled_modules import SCORES, names_of, read_pooled_modules
from trio_pool_serve.models.model_kind import ModelKind, ModelSpec
from trio_pool_serve.rendering.chat.chat_pair import ChatFormat, chat_pair
from trio_pool_serve.types import Activation, PoolingTask

if TYPE_CHECKING:
    from trio_pool_serve.runner.openvino.exported_graph import BuiltHeads

TOKENWISE_CLASSIFIERS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "modernbert"})
"""Model types of encoders whose sequence classifier is known to be applicable to each token's state."""

DECODERS = frozenset({"qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2"})
"""Model types of decoders whose classifier is a linear layer on the last token's state."""

PROBLEM_TYPES = frozenset({None, "regression", "single_label_classification", "multi_label_classification"})


@frozen(kw_only=True)
class Classifier(ModelSpec):
    """A classifier of texts or tokens."""

    problem_type: str | None = None
    score_activation: str
    """Dotted name of a torch.nn module without parameters."""
    of_tokens: bool = False
    """Whether it can be applied to each token, as in vLLM."""
    chat: ChatFormat | None = None
    """How pairs are put into the chat template; ``None``: the tokenizer joins them."""
    pooled: str = "lasttoken"
    """The pooling type of a decoder's states before its linear layer."""

    supports_prompt_embeds = True

    @property
    def multi_label(self) -> bool:
        """Whether ``problem_type`` is ``multi_label_classification``."""
        return self.problem_type == "multi_label_classification"

    @property
    def activations(self) -> Mapping[Activation, str]:
        """Dotted names of its activations: ``probabilities`` are as in transformers' pipelines."""
        probabilities = "Sigmoid" if self.multi_label or len(self.labels) == 1 else "Softmax"
        if self.problem_type == "regression":
            probabilities = "Identity"
        return {
            "probabilities": f"torch.nn.{probabilities}",
            "score": self.score_activation,
            "raw": "torch.nn.Identity",
        }


@frozen(kw_only=True)
class SequenceClassifier(Classifier):
    """One number per label for a text or a pair of texts."""

    @property
    def tasks(self) -> frozenset[PoolingTask]:
        """The tasks for a text and, if the classifier can be applied to tokens, for each of its tokens."""
        return frozenset({"classify", "token_classify"} if self.of_tokens else {"classify"})


@frozen(kw_only=True)
class CrossEncoder(SequenceClassifier):
    """A sequence classifier with one label: the score of a pair of texts."""

    scoring = "pairs"

    @property
    def tasks(self) -> frozenset[PoolingTask]:
        """The tasks of a sequence classifier, and the score of a pair."""
        return super().tasks | {"score"}


@frozen(kw_only=True)
class TokenClassifier(Classifier):
    """One number per label for each token."""

    tasks = frozenset({"token_classify"})


def read_classifier(files: FolderFiles, config: ModelConfig) -> Classifier | None:
    """Read folders saved from a classifier, unless their modules.json declares another kind of model."""
    if files.modules:
        task = files.transformer_task
        if files.encoder_class != "CrossEncoder" or task == "text-generation":
            return None
        if task == "feature-extraction":
            return read_pooled_classifier(files, config)
        require(
            task == "sequence-classification" and not files.modules[1:],
            f"The cross-encoder's transformer does {task}, followed by {names_of(files.modules[1:])}; supported "
            "are sequence-classification with no module, feature-extraction with Pooling and a Dense that writes "
            "scores, and text-generation with LogitScore.",
        )
    of_texts = bool(files.modules) or files.is_saved_from("ForSequenceClassification")
    if not of_texts and not files.is_saved_from("ForTokenClassification"):
        return None
    labels = read_labels(files.config)
    is_only_exported = bool(why_not_torch(files.transformer_path)) and has_exported_file(files.transformer_path)
    is_tokenwise = files.config.get("model_type") in TOKENWISE_CLASSIFIERS | DECODERS and not is_only_exported
    kind: type[Classifier] = CrossEncoder if len(labels) == 1 else SequenceClassifier
    if not of_texts:
        kind = TokenClassifier
    return kind(
        of_tokens=is_tokenwise,
        labels=labels,
        problem_type=read_problem_type(files),
        score_activation=score_activation(files, len(labels)),
        chat=read_chat_format(files) if of_texts else None,
        pooled=files.own_pooling or "lasttoken",
    )


MAX_SCORES = 2**20
"""Labels of a cross-encoder whose last module computes them: a name is made for each."""


def read_pooled_classifier(files: FolderFiles, config: ModelConfig) -> SequenceClassifier:
    """Read a cross-encoder that pools its transformer's states; the last Dense has an output for each label."""
    require(
        files.router is None and "vision_config" not in files.config,
        f"{files.path / 'modules.json'}: a cross-encoder with a Router, or with a transformer that reads images "
        "(vision_config in config.json), is not supported.",
    )
    require_plain_states(files)
    modules = read_pooled_modules(files, writes=SCORES)
    scores, place = modules[-1].config.get("out_features"), modules[-1].path / "config.json"
    if modules[-1].name != "Dense" or type(scores) is not int or not 1 <= scores <= MAX_SCORES:
        raise ModelLoadError(
            f"{place}: {modules[-1].name} has out_features {scores!r}; the last module of a cross-encoder must be a "
            f"Dense with 1 to {MAX_SCORES}."
        )
    for module in modules:
        require(
            module.config.get("include_prompt", True),
            f"{module.path / 'config.json'}: include_prompt is false; pairs of texts require true.",
        )
    has_names = len(files.config.get("id2label") or ()) == scores
    kind = CrossEncoder if scores == 1 else SequenceClassifier
    return kind(
        modules=modules,
        labels=read_labels(files.config if has_names else {"num_labels": scores}),
        problem_type=read_problem_type(files),
        score_activation=score_activation(files, scores),
        chat=read_chat_format(files),
        assumption=assumption_of(files, config),
    )


def read_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels in order; transformers' default names where config.json has none."""
    names: Mapping[str, str] | None = config.get("id2label")
    if not names:
        return tuple(f"LABEL_{index}" for index in range(config.get("num_labels", 2)))
    indices = sorted(map(int, names))
    require(
        indices == list(range(len(names))), f"id2label of config.json has the indices {', '.join(map(str, indices))}."
    )
    return tuple(str(names[str(index)]) for index in indices)


def read_problem_type(files: FolderFiles) -> str | None:
    """Return ``problem_type`` of config.json. Raises ``ModelLoadError``."""
    problem_type: str | None = files.config.get("problem_type")
    require(problem_type in PROBLEM_TYPES, f"problem_type of config.json is {problem_type!r}, which is unknown.")
    return problem_type


def score_activation(files: FolderFiles, labels: int) -> str:
    """Return the activation that sentence-transformers' cross-encoder applies to logits. Raises ``ModelLoadError``."""
    inner = files.config.get("sentence_transformers") or {}
    name: str | None = files.sentence_transformers_config.get("activation_fn") if files.modules else None
    name = name or (
        inner.get("activation_fn")
        if "activation_fn" in inner
        else files.config.get("sbert_ce_default_activation_function")
    )
    if not name:
        return "torch.nn.Sigmoid" if labels == 1 else "torch.nn.Identity"
    require(name.startswith("torch.nn."), f"The activation function {name} is not a module of torch.nn.")
    return name


def classifier_heads(spec: Classifier) -> "BuiltHeads":
    """Return the heads. Raises ``UnusableGraphError``."""
    # Imported here: an optional dependency.
    from trio_pool_serve.runner.openvino.converted_model import UnusableGraphError
    from trio_pool_serve.runner.openvino.exported_graph import label_heads

    require(not spec.modules, f"{names_of(spec.modules)} requires torch", UnusableGraphError)
    functions: Mapping[str, str] = {
        activation: name.rpartition(".")[2] for activation, name in spec.activations.items()
    }
    return label_heads(len(spec.labels), functions, of_tokens=isinstance(spec, TokenClassifier))


CLASSIFICATION = ModelKind(
    read=read_classifier,
    load="trio_pool_serve.models.classification.loading:load_classifier",
    exported_heads=classifier_heads,
    pair_format=lambda spec, tokenizer: chat_pair(spec.chat, tokenizer),
)
