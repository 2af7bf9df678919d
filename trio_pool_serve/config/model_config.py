"""Settings of the model."""

from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import gt, in_, matches_re, min_len, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_, switch
from trio_pool_serve.types import PoolingTask

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "int8"]
BackendChoice: TypeAlias = Literal["auto", "openvino", "torch", "compile"]
LongText: TypeAlias = Literal["refuse", "truncate", "chunk"]
Pooling: TypeAlias = Literal["cls", "mean", "last", "max", "weightedmean", "mean_sqrt_len"]


@Parameter(name="*", group=Group("Model", sort_key=1))
@frozen(kw_only=True)
class ModelConfig:
    """The model, and how it is loaded and computed."""

    served_model_name: Annotated[
        str | None,
        help_(
            "Model name in the API. Requests select the model by it, and responses contain it. Further names, after "
            "commas, select the same model; `*` stands for all other names.",
            default="MODEL",
        ),
    ] = field(default=None, validator=optional(matches_re(r"[^,]+(,[^,]+)*")))
    revision: Annotated[
        str | None,
        help_("Version of a model on the hub: a branch name, a tag name or a commit id.", default="main"),
    ] = None
    trust_remote_code: Annotated[bool, switch("Run Python code from the model's repository.")] = False
    dtype: Annotated[
        Dtype,
        help_(
            "Data type of weights and activations. auto: bfloat16 where the CPU or GPU computes it natively, else "
            "float32. int8: on CPU, by OpenVINO; weights and activations are quantised at the first start, which takes "
            "longer, and outputs differ a little from float32. Refused if they differ much."
        ),
    ] = field(default="auto", validator=in_(get_args(Dtype)))
    device: Annotated[
        str,
        help_(
            "Device to compute on: auto, cpu, cuda or cuda:N. cuda: all visible GPUs; with `--engine local` the first. "
            "cuda:N: the N-th of them alone, from 0. auto: as cuda, or the CPU if there is no GPU."
        ),
    ] = "auto"
    backend: Annotated[
        BackendChoice,
        help_(
            "What computes the model. auto: on CPU OpenVINO where it is installed, gives the same output as torch and "
            "is faster, else torch; on a GPU torch without padding and with CUDA graphs, where a check at load time "
            "finds the same outputs. openvino: OpenVINO, on CPU only. torch: torch with padding and without CUDA "
            "graphs. compile: torch.compile, which takes a minute or more at start and needs a C++ compiler."
        ),
    ] = field(default="auto", validator=in_(get_args(BackendChoice)))
    cache_dir: Annotated[
        str | None,
        help_(
            "Directory for models converted to OpenVINO's format, which later starts read. An empty value: they are "
            "not kept, and each replica converts.",
            default="`$XDG_CACHE_HOME/trio_pool_serve`, or `~/.cache/trio_pool_serve`",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        help_("Maximum length of an input in tokens, special tokens included.", default="from the model's files"),
    ] = field(default=None, validator=optional(gt(0)))
    long_text: Annotated[
        LongText | None,
        help_(
            "How to handle an input that is longer than the maximum, unless the request says whether to truncate it. "
            "refuse: respond with 400. truncate: truncate it. chunk: embed a text in windows and return the mean of "
            "their vectors, weighted by their numbers of tokens; refuse what is not a text to embed.",
            default="truncate for TEI's routes, refuse for all others",
        ),
    ] = field(default=None, validator=optional(in_(get_args(LongText))))
    pooling: Annotated[
        Pooling | None,
        help_(
            "How an embedding model's token states become one vector, in place of what its files declare.",
            default="from the model's files, and mean if they declare nothing",
        ),
    ] = field(default=None, validator=optional(in_(get_args(Pooling))))
    normalize: Annotated[
        bool | None,
        help_(
            "Scale an embedding model's vectors to unit length, or do not, in place of what its files declare. A "
            "request can choose.",
            default="from the model's files, and not if they declare nothing",
        ),
    ] = None
    pooler_config: Annotated[
        str | None,
        help_(
            'vLLM\'s settings for pooling as a JSON object, such as `{"pooling_type": "CLS"}`: sets `--pooling`, '
            "`--normalize`, `--task` and `--long-text`. `step_tag_id` and `returned_token_ids` make a causal language "
            "model judge steps.",
            default="none",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        help_("File with a Jinja chat template, or the template itself, in place of the model's own.", default="none"),
    ] = field(default=None, validator=optional(min_len(1)))
    default_prompt_name: Annotated[
        str | None,
        help_(
            "Name of the model's prompt template that is put in front of texts unless the request chooses one. An "
            "empty name is none.",
            default="from the model's files",
        ),
    ] = None
    default_prompt: Annotated[
        str | None,
        help_(
            "Text that is put in front of texts unless the request chooses one; instead of `--default-prompt-name`.",
            default="none",
        ),
    ] = None
    task: Annotated[
        PoolingTask | None,
        help_(
            "Task to serve the model for, and the default one of `/pooling`. The server refuses to start if the "
            "model's files do not support it. score "
            "also selects the yes/no scoring of Qwen3-Reranker for a causal language model whose files declare no "
            "task.",
            default="from the model's files",
        ),
    ] = field(default=None, validator=optional(in_(get_args(PoolingTask))))

    def __attrs_post_init__(self) -> None:
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise ValueError("--default-prompt and --default-prompt-name exclude each other.")
