"""The options of ``run-batch``: vLLM's, and those of the other commands for files."""

from pathlib import Path
from typing import Annotated, get_args

from attrs import evolve, field, frozen
from attrs.validators import in_
from cyclopts import Group, Parameter

from trio_pool_serve.bulk.bulk_options import OwnModelOptions
from trio_pool_serve.bulk.file_urls import digest_of_url, is_url
from trio_pool_serve.config.help import help_, switch
from trio_pool_serve.config.model_config import Dtype, ModelConfig


@Parameter(name="*", group=Group("Run", sort_key=1))
@frozen(kw_only=True)
class BatchOptions:
    """What is read and written."""

    input_file: Annotated[
        str,
        Parameter(
            name=("--input-file", "-i"),
            help="File with a request in each line, or a URL (http, https) to get it from. A copy is downloaded first.",
        ),
    ]
    output_file: Annotated[
        str,
        Parameter(
            name=("--output-file", "-o"),
            help="File to write, with a line for each request in the order of the input; or a URL to put it to, at the "
            "end of the run.",
        ),
    ]
    model: Annotated[str, help_("Model to compute with: a local folder or the id of a model on the Hugging Face hub.")]
    output_tmp_dir: Annotated[
        Path | None,
        help_(
            "Folder for the file that is put to a URL, and for its journal. It has to be the same to go on.",
            default="the current folder",
        ),
    ] = None
    overwrite: Annotated[bool, switch("Remove what an earlier run has written, and begin again.")] = False

    @property
    def output(self) -> Path:
        """The local file that is written; of a URL, the one that is put there."""
        if not is_url(self.output_file):
            return Path(self.output_file)
        return (self.output_tmp_dir or Path()) / f"run-batch-{digest_of_url(self.output_file)}.jsonl"

    @property
    def input(self) -> Path:
        """The local file that is read; of a URL, its copy beside the journal."""
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
        Parameter(
            name=("--dtype", "--model-dtype"), help="Data type of weights and activations, as `--dtype` of `serve`."
        ),
    ] = field(default="auto", validator=in_(get_args(Dtype)))

    @property
    def loading(self) -> ModelConfig:
        """The settings by which the server would load the model."""
        return evolve(super().loading, served_model_name=self.served_model_name)


@Parameter(name="*", group=Group("Accepted for vLLM, of no effect", sort_key=5))
@frozen(kw_only=True)
class IgnoredOptions:
    """vLLM's options about generated text and logging of requests, which this package never does, and about metrics.

    A run shows its progress; metrics of a process that ends with its file would be gone before they are read.
    """

    max_log_len: Annotated[int | None, help_("Requests are never logged.", default="none")] = None
    response_role: Annotated[str, help_("Nothing is generated.")] = "assistant"
    enable_prompt_tokens_details: Annotated[bool, switch("No prompts are cached.")] = False
    enable_force_include_usage: Annotated[bool, switch("Responses always have their usage.")] = False
    enable_metrics: Annotated[bool, switch("No metrics are served: a run shows its progress.")] = False
    host: Annotated[str | None, Parameter(name=("--host", "--url"), help="No metrics are served.")] = None
    port: Annotated[int | None, help_("No metrics are served.", default="none")] = None
