"""What the transformer module of a folder reads beside plain text, and by which of the model's methods.

sentence-transformers writes it to sentence_bert_config.json as ``modality_config``: for each kind of input the
method that computes it and which of its outputs is taken. ``message`` stands for whole conversations.
"""

from collections.abc import Collection, Mapping
from typing import Any

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import FolderFiles

ModalityConfig = Mapping[str, Mapping[str, Any]]


def modality_config(files: FolderFiles) -> ModalityConfig:
    """Return ``modality_config``, empty where the folder has none."""
    found: ModalityConfig = files.module_config.get("modality_config") or {}
    return found


def require_methods(config: ModalityConfig, wanted: Mapping[str, tuple[str, str]]) -> None:
    """Check that each kind of input in ``wanted`` is computed by that method, of which that output is taken.

    Raises ``ModelLoadError``.
    """
    for modality, (method, output) in wanted.items():
        entry = config.get(modality) or {}
        found = entry.get("method"), entry.get("method_output_name")
        if found not in ((method, output), (method, [output])):
            raise ModelLoadError(
                f"modality_config computes {modality} by {found[0]} and takes its {found[1]}, which is not supported: "
                f"{method} and {output} is."
            )


def reject_processing_kwargs(files: FolderFiles, known: Mapping[str, Collection[str]]) -> None:
    """Raise ``ModelLoadError`` for ``processing_kwargs`` that are not among the ``known`` ones of each section."""
    asked: Mapping[str, Mapping[str, Any]] = files.module_config.get("processing_kwargs") or {}
    wrong = [f"{section}.{name}" for section in asked for name in asked[section] if name not in known.get(section, ())]
    if wrong:
        raise ModelLoadError(f"The transformer asks for processing_kwargs {', '.join(wrong)}, which is not supported.")


def reject_input_type_lengths(files: FolderFiles) -> None:
    """Raise ``ModelLoadError`` for lengths by input type, which only late interaction has."""
    asked = [name for name in ("query_length", "document_length", "query_expansion") if files.module_config.get(name)]
    if asked:
        raise ModelLoadError(f"The transformer's config asks for {', '.join(asked)}, which is not supported.")
