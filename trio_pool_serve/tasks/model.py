"""A model that tasks can use."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from attrs import Factory, frozen

from trio_pool_serve.config.model_config import LongText
from trio_pool_serve.engine.admission import AdmittedRequest, EstimatedWork
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.planned_window import WindowMember
from trio_pool_serve.engine.queue_entry import RowsDone
from trio_pool_serve.engine.result_cache import ModelResults
from trio_pool_serve.errors import JobField, TaskNotSupportedError
from trio_pool_serve.models.files.model_digest import fingerprint_of
from trio_pool_serve.models.files.task_adapters import SIDES, of_task
from trio_pool_serve.models.model_kind import ModelFolder, ModelSpec
from trio_pool_serve.prompts import RenderingParams
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.long_text import truncation_of
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.instruction import instruction_of
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import Adapter, ComputedBy, PoolingRequest, PoolingTask


@frozen(eq=False)
class Model:
    """One served model: its folder, its renderer and its engine."""

    name: str
    folder: ModelFolder[ModelSpec]
    renderer: Renderer
    engine: Engine
    dimensions: int
    """Length of its vectors before truncation; 0 if it has none."""
    long_text: LongText | None = None
    """What happens to longer inputs if the request does not say; ``None``: the default of its dialect."""
    window: WindowMember | None = None
    """The window of a request of background work."""
    results: ModelResults | None = None
    """The cache of results; ``None`` if disabled. Background work does not use it: its outputs must be the same bytes
    in every run, and the last bits of an output depend on its batch."""
    adapter: Adapter | None = None
    """Of all rows of a request."""
    task_adapters: Mapping[str, Adapter] = Factory(dict)
    """The adapters that belong to the model, by task."""

    @property
    def computed_by(self) -> ComputedBy:
        """What computes its outputs. The fingerprint also depends on settings of rendering, and on the adapter."""
        folder = self.folder
        adapters = [each.digest for each in (*self.task_adapters.values(), self.adapter) if each is not None]
        prompts = folder.default_prompt_name, folder.default_prompt, folder.chat_template
        loaded_by = self.engine.facts.computed_by
        return _with_settings(loaded_by, self.long_text, folder.max_model_len, *prompts, *adapters)

    def admit(self, work: EstimatedWork) -> AdmittedRequest:
        """Admit a request until the returned context ends. Raises as ``Engine.admit``."""
        return self.engine.admit(work if self.results is None else self.results.to_compute(work))

    async def submit_all(
        self, requests: Sequence[PoolingRequest], rows_done: RowsDone, timings: RequestTimings
    ) -> None:
        """Compute the rows of a request, or take them from the cache of results.

        Raises and is cancelled as ``Engine.submit_all``.
        """
        if self.window is not None:
            await self.window.submit_all(self.engine, requests, rows_done)
        elif self.results is not None:
            await self.results.submit_all(self.engine, requests, rows_done, timings)
        else:
            await self.engine.submit_all(requests, rows_done)

    def rendering_params(self, input_params: InputParams) -> RenderingParams:
        """Return the renderer's params for a request's. Raises ``InvalidRequestError``."""
        limit = self.renderer.max_model_len
        return RenderingParams(
            truncate_to=truncation_of(
                input_params.truncate_to,
                self.long_text,
                limit,
                dialect_truncates=input_params.dialect_truncates,
                refuses_longer=input_params.refuses_longer,
            ),
            truncation_side=input_params.truncation_side or self.renderer.texts.tokenizers.first.truncation_side,
            add_special_tokens=input_params.add_special_tokens,
            instruction=instruction_of(self.folder, input_params, limit),
            input_type=input_params.effective_input_type,
            task=input_params.task or input_params.prompt_name,
        )

    def adapter_of(self, rendering: RenderingParams) -> Adapter | None:
        """Return the adapter of rows that are rendered that way: the request's own, or that of their task.

        For texts of no task or side it is that of ``retrieval``, if there is one for both sides, as in vLLM.
        """
        if self.adapter is not None or not self.task_adapters:
            return self.adapter
        return (
            of_task(self.task_adapters, rendering.task)
            or of_task(self.task_adapters, SIDES.get(rendering.task))
            or of_task(self.task_adapters, SIDES.get(rendering.input_type, "retrieval"))
        )

    def label(self, index: int) -> str:
        """Return the name of a label; if the model has none, ``LABEL_0`` and so on, as in transformers."""
        labels = self.folder.spec.labels
        return labels[index] if index < len(labels) else f"LABEL_{index}"

    def require(self, task: PoolingTask, field: JobField | None = None) -> None:
        """Raise ``TaskNotSupportedError`` unless the model supports a task; ``field`` is the job's field of it."""
        tasks, no_score = self.folder.spec.tasks, self.folder.spec.no_score
        if task not in tasks:
            # Clients recognise the error by the beginning of vLLM's.
            raise TaskNotSupportedError(
                f"Unsupported task: {task!r}. Supported tasks of `{self.name}`: {', '.join(sorted(tasks))}."
                + (f" {no_score}" if task == "score" and no_score else ""),
                field=field,
            )


@lru_cache  # for each request
def _with_settings(computed_by: ComputedBy, *settings: str | int | None) -> ComputedBy:
    each = [fingerprint_of(loaded, *settings) for loaded in computed_by.fingerprint.split(", ") if loaded]
    return computed_by._replace(fingerprint=", ".join(each))
