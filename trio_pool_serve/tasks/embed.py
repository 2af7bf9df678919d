"""Texts to vectors."""

from collections.abc import Mapping, Sequence

from attrs import Factory, define, frozen

from trio_pool_serve.engine.interface import Engine
from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.tasks.fan_out import AskedRow, compute_rows, vector_of
from trio_pool_serve.telemetry.timings import RequestTimings
from trio_pool_serve.types import Embed, Prompt, RenderingParams, TextPrompt, TruncationSide, Vectors

INSTRUCTION_CHARACTERS_PER_TOKEN = 8
"""Bounds a client's own instruction by the model's length: no script has many tokens longer than this."""


@frozen(eq=False, kw_only=True)
class EmbedJob:
    """What a client asks of the embed task, in nobody's dialect.

    ``truncate_to`` is in tokens; −1 stands for the model's maximum, ``None`` refuses longer inputs.
    ``prompt_name`` chooses one of the model's own instructions, ``instruction`` is one of the client's.
    """

    prompts: Sequence[Prompt]
    truncate_to: int | None = None
    truncation_side: TruncationSide = "right"
    add_special_tokens: bool = True
    prompt_name: str | None = None
    instruction: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    priority: int = 0

    @property
    def estimated_tokens(self) -> int:
        """A cheap guess of all prompts' tokens, for admission."""
        instruction = TextPrompt(self.instruction or "").estimated_tokens
        return sum(prompt.estimated_tokens for prompt in self.prompts) + instruction * len(self.prompts)


@frozen(eq=False)
class Embeddings:
    """The answer: one float32 vector per prompt, in order, and the tokens that were read."""

    vectors: list[Vectors]
    prompt_tokens: int


@define(eq=False)
class EmbedTask:
    """Embeds prompts with one model.

    ``instructions`` are the model's own, by name; ``default_instruction`` is put in front of texts when
    a request names none.
    """

    renderer: Renderer
    engine: Engine
    instructions: Mapping[str, str] = Factory(dict)
    default_instruction: str = ""

    async def embed(self, job: EmbedJob, timings: RequestTimings) -> Embeddings:
        """Return the vectors of a job's prompts.

        Raises ``InvalidRequestError``, ``OverloadedError`` and what ``Engine.submit`` raises.
        Cancellation: at once; nothing of the job stays in the queue.
        """
        rendering, pooling = self._rendering_params(job), self._pooling_params(job)
        with self.engine.admit(min(job.estimated_tokens, len(job.prompts) * self.renderer.max_model_len)):
            rows = await compute_rows(
                [AskedRow(prompt, rendering, (pooling,)) for prompt in job.prompts],
                renderer=self.renderer,
                engine=self.engine,
                timings=timings,
                priority=job.priority,
            )
        return Embeddings([vector_of(row) for row in rows], sum(row.tokens for row in rows))

    def _rendering_params(self, job: EmbedJob) -> RenderingParams:
        truncate_to, limit = job.truncate_to, self.renderer.max_model_len
        if truncate_to == -1:
            truncate_to = limit
        if truncate_to is not None and not 1 <= truncate_to <= limit:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be -1 or from 1 to {limit}, the model's maximum, not {truncate_to}.",
                param="truncate_prompt_tokens",
            )
        return RenderingParams(
            truncate_to=truncate_to,
            truncation_side=job.truncation_side,
            add_special_tokens=job.add_special_tokens,
            instruction=self._instruction(job),
        )

    def _instruction(self, job: EmbedJob) -> str:
        if job.instruction is not None:
            return self._checked(job.instruction)
        if job.prompt_name is None:
            return self.default_instruction
        if job.prompt_name not in self.instructions:
            known = ", ".join(sorted(self.instructions)) or "none"
            raise InvalidRequestError(
                f"This model has no prompt named {job.prompt_name!r}; it has: {known}.", param="prompt_name"
            )
        return self.instructions[job.prompt_name]

    def _checked(self, instruction: str) -> str:
        """Refuse what would be copied to every prompt and leave no room for any."""
        limit = self.renderer.max_model_len * INSTRUCTION_CHARACTERS_PER_TOKEN
        if len(instruction) > limit:
            raise InvalidRequestError(
                f"The prompt has {len(instruction)} characters; at most {limit} are taken.", param="prompt"
            )
        return instruction

    def _pooling_params(self, job: EmbedJob) -> Embed:
        limit = self.engine.dimensions
        if job.dimensions is not None and not 1 <= job.dimensions <= limit:
            raise InvalidRequestError(
                f"dimensions must be from 1 to {limit}, the model's own, not {job.dimensions}.",
                param="dimensions",
            )
        return Embed(dimensions=job.dimensions, normalize=job.normalize)
