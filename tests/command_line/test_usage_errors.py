"""A wrong argument, variable or key is never ignored: one line says where it stands and what is accepted."""

import os
import sys

import pytest

from trio_pool_serve.cli import main
from trio_pool_serve.command_line.server_commands import ENVIRONMENT_PREFIX

pytestmark = pytest.mark.unit

DTYPES = "auto, float32, bfloat16, float16, int8, fp8"

ARGUMENTS = {
    "serve m --prot 8": "Unknown flag --prot; did you mean --port?",
    "serve m --prot=8": "Unknown flag --prot; did you mean --port?",
    "serve m --frob": "Unknown flag --frob; --help-all lists all flags.",
    "serve m --dtype float17": f"--dtype is `float17`; accepted: {DTYPES}.",
    "serve m --port abc": "--port: `abc` is not a whole number.",
    "serve m --port 65536": "--port must be from 0 to 65535, not 65536.",
    "serve m --port -1": "--port must be from 0 to 65535, not -1.",
    "serve m --port": "--port needs a value.",
    "serve m --access-log=maybe": "--access-log is `maybe`; it must be true or false.",
    "serve m --max-queue-s 0": "--max-queue-s must be more than 0, not 0.0.",
    "serve m --max-batch-tokens 1k": "--max-batch-tokens: `1k` is not auto or a whole number.",
    "engine m": "--listen is missing.",
    "convert": "MODEL is missing.",
    "serv m": "Unknown command serv; did you mean serve?",
    "org/name": (
        "Unknown command org/name; --help lists all commands. To serve a model: trio-pool-serve serve org/name"
    ),
    "--model-id org/name --port 9": (
        "Unknown command --model-id; --help lists all commands. "
        "To serve a model: trio-pool-serve serve org/name --port 9"
    ),
    **{
        f"serve m --device {device}": f"--device: `{device}` is not auto, cpu, cuda or cuda:N."
        for device in ("gpu", "mps", "cuda:-1", "cuda:x", "cuda:12345")
    },
    "serve m --json-output=maybe": "--json-output takes no value but true or false.",
    "serve m --served-model-name a b": "Separate the names of --served-model-name by commas: write a,b.",
    "cache frobnicate": "Unknown command frobnicate; --help lists all commands.",
    "cache list x": "Unexpected argument `x`.",
    "hosts add": "HOST is missing.",
    "embed": "IN is missing.",
    "embed in.jsonl": "OUT is missing.",
    "embed --frob in.jsonl out.jsonl": "Unknown flag --frob; --help-all lists all flags.",
    "embed in.jsonl out.jsonl --colum x": "Unknown flag --colum; did you mean --column?",
    "embed in.jsonl out.jsonl --limit -1": "--limit must be at least 0, not -1.",
    "embed in.jsonl out.jsonl --limit x": "--limit is `x`; it must be a whole number.",
    "embed in.jsonl out.jsonl --shard x": "--shard: `x` is not N/M, such as 3/16.",
    "embed in.jsonl out.jsonl --on-error maybe": "--on-error is `maybe`; accepted: fail, null, skip.",
    "bench": "URL is missing.",
    "bench http://h --clients 0": "--clients must be from 1 to 10000, not 0.",
    "bench http://h --route x": "--route: `x` is not a route, such as /v1/embeddings.",
    "completion tcsh": "SHELL is `tcsh`; accepted: bash, zsh, fish.",
}

FILES = {
    "prot = 1": "prot is not a setting; did you mean port?",
    "frobnicate = 1": "frobnicate is not a setting. docs/settings.md lists all settings.",
    'dtype = "float17"': f"dtype is `float17`; accepted: {DTYPES}.",
    'port = "abc"': "port: `abc` is not a whole number.",
    "[network]\nport = 1": "[network] is not a table of this file; write settings at its beginning.",
    "[models.a]\nmodel = 'm'\ndtpe = 'int8'": "[models.a]: Unknown key dtpe; did you mean dtype?",
    "[models.a]\nmodel = 'm'\ndevice = 'cpu'": (
        "[models.a]: `device` is not a setting of one model; it is a flag of the server."
    ),
}

VARIABLES = {
    "PROT": "TRIO_POOL_SERVE_PROT is not a setting; did you mean TRIO_POOL_SERVE_PORT?",
    "FROBNICATE": "TRIO_POOL_SERVE_FROBNICATE is not a setting. docs/settings.md lists all settings.",
    "port": "TRIO_POOL_SERVE_port is not a setting: names of variables are in capitals.",
    "DTYPE": f"TRIO_POOL_SERVE_DTYPE is `1`; accepted: {DTYPES}.",
    "ACCESS_LOG": "TRIO_POOL_SERVE_ACCESS_LOG is `maybe`; it must be true or false.",
}


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Return what the command prints to standard error; it exits with status 2."""
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["trio-pool-serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        printed = capfd.readouterr()
        assert not printed.out
        return printed.err

    return run


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS.items(), ids=ARGUMENTS)
def test_wrong_arguments(refused, arguments, message):
    assert refused(*arguments.split()) == f"trio-pool-serve: {message}\n"


@pytest.mark.parametrize(("text", "message"), FILES.items(), ids=FILES)
def test_wrong_keys_of_the_file(refused, tmp_path, text, message):
    (path := tmp_path / "serve.toml").write_text(text)
    assert refused("serve", "m", "--config", str(path)) == f"trio-pool-serve: {path}: {message}\n"


@pytest.mark.parametrize(("name", "message"), VARIABLES.items(), ids=VARIABLES)
def test_wrong_variables(refused, monkeypatch, name, message):
    monkeypatch.setenv(ENVIRONMENT_PREFIX + name, "maybe" if name == "ACCESS_LOG" else "1")
    assert refused("serve", "m") == f"trio-pool-serve: {message}\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SERVICE_HOST", "10.0.0.1"), ("SERVICE_PORT_HTTP", "80"), ("PORT_80_TCP_ADDR", "10.0.0.1"),
        ("METRICS_PORT", "tcp://10.0.0.1:80"), ("SSL_KEYFILE_PASSWORD", "secret"), ("LISTEN", "127.0.0.1:9000"),
    ],
)  # fmt: skip
def test_variables_of_kubernetes_and_of_other_commands_are_no_errors(refused, monkeypatch, name, value):
    monkeypatch.setenv(ENVIRONMENT_PREFIX + name, value)
    for model in ("=m", "/=m", "/"):
        said = f"`{model}` is not MODEL or NAME=MODEL: the name is empty or /, or the model is empty."
        assert said in refused("serve", model)
    assert "--served-model-name: `a,/` is not a name, or several with commas." in refused(
        "serve", "m", "--served-model-name", "a,/"
    )
