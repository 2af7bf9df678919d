"""The options of the commands for files, each declared once."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from attrs import asdict, field, frozen
from attrs.validators import ge, gt, in_, optional
from cyclopts import Group, Parameter

from trio_pool_serve.bulk.file_urls import digest_of_url, is_url
from trio_pool_serve.config.computing_config import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS
from trio_pool_serve.config.help import help_, switch
from trio_pool_serve.config.model_config import BackendChoice, Dtype
from trio_pool_serve.config.setting import matches
from trio_pool_serve.errors import require
from trio_pool_serve.prompts import InputType
from trio_pool_serve.runs.run import OnError

VectorFormat: TypeAlias = Literal["float32", "float16", "int8", "binary"]

SHARD = r"[1-9]\d{0,5}/[1-9]\d{0,5}"


@Parameter(name="*", group=Group("Run", sort_key=1))
@frozen(kw_only=True)
class RunOptions:
    """Input and output of a run, and the policy for rows that fail."""

    model: Annotated[
        str | None,
        help_(
            "Model that computes in this process: a local folder or the id of a model on the Hugging Face hub. With "
            "`--url`: the name of the server's model.",
            default="none",
        ),
    ] = None
    url: Annotated[
        str | None,
        help_("URL of the server that computes instead, such as `http://127.0.0.1:8000`; any with OpenAI's API."),
    ] = None
    api_key: Annotated[str | None, help_("API key of the server.", default="`OPENAI_API_KEY`")] = field(
        default=None, repr=False
    )
    concurrency: Annotated[int, help_("Number of requests that are sent to the server at a time.")] = field(
        default=8, validator=gt(0)
    )
    id_column: Annotated[
        str | None,
        Parameter(
            name=("--id",),
            help="Column with the ids of rows, which are copied to the output.",
            show_default=lambda _: "`id` if there is one, else the number of the row",
        ),
    ] = None
    input_format: Annotated[
        str | None,
        help_("Format of the input: jsonl, csv, tsv, parquet or arrow.", default="by the file name's extension"),
    ] = None
    output_format: Annotated[
        str | None,
        help_("Format of the output: jsonl, csv, tsv, parquet or arrow.", default="by the file name's extension"),
    ] = None
    on_error: Annotated[
        OnError,
        help_(
            "How to handle a row that cannot be computed. fail: stop. null: write the row without a result. skip: omit "
            "the row. null and skip list place, id and reason in OUT.errors.jsonl."
        ),
    ] = field(default="fail", validator=in_(get_args(OnError)))
    shard: Annotated[
        str,
        help_("Part of the rows to compute: `3/16` is every sixteenth row, beginning with the third."),
    ] = field(default="1/1", validator=matches(SHARD, "N/M, such as 3/16"))
    limit: Annotated[int | None, help_("Compute only the first N rows of the input.", default="all")] = field(
        default=None, validator=optional(ge(0))
    )
    rows_per_file: Annotated[
        int, help_("Input rows per file of a Parquet or Arrow output. A resumed run starts a new file.")
    ] = field(default=8192, validator=gt(0))
    overwrite: Annotated[bool, switch("Delete the output of an earlier run and start again.")] = False

    def __attrs_post_init__(self) -> None:
        require(
            self.numbers.start < self.numbers.step,
            f"--shard {self.shard}: shards are numbered from 1 to {self.numbers.step}.",
            ValueError,
        )

    @property
    def numbers(self) -> range:
        """The numbers of the rows that are computed."""
        shard, shards = map(int, self.shard.split("/"))
        return range(shard - 1, sys.maxsize if self.limit is None else self.limit, shards)


@Parameter(name="*", group=Group("Text", sort_key=2))
@frozen(kw_only=True)
class TextOptions:
    """How texts are rendered."""

    prompt_name: Annotated[
        str | None, help_("Name of the model's prompt template that is prepended to texts.", default="the model's")
    ] = None
    input_type: Annotated[
        InputType | None, help_("Role of the texts in a search: query or document.", default="none")
    ] = field(default=None, validator=optional(in_(get_args(InputType))))
    truncate: Annotated[
        bool, switch("Truncate texts that exceed the model's maximum length. Otherwise, their rows fail.")
    ] = False


@Parameter(name="*", group=Group("Model", sort_key=4))
@frozen(kw_only=True)
class OwnModelOptions:
    """How a model that is computed in this process is loaded; of no effect with ``--url``."""

    revision: Annotated[
        str | None, help_("Version of a model on the hub: a branch, a tag or a commit.", default="main")
    ] = None
    trust_remote_code: Annotated[bool, switch("Run Python code from the model's repository.")] = False
    adapter_base: Annotated[
        str | None, help_("Base model of a LoRA adapter: a folder or a hub id.", default="from the adapter's files")
    ] = None
    model_dtype: Annotated[Dtype, help_("Data type of weights and activations; see `serve --dtype`.")] = field(
        default="auto", validator=in_(get_args(Dtype))
    )
    device: Annotated[str, help_("Device: auto, cpu, cuda or cuda:N; see `serve --device`.")] = "auto"
    backend: Annotated[BackendChoice, help_("Backend that computes the model; see `serve --backend`.")] = field(
        default="auto", validator=in_(get_args(BackendChoice))
    )
    max_model_len: Annotated[
        int | None, help_("Maximum tokens of an input, including special tokens.", default="from the model's files")
    ] = field(default=None, validator=optional(gt(0)))
    max_batch_tokens: Annotated[
        int | None,
        help_(
            "Maximum tokens in a batch, including padding.",
            default=f"{GPU_BATCH_TOKENS} on a GPU, {CPU_BATCH_TOKENS} on CPU",
        ),
    ] = field(default=None, validator=optional(gt(0)))
    replicas: Annotated[
        int | None,
        help_(
            "Number of batches computed at a time.", default="1 per GPU; on CPU up to 4, or more if a trial is faster"
        ),
    ] = field(default=None, validator=optional(gt(0)))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the model, by the server's names."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        given["dtype"] = given.pop("model_dtype")
        return given


@Parameter(name="*", group=Group("Run", sort_key=1))
@frozen(kw_only=True)
class BatchOptions:
    """Input and output of ``run-batch``."""

    input_file: Annotated[
        str,
        Parameter(
            name=("--input-file", "-i"),
            help="File with one request per line, or its URL (http, https), which is downloaded first.",
        ),
    ]
    output_file: Annotated[
        str,
        Parameter(
            name=("--output-file", "-o"),
            help="File to write: one line per request, in the order of the input. If it is a URL, the file is uploaded "
            "by PUT at the end of the run.",
        ),
    ]
    model: Annotated[str, help_("Model that computes: a local folder or the id of a model on the Hugging Face hub.")]
    output_tmp_dir: Annotated[
        Path | None,
        help_(
            "Folder for a file that is uploaded, and for its journal. To resume, use the same folder.",
            default="the current folder",
        ),
    ] = None
    overwrite: Annotated[bool, switch("Delete the output of an earlier run and start again.")] = False

    @property
    def output(self) -> Path:
        """The local file that is written, which is uploaded if ``output_file`` is a URL."""
        if not is_url(self.output_file):
            return Path(self.output_file)
        return (self.output_tmp_dir or Path()) / f"run-batch-{digest_of_url(self.output_file)}.jsonl"

    @property
    def input(self) -> Path:
        """The local file that is read: for a URL, its copy beside the journal."""
        if not is_url(self.input_file):
            return Path(self.input_file)
        return self.output.with_name(f"{self.output.name}.{digest_of_url(self.input_file)}.input")


@Parameter(name="*", group=Group("Model", sort_key=4))
@frozen(kw_only=True)
class BatchModelOptions(OwnModelOptions):
    """How the model is loaded, with vLLM's names too."""

    served_model_name: Annotated[
        str | None, help_("Name of the model in requests and responses.", default="the value of `--model`")
    ] = None
    model_dtype: Annotated[
        Dtype,
        Parameter(name=("--dtype", "--model-dtype"), help="Data type of weights and activations; see `serve --dtype`."),
    ] = field(default="auto", validator=in_(get_args(Dtype)))


@Parameter(name="*", group=Group("Accepted for vLLM, without effect", sort_key=5))
@frozen(kw_only=True)
class IgnoredOptions:
    """vLLM's options about generated text and logging of requests, which this package never does, and about metrics.

    A run shows its progress; metrics of a process that ends with its file would be gone before they are read.
    """

    max_log_len: Annotated[int | None, help_("Requests are never logged.", default="none")] = None
    response_role: Annotated[str, help_("Nothing is generated.")] = "assistant"
    enable_prompt_tokens_details: Annotated[bool, switch("No prompts are cached.")] = False
    enable_force_include_usage: Annotated[bool, switch("Responses always contain usage.")] = False
    enable_metrics: Annotated[bool, switch("Metrics are not served; a run prints its progress.")] = False
    host: Annotated[str | None, Parameter(name=("--host", "--url"), help="Metrics are not served.")] = None
    port: Annotated[int | None, help_("Metrics are not served.", default="none")] = None


def errors_path(output: Path) -> Path:
    """Return where the rows that failed are listed."""
    return output.with_name(f"{output.name}.errors.jsonl")


def journal_path(output: Path) -> Path:
    """Return where the journal of a run is."""
    return output.with_name(f"{output.name}.journal")
