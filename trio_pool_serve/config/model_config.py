"""Settings of the model."""

from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, in_, matches_re, min_len, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_, switch
from trio_pool_serve.types import PoolingTask

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "int8"]
CpuBackend: TypeAlias = Literal["auto", "openvino", "torch"]
Attention: TypeAlias = Literal["auto", "padded"]
LongText: TypeAlias = Literal["refuse", "chunk"]
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
    cpu_backend: Annotated[
        CpuBackend,
        help_(
            "What computes a model on CPU. auto: OpenVINO where it is installed, gives the same output as torch and is "
            "faster, which is checked when the model is loaded; else torch."
        ),
    ] = field(default="auto", validator=in_(get_args(CpuBackend)))
    cache_dir: Annotated[
        str | None,
        help_(
            "Directory for models converted to OpenVINO's format, which later starts read. An empty value: they are "
            "not kept, and each replica converts.",
            default="`$XDG_CACHE_HOME/trio_pool_serve`, or `~/.cache/trio_pool_serve`",
        ),
    ] = None
    attention: Annotated[
        Attention,
        help_(
            "How to compute inputs of different lengths in one batch. auto: without padding on a GPU in half precision "
            "if a check at load time finds the same outputs, else padded. padded: pad every input to the longest one."
        ),
    ] = field(default="auto", validator=in_(("auto", "padded")))
    cuda_graphs: Annotated[
        bool, help_("Capture CUDA graphs of small batches when the model is loaded, and replay them.")
    ] = True
    compile: Annotated[
        bool,
        switch(
            "Compile the model with torch.compile when it is loaded. Takes a minute or more and needs a C++ compiler. "
            "Disables attention without padding and CUDA graphs."
        ),
    ] = False
    max_model_len: Annotated[
        int | None,
        help_("Maximum length of an input in tokens, special tokens included.", default="from the model's files"),
    ] = field(default=None, validator=optional(gt(0)))
    long_text: Annotated[
        LongText,
        help_(
            "How to handle a text to embed that is longer than the maximum and that the request does not truncate. "
            "refuse: respond with 400. chunk: embed it in windows and return the mean of their vectors, weighted by "
            "their numbers of tokens."
        ),
    ] = field(default="refuse", validator=in_(("refuse", "chunk")))
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
            "`--normalize`, `--task`, `--long-text`, `--step-tag-id` and `--returned-token-ids`.",
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
    step_tag_id: Annotated[
        int | None,
        help_("Id of the token that ends a step, for process reward models.", default="from the model's files"),
    ] = field(default=None, validator=optional(ge(0)))
    returned_token_ids: Annotated[
        tuple[int, ...],
        help_(
            "Ids of the tokens whose probabilities are the scores of a step, for causal language models that judge "
            "steps, as a JSON list: `[648,387]`. Requires `--step-tag-id`.",
            default="none",
            negative=(),
        ),
    ] = field(default=(), validator=deep_iterable(ge(0)))

    def __attrs_post_init__(self) -> None:
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise ValueError("--default-prompt and --default-prompt-name exclude each other.")
