"""Settings of models, and of when they are loaded and unloaded."""

from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import deep_iterable, ge, gt, in_, optional

from trio_pool_serve.config.setting import Setting, matches
from trio_pool_serve.types import PoolingTask

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
BackendChoice: TypeAlias = Literal["auto", "openvino", "torch", "compile"]
LongText: TypeAlias = Literal["refuse", "truncate", "chunk"]
Pooling: TypeAlias = Literal["cls", "mean", "last", "max", "weightedmean", "mean_sqrt_len"]


@frozen(kw_only=True)
class ModelConfig:
    """The model, and how it is loaded and computed."""

    served_model_name: Annotated[
        str | None,
        Setting(
            "Names of the model in the API, separated by commas. Requests may use any of them; responses contain the "
            "first. `*` stands for all other names.",
            default="MODEL",
        ),
    ] = field(
        default=None, validator=optional(matches(r"/*[^,/][^,]*(,/*[^,/][^,]*)*", "a name, or several with commas"))
    )
    revision: Annotated[
        str | None,
        Setting("Version of a model on the hub: a branch, a tag or a commit id.", default="main"),
    ] = None
    adapter_base: Annotated[
        str | None,
        Setting(
            "Base model of a LoRA adapter that is served by itself: a folder or a hub id.",
            default="base_model_name_or_path of the adapter, or a folder of that name beside it",
        ),
    ] = None
    trust_remote_code: Annotated[bool, Setting("Run Python code from the model's repository.")] = False
    dtype: Annotated[
        Dtype,
        Setting(
            "Data type of weights and activations. auto: bfloat16 if the CPU or GPU computes it natively and the model "
            "can be computed in it, else float32. float16: for GPUs; on CPU the same as auto. int8: on CPU, "
            "by OpenVINO. The first start in int8 quantises the model, which takes longer. Outputs differ slightly "
            "from float32; if they differ too much, the server refuses the model. fp8: on GPUs from compute capability "
            "8.9, bfloat16 with the linear layers of the transformer's blocks in FP8, for large models of texts."
        ),
    ] = field(default="auto", validator=in_(get_args(Dtype)))
    device: Annotated[
        str,
        Setting(
            "Device: auto, cpu, cuda or cuda:N. auto: cuda if there is a GPU, else cpu. cuda: all visible GPUs; with "
            "`--engine local` only the first. cuda:N: only GPU N of the visible ones, counted from 0."
        ),
    ] = field(default="auto", validator=matches(r"auto|cpu|cuda(:\d{1,4})?", "auto, cpu, cuda or cuda:N"))
    backend: Annotated[
        BackendChoice,
        Setting(
            "Backend that computes the model. auto, on CPU: OpenVINO if it is installed, matches torch's output and "
            "is faster, else torch. auto, on a GPU: torch without padding, with CUDA graphs and compiled, each if a "
            "check finds the same outputs. openvino: OpenVINO, only on CPU. torch: torch with padding, without CUDA "
            "graphs, not compiled. compile: as auto on a GPU; on CPU torch without padding, compiled."
        ),
    ] = field(default="auto", validator=in_(get_args(BackendChoice)))
    cache_dir: Annotated[
        str | None,
        Setting(
            "Directory for models that were converted to OpenVINO's format or compiled, which later starts load. If it "
            "is empty, nothing is kept, and each replica converts or compiles the model itself.",
            default="`$XDG_CACHE_HOME/trio_pool_serve`, or `~/.cache/trio_pool_serve`",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Setting("Maximum tokens per input, with special tokens.", default="from the model's files"),
    ] = field(default=None, validator=optional(gt(0)))
    long_text: Annotated[
        LongText | None,
        Setting(
            "How to handle inputs that are too long. Fields of a request take precedence. refuse: respond with 400. "
            "truncate: truncate the input. chunk: embed a text in windows and return the mean of their vectors, "
            "weighted by tokens. With chunk, TEI's routes truncate, and inputs that are not texts to embed are "
            "refused.",
            default="truncate for TEI's routes, else refuse",
        ),
    ] = field(default=None, validator=optional(in_(get_args(LongText))))
    pooling: Annotated[
        Pooling | None,
        Setting(
            "Pooling of token states into one vector.",
            default="from the model's files, else mean",
        ),
    ] = field(default=None, validator=optional(in_(get_args(Pooling))))
    normalize: Annotated[
        bool | None,
        Setting(
            "Scale vectors to unit length. A request can override it.",
            default="from the model's files, else off",
        ),
    ] = None
    pooler_config: Annotated[
        str | None,
        Setting(
            'vLLM\'s settings of pooling as a JSON object, such as `{"pooling_type": "CLS"}`. It sets `--pooling`, '
            "`--normalize`, `--task` and `--long-text`. `step_tag_id` and `returned_token_ids` let a causal language "
            "model score the steps of a solution.",
            default="none",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Setting("Jinja chat template that replaces the model's own: a file, or the template itself.", default="none"),
    ] = field(default=None, validator=optional(matches(r"(?s).+", "a file or a template")))
    default_prompt_name: Annotated[
        str | None,
        Setting(
            "Name of the model's prompt template that is prepended to texts unless the request chooses one. If the "
            "name is empty, nothing is prepended.",
            default="from the model's files",
        ),
    ] = None
    default_prompt: Annotated[
        str | None,
        Setting(
            "Text that is prepended to texts unless the request chooses a prompt. Excludes `--default-prompt-name`.",
            default="none",
        ),
    ] = None
    adapter: Annotated[
        tuple[str, ...],
        Setting(
            "LoRA adapter of the model: `NAME=FOLDER`, with a local folder or the id of an adapter on the hub. Repeat "
            "the flag for several adapters. Requests select an adapter by its name, as if it were a model. With "
            "several models, set adapters in their tables of `--config`.",
            default="none",
        ),
    ] = field(
        default=(),
        converter=tuple,
        validator=deep_iterable(matches(r"[^=,]+=.+", "NAME=FOLDER, such as a=/adapters/a")),
    )
    task: Annotated[
        PoolingTask | None,
        Setting(
            "Task of the model, and the default task of `/pooling`. If the model's files do not support it, the server "
            "does not start. score also selects the yes/no scoring of Qwen3-Reranker if the files do not show that it "
            "is one; embed also lets a language model without modules.json score by its vectors.",
            default="from the model's files",
        ),
    ] = field(default=None, validator=optional(in_(get_args(PoolingTask))))

    def __attrs_post_init__(self) -> None:
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise ValueError("Set either --default-prompt or --default-prompt-name, not both.")


@frozen(kw_only=True)
class ModelChangesConfig:
    """Loading and unloading of models while the server runs. Requires `--engine local`."""

    model_api: Annotated[
        bool,
        Setting(
            "Let API keys with `admin` load models by `POST /v1/models` and unload them by `DELETE /v1/models/NAME`. "
            "Requires `--api-key` or `--api-keys-file`. See SECURITY.md."
        ),
    ] = False
    idle_unload_s: Annotated[
        float,
        Setting(
            "Time without a request after which a model is unloaded; 0 is never. The next request for the model waits "
            "until it is loaded again."
        ),
    ] = field(default=0.0, validator=ge(0))
    max_loaded_models: Annotated[
        int | None,
        Setting(
            "Maximum number of loaded models. If a request needs another one, the least recently used model is "
            "unloaded. At start-up, the first N models are loaded.",
            default="no limit",
        ),
    ] = field(default=None, validator=optional(gt(0)))

    @property
    def flag(self) -> str | None:
        """The flag of a setting by which models are loaded or unloaded; ``None`` if no model ever is."""
        flags = {
            "--model-api": self.model_api,
            "--idle-unload-s": self.idle_unload_s,
            "--max-loaded-models": self.max_loaded_models is not None,
        }
        return next((flag for flag, is_set in flags.items() if is_set), None)
