"""Models that sort texts, pairs of texts, or tokens into classes.

transformers' ``*ForSequenceClassification`` and ``*ForTokenClassification``. A sequence classifier with one
label judges pairs: sentence-transformers' cross-encoders are such models.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.chat_template import read_chat_format
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.model_spec import ModelSpec
from trio_pool_serve.rendering.chat.chat_format import ChatFormat

PROBLEM_TYPES = frozenset({None, "regression", "single_label_classification", "multi_label_classification"})


@frozen(kw_only=True)
class Classifier(ModelSpec):
    """What sorts into classes.

    ``score_activation`` is the dotted name of a torch.nn module without parameters.
    """

    label_names: tuple[str, ...]
    problem_type: str | None = None
    score_activation: str

    @property
    def labels(self) -> tuple[str, ...]:
        """``id2label`` of config.json, in order."""
        return self.label_names

    @property
    def multi_label(self) -> bool:
        """Whether ``problem_type`` is ``multi_label_classification``."""
        return self.problem_type == "multi_label_classification"


@frozen(kw_only=True)
class SequenceClassifier(Classifier):
    """One number per label for a text, or for two read together."""

    chat: ChatFormat | None = None
    """How pairs are read, where not as the tokenizer joins them."""

    tasks = frozenset({"classify"})
    takes_embeds = True


@frozen(kw_only=True)
class CrossEncoder(SequenceClassifier):
    """A sequence classifier with one label: how well two texts belong together."""

    tasks = frozenset({"classify", "score"})
    scoring = "pairs"


@frozen(kw_only=True)
class TokenClassifier(Classifier):
    """One number per label for each token."""

    tasks = frozenset({"token_classify"})
    takes_embeds = True


def read_classifier(files: FolderFiles, config: ModelConfig) -> Classifier | None:
    """Take folders whose weights were saved from a classifier, unless their modules make them something else."""
    del config
    if files.modules:
        return _of_modules(files) if is_cross_encoder(files) else None
    if _saved_from(files, "ForSequenceClassification"):
        return _sequence_classifier(files)
    if _saved_from(files, "ForTokenClassification"):
        labels = label_names(files.config)
        return TokenClassifier(
            label_names=labels,
            problem_type=_problem_type(files.config),
            score_activation=score_activation(files, len(labels)),
        )
    return None


def _of_modules(files: FolderFiles) -> SequenceClassifier | None:
    task = transformer_task(files)
    if task == "text-generation":
        return None
    behind = ", ".join(module.name for module in files.modules[1:])
    if task != "sequence-classification" or behind:
        raise ModelLoadError(
            f"The cross-encoder's transformer does {task}, with {behind or 'no module'} behind it; supported are "
            "sequence-classification with none and text-generation with LogitScore."
        )
    return _sequence_classifier(files)


def is_cross_encoder(files: FolderFiles) -> bool:
    """Tell whether sentence-transformers has saved the folder as a cross-encoder."""
    return files.texts.get("model_type") == "CrossEncoder"


def transformer_task(files: FolderFiles) -> str:
    """Return what the transformer module does, as sentence-transformers calls it."""
    return str(files.module_config.get("transformer_task", "feature-extraction"))


def label_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels in order; transformers' own names where config.json has none."""
    names: Mapping[str, str] | None = config.get("id2label")
    if not names:
        return tuple(f"LABEL_{index}" for index in range(config.get("num_labels", 2)))
    indices = sorted(map(int, names))
    if indices != list(range(len(names))):
        raise ModelLoadError(f"id2label of config.json counts {', '.join(map(str, indices))}.")
    return tuple(str(names[str(index)]) for index in indices)


def score_activation(files: FolderFiles, labels: int) -> str:
    """Return what sentence-transformers' cross-encoder applies to the logits. Raises ``ModelLoadError``."""
    inner = files.config.get("sentence_transformers") or {}
    asked: str | None = files.texts.get("activation_fn") if files.modules else None
    asked = asked or (
        inner.get("activation_fn")
        if "activation_fn" in inner
        else files.config.get("sbert_ce_default_activation_function")
    )
    if not asked:
        return "torch.nn.Sigmoid" if labels == 1 else "torch.nn.Identity"
    if not asked.startswith("torch.nn."):
        raise ModelLoadError(f"The activation function {asked} is not one of torch.nn's.")
    return asked


def _sequence_classifier(files: FolderFiles) -> SequenceClassifier:
    labels = label_names(files.config)
    kind = CrossEncoder if len(labels) == 1 else SequenceClassifier
    return kind(
        label_names=labels,
        problem_type=_problem_type(files.config),
        score_activation=score_activation(files, len(labels)),
        chat=read_chat_format(files),
    )


def _problem_type(config: Mapping[str, Any]) -> str | None:
    asked: str | None = config.get("problem_type")
    if asked not in PROBLEM_TYPES:
        raise ModelLoadError(f"problem_type of config.json is {asked!r}, which is not known.")
    return asked


def _saved_from(files: FolderFiles, suffix: str) -> bool:
    return any(name.endswith(suffix) for name in files.architectures)
