"""The inputs that a folder's transformer module accepts, and the model methods that compute them.

sentence-transformers writes them to sentence_bert_config.json as ``modality_config``: for each modality the method
that computes it and the name of the output that is used. ``message`` is the modality of conversations.
"""

from collections.abc import Collection, Mapping
from typing import Any

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import FolderFiles

ModalityConfig = Mapping[str, Mapping[str, Any]]


def modality_config(files: FolderFiles) -> ModalityConfig:
    """Return ``modality_config``, empty if the folder has none."""
    found: ModalityConfig = files.module_config.get("modality_config") or {}
    return found


def require_methods(config: ModalityConfig, wanted: Mapping[str, tuple[str, str]]) -> None:
    """Raise ``ModelLoadError`` unless each modality in ``wanted`` is computed by that (method, output)."""
    for modality, (method, output) in wanted.items():
        entry = config.get(modality) or {}
        found = entry.get("method"), entry.get("method_output_name")
        if found not in ((method, output), (method, [output])):
            raise ModelLoadError(
                f"modality_config computes {modality} by {found[0]} and takes its {found[1]}, which is not supported; "
                f"{method} and {output} are."
            )


def reject_processing_kwargs(files: FolderFiles, known: Mapping[str, Collection[str]]) -> None:
    """Raise ``ModelLoadError`` for ``processing_kwargs`` other than the ``known`` ones of each section."""
    kwargs: Mapping[str, Mapping[str, Any]] = files.module_config.get("processing_kwargs") or {}
    unknown = [
        f"{section}.{name}" for section in kwargs for name in kwargs[section] if name not in known.get(section, ())
    ]
    if unknown:
        raise ModelLoadError(
            f"The transformer's config requires processing_kwargs {', '.join(unknown)}, which is not supported."
        )


def reject_input_type_lengths(files: FolderFiles) -> None:
    """Raise ``ModelLoadError`` for lengths by input type, which only late-interaction models support."""
    found = [name for name in ("query_length", "document_length", "query_expansion") if files.module_config.get(name)]
    if found:
        raise ModelLoadError(f"The transformer's config requires {', '.join(found)}, which is not supported.")


def require_plain_states(files: FolderFiles) -> None:
    """Raise ``ModelLoadError`` unless the transformer makes the states of an embedding model, of any text alike."""
    task = files.module_config.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise ModelLoadError(f"The transformer's task is {task!r}, which is not supported for an embedding model.")
    reject_input_type_lengths(files)
