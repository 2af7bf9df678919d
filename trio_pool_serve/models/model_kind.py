"""The records of one kind of model, of a folder with a model of that kind, and of the declarations in its files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from attrs import Factory, frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.files.folder_files import FolderFiles, ModuleFiles
from trio_pool_serve.models.files.quantized_files import Quantization
from trio_pool_serve.models.token_pooling import TokenPooling
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.chat.chat_pair import ChatFormat
from trio_pool_serve.rendering.media.image_format import ImageFormat
from trio_pool_serve.rendering.text.pair_format import PairFormat
from trio_pool_serve.rendering.text.text_format import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import PoolingTask, SparseEmbed, SparseLookup

if TYPE_CHECKING:
    from trio_pool_serve.runner.openvino.exported_graph import BuiltHeads

Scoring: TypeAlias = Literal["pairs", "vectors", "late_interaction"]
"""How two texts are compared. pairs: the model reads both together. vectors: one vector per text.
late_interaction: one vector per token."""

Similarity: TypeAlias = Literal["cosine", "dot", "euclidean", "manhattan"]
"""How two vectors are compared. Distances are negated, so that greater means more similar."""


@frozen(kw_only=True)
class ModelSpec:
    """The tasks of a model, and how its inputs are prepared; each kind overrides the defaults that differ."""

    scoring: ClassVar[Scoring | None] = None
    supports_prompt_embeds: ClassVar[bool] = False
    """Whether ``prompt_embeds`` can replace token ids: the heads use hidden states only, never token ids."""
    supports_messages: ClassVar[bool] = True
    """Whether its chat template is for inference, so that ``messages`` are accepted."""
    keeps_input_type_prompt: ClassVar[bool] = False
    """Whether a client's own instruction follows the prompt of its input type instead of replacing it."""
    pools_token_states: ClassVar[bool] = False
    """Whether a Pooling module computes its vectors from the tokens' states."""
    by_numpy: ClassVar[bool] = False
    """Whether NumPy computes it on CPU, in microseconds for each text."""
    reads_tokenizer_file: ClassVar[bool] = False
    """Whether tokenizer.json alone is the tokenizer, as the ``tokenizers`` library reads it."""

    modules: tuple[ModuleFiles, ...] = ()
    """The modules of sentence-transformers after the transformer, in order."""
    similarity: Similarity = "cosine"
    """How ``scoring == "vectors"`` compares them: ``similarity_fn_name`` of config_sentence_transformers.json."""
    mean_scores: bool = False
    """Whether a score of late interaction is divided by the number of the query's vectors."""
    token_pooling: TokenPooling | None = None
    """How the vectors of tokens are pooled after the modules; ``None``: not."""
    labels: tuple[str, ...] = ()
    """Label names, in the order of the outputs of ``Classify`` and ``TokenClassify``."""
    marker_tokens: tuple[str, ...] = ()
    """Texts that the tokenizer must not split, if they are in its vocabulary: single tokens in training."""
    extra_prompts: Mapping[str, str] = Factory(dict)
    """Prompt templates by name, in addition to the ones in config_sentence_transformers.json."""
    conversation: ChatFormat | None = None
    """How every input is put into the chat template; ``None`` if only ``messages`` are."""
    vocab_size: int = 0
    """Number of tokens, for kinds that do not read it in config.json."""
    route_files: tuple[FolderFiles, ...] = ()
    """The files of each route, by number, of a model with several routes."""
    route_numbers: Mapping[InputType | None, int] = Factory(dict)
    """The number of the route of texts, by input type; input types without a route are missing."""
    no_score: str = ""
    """Why ``score`` is not among its tasks although others of its kind have it; for the error."""
    assumption: str = ""
    """A warning about settings that the files do not declare and the server assumes; empty if there are none."""

    @property
    def tasks(self) -> frozenset[PoolingTask]:
        """The tasks that the model supports."""
        return frozenset()

    @property
    def pooling(self) -> str:
        """Pooling type, as ``GET /info`` reports it: the modes of its Pooling module, joined by ``+``, or ``none``."""
        declared = (pooling_modes(module.config) for module in self.modules if module.name == "Pooling")
        return next(map("+".join, declared), "none")

    @property
    def pools_instruction(self) -> bool:
        """Whether the pooler includes the instruction's tokens, as nearly every model's does.

        In a conversation they cannot be distinguished from the others.
        """
        return self.uses_chat_template or all(
            module.config.get("include_prompt", True) for module in self.modules if module.name == "Pooling"
        )

    @property
    def sparse_indices(self) -> Literal["tokens", "latents"]:
        """The meaning of an index of a sparse vector."""
        return "tokens"

    @property
    def multi_label(self) -> bool:
        """Whether several labels can apply to one input at once."""
        return False

    @property
    def pools_chunks(self) -> bool:
        """Whether it can embed the chunks of a document (late chunking): it takes means of plain texts' states."""
        return self.pooling == "mean" and not self.uses_chat_template

    @property
    def embeds_windows(self) -> bool:
        """Whether long texts can be embedded in windows: only texts that are rendered by themselves can."""
        return "embed" in self.tasks and not self.uses_chat_template and not self.pads_texts

    @property
    def normalizes(self) -> bool:
        """Whether its vectors have unit length by default: its last module after pooling is a Normalize."""
        return self.pools_token_states and [module.name for module in self.modules[-1:]] == ["Normalize"]

    @property
    def pads_texts(self) -> bool:
        """Whether every text is padded to a fixed length, as the model was trained."""
        return False

    @property
    def uses_chat_template(self) -> bool:
        """Whether every input is rendered as a conversation of one user message.

        The instruction is a system message before it.
        """
        return self.conversation is not None

    @property
    def max_input_tokens(self) -> int:
        """Maximum tokens of any input type, even above the tokenizer's limit; 0 if that is the maximum."""
        return 0

    @property
    def undeclared_max_tokens(self) -> int | None:
        """Maximum tokens of an input if the files declare none; ``None``: then they must."""
        return None

    @property
    def particulars(self) -> Mapping[str, str]:
        """Lines of the report of `check` for models of this kind, by name."""
        return {}

    def sparse_params(self, _: InputType | None) -> SparseEmbed | SparseLookup:
        """Return the params by which the sparse vector of a text of an input type is computed."""
        return SparseEmbed()


LEGACY_POOLING_KEYS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def pooling_modes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the pooling types in a Pooling module's config, in either of its two spellings."""
    modes = config.get("pooling_mode") or [name for name, key in LEGACY_POOLING_KEYS.items() if config.get(key)]
    return (modes,) if isinstance(modes, str) else tuple(modes) or ("mean",)


Spec = TypeVar("Spec", bound=ModelSpec)


@frozen(kw_only=True)
class ModelFolder(Generic[Spec]):
    """A local folder with a model, and the declarations in its files."""

    path: Path
    file_states: Mapping[str, object] = Factory(dict)
    """The files' states before any of them was read."""
    transformer_path: Path
    transformer_config: Mapping[str, Any]
    """``config.json`` of the transformer, or its text part where it has several."""
    native_config: Mapping[str, Any] | None = None
    """``config.json`` with the names of transformers' class, if the file has others."""
    end_token: str | None = None
    """A token after every text that tokenizer.json may lack."""
    quantization: Quantization | None = None
    """How the checkpoint's weights are quantised; ``None`` if they are not."""
    kind: "ModelKind[Spec]"
    spec: Spec
    max_model_len: int
    """Maximum input length in tokens, special tokens included."""
    lower_case: bool = False
    task_adapters: Mapping[str, Path] = Factory(dict)
    """The folders of adapters that belong to the model, by task."""
    prompts: Mapping[str, str] = Factory(dict)
    default_prompt_name: str | None = None
    default_prompt: str | None = None
    """``--default-prompt``, which replaces the prompt of that name."""
    structured_messages: bool | None = None
    """Whether message content is a list of parts; ``None`` if the chat template's text decides."""
    task: PoolingTask | None = None
    """``--task``: the task of requests that name none."""
    tokenizer_config: Mapping[str, Any] = Factory(dict)
    """``tokenizer_config.json``."""
    chat_template: str | None = None
    """``--chat-template``, in place of the tokenizer's."""

    routes: "tuple[AnyModelFolder, ...]" = ()
    """Each route as a model of its own, by number, of a model with several routes."""

    @property
    def reads_images(self) -> bool:
        """Whether the model accepts images: known without loading its image processor."""
        return self.kind.image_format is not None

    def image_format(self) -> ImageFormat | None:
        """Return the format of its images, ``None`` if it accepts none. Imports transformers, which blocks for seconds.

        Raises ``ModelLoadError`` if its image processor does not match the model.
        """
        return None if self.kind.image_format is None else self.kind.image_format(self)

    @property
    def model_type(self) -> str:
        """``model_type`` of config.json."""
        return str(self.transformer_config.get("model_type", "unknown"))

    @property
    def pad_token_id(self) -> int:
        """The id to pad rows with. Padding is masked, so any id serves; some configs have none, or −1."""
        return max(0, self.transformer_config.get("pad_token_id") or 0)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the token embedding; token ids are smaller."""
        return self.spec.vocab_size or int(self.transformer_config["vocab_size"])


AnyModelFolder: TypeAlias = ModelFolder[Any]
"""A folder with a model of any kind."""


@frozen(kw_only=True, eq=False)
class ModelKind(Generic[Spec]):
    """One kind of model: how its folders are recognised, how its inputs are rendered and how it is loaded.

    ``read`` returns the spec that a folder's files declare, ``None`` for another kind; it raises ``ModelLoadError``
    for a folder of its kind that requires something unsupported. ``load`` names the function (``module:function``)
    that makes a ``LoadedModel`` of a ``ModelFolder`` and ``LoadingParams``, blocking for seconds. It is a name
    because an API process imports no torch. ``open_runner`` names the ``RunnerLoader`` of a kind that neither torch
    nor OpenVINO computes; then there is no ``load``. ``exported_heads`` returns the heads of a spec, for folders whose
    weights torch cannot load; it raises ``UnusableGraphError``.

    ``text_format``, ``pair_format`` and ``image_format`` return how a text, a pair of texts and an image are rendered
    (``None``: the model accepts no images); by default as most models do. They raise ``ModelLoadError`` if the
    folder's files contradict each other.
    """

    read: Callable[[FolderFiles, ModelConfig], Spec | None]
    load: str = ""
    open_runner: str = ""
    exported_heads: "Callable[[Spec], BuiltHeads] | None" = None
    text_format: Callable[[Spec, Tokenizer], TextFormat] = lambda spec, tokenizer: TextFormat()  # noqa: ARG005
    pair_format: Callable[[Spec, Tokenizer], PairFormat] = lambda spec, tokenizer: PairFormat()  # noqa: ARG005
    image_format: Callable[[ModelFolder[Spec]], ImageFormat] | None = None
