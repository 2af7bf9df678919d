"""Tables ``[models.NAME]`` of the TOML file: each model is served with settings of its own."""

from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conftest import client_of
from tests.lanes import sampled
from tests.models.model_families import write_family
from tests.server.server_process import hypercorned, launched
from trio_pool_serve.cli import ENVIRONMENT_PREFIX, read_config
from trio_pool_serve.config import ModelConfig, NoModelError, decode_config, encode_config

TEXT = "A nursery owns its tasks, every wait can be cancelled"


def write_toml(folder: Path, text: str) -> str:
    path = folder / "serve.toml"
    path.write_text(text)
    return str(path)


# -- served ----------------------------------------------------------------------------------------------


def write_tables(folder: Path) -> str:
    """Write a file with one tiny model twice, of other lengths, types and prompts."""
    model = write_family(folder / "bert", "bert")
    return write_toml(
        folder,
        f"""
        max-model-len = 32
        backend = "torch"

        [models.plain]
        model = "{model}"
        aliases = ["first", "org/plain"]
        dtype = "float32"

        [models.prompted]
        model = "{model}"
        dtype = "bfloat16"
        max-model-len = 10
        default-prompt = "yes "
        long-text = "truncate"
        """,
    )


async def embed(client: httpx.AsyncClient, text: str, **fields: object) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"input": text, **fields})


async def require_own_settings(client: httpx.AsyncClient) -> None:
    cards = (await client.get("/v1/models")).json()["data"]
    lengths = {"plain": 32, "first": 32, "org/plain": 32, "prompted": 10}
    assert [(card["id"], card["max_model_len"]) for card in cards] == [*lengths.items()]
    long = " ".join([TEXT] * 8)
    assert (await embed(client, long)).status_code == 400
    truncated = await embed(client, long, model="prompted")
    assert truncated.json()["usage"]["prompt_tokens"] == 10
    assert (await client.get("/info")).json()["model_dtype"] == "float32"

    async def vector(text: str, model: str, **fields: object) -> list[float]:
        return (await embed(client, text, model=model, **fields)).json()["data"][0]["embedding"]

    exact, alias = await vector("yes wait", "plain"), await vector("yes wait", "first")
    prompted, unprompted = await vector("wait", "prompted"), await vector("wait", "prompted", prompt="")
    assert np.allclose(exact, alias, atol=1e-6)
    assert 0 < np.abs(np.subtract(prompted, exact)).max() < 0.05, "bfloat16 of the same text"
    assert np.abs(np.subtract(unprompted, exact)).max() > 0.05


@sampled("flags", [("local",), ("process", "--api-workers", "2")], keep=[("local",)])
async def test_each_model_is_served_with_its_own_settings(tmp_path: Path, flags: tuple[str, ...]):
    given = ("--config", write_tables(tmp_path), "--engine", *flags)
    async with launched(tmp_path, *given) as server, client_of(server.url) as client:
        await require_own_settings(client)


@pytest.mark.slow
async def test_plain_hypercorn_reads_the_tables_too(tmp_path: Path):
    env = {f"{ENVIRONMENT_PREFIX}CONFIG": write_tables(tmp_path)}
    async with hypercorned(tmp_path, "trio_pool_serve.asgi:app", env=env) as server, client_of(server.url) as client:
        await require_own_settings(client)


# -- read ------------------------------------------------------------------------------------------------


def test_a_table_s_settings_override_the_settings_of_all_models(tmp_path: Path):
    text = """
    dtype = "bfloat16"
    default-prompt = "query: "
    [models.a]
    model = "org/a"
    dtype = "auto"
    trust_remote_code = true
    [models."org/b"]
    model = "org/b"
    default-prompt-name = "document"
    pooler-config = '{"pooling_type": "CLS"}'
    """
    config = read_config(["org/c", "--config", write_toml(tmp_path, text), "--max-model-len", "99", "--device", "cpu"])
    assert [source.name for source in config.sources] == ["org/c", "a", "org/b"]
    shared, pooler = {"max_model_len": 99, "device": "cpu"}, '{"pooling_type": "CLS"}'
    assert [source.loading for source in config.sources] == [
        ModelConfig(dtype="bfloat16", default_prompt="query: ", **shared),
        ModelConfig(dtype="auto", default_prompt="query: ", trust_remote_code=True, **shared),
        ModelConfig(dtype="bfloat16", default_prompt_name="document", pooler_config=pooler, pooling="cls", **shared),
    ]
    assert decode_config(encode_config(config)).sources == config.sources


A = '[models.a]\nmodel = "m"\n'

WRONG = {
    "an unknown key": (A + 'dtpe = "int8"', r"\[models\.a\]: .*Unknown key dtpe; did you mean dtype"),
    "a setting of the server": (A + 'device = "cpu"', r"\[models\.a\]: .*`device`"),
    "a wrong type": (A + 'max-model-len = "9"', r"\[models\.a\]: `max_model_len` is '9'; accepted: a whole"),
    "a wrong choice": (A + 'dtype = "int3"', r"\[models\.a\]: `dtype` is 'int3'; accepted: auto, "),
    "a wrong choice or none": (A + 'task = "x"', r"\[models\.a\]: `task` is 'x'; accepted: em"),
    "a wrong number": (A + "max-model-len = 0", r"\[models\.a\]: --max-model-len must be more than 0, not 0"),
    "one key twice": (A + "max-model-len = 3\nmax_model_len = 4", r"\[models\.a\]: .*twice"),
    "two prompts": (A + 'default-prompt = "x"\ndefault-prompt-name = "y"', r"\[models\.a\]: .*not both"),
    "a wrong pooler config": (A + 'pooler-config = "x"', r"\[models\.a\]: --pooler-config: `x` is not"),
    "no model": ('[models.a]\ndtype = "int8"', r"\[models\.a\]: .* `model`"),
    "an empty model": ('[models.a]\nmodel = ""', r"\[models\.a\]: `model`"),
    "no table": ("[models]\na = 3", r"\[models\.a\]: Write a table"),
    "no tables": ("models = 3", "`models` must consist of tables"),
    "one name twice": (A + '[models.b]\nmodel = "n"\naliases = ["a"]', "same name `a`: m and n"),
    "no TOML": ("[models.a\n", "line 1"),
}


@pytest.mark.parametrize(("text", "blamed"), WRONG.values(), ids=WRONG)
def test_an_error_names_file_table_and_key(tmp_path: Path, text: str, blamed: str):
    with pytest.raises(ValueError, match=rf"serve\.toml: .*{blamed}"):
        read_config(["--config", write_toml(tmp_path, text)])


def test_a_file_without_models_needs_one_on_the_command_line(tmp_path: Path):
    toml = write_toml(tmp_path, "port = 1")
    with pytest.raises(NoModelError, match="No model"):
        read_config(["--config", toml])
    assert read_config(["m", "--config", toml]).network.port == 1


def test_a_flag_with_a_name_is_not_for_tables(tmp_path: Path):
    toml = write_toml(tmp_path, '[models.a]\nmodel = "m"')
    with pytest.raises(ValueError, match="--served-model-name names one model"):
        read_config(["--config", toml, "--served-model-name", "x"])
    config = read_config(["n", "--config", toml, "--served-model-name", "x"])
    assert [source.name for source in config.sources] == ["x", "a"]


def test_a_table_s_pooling_overrides_the_pooling_of_all_models(tmp_path: Path):
    path = write_toml(
        tmp_path,
        """
        [models.flag]
        model = "m"
        pooling = "cls"

        [models.config]
        model = "n"
        pooler-config = '{"pooling_type": "LAST"}'
        """,
    )
    for shared in (["--pooler-config", '{"pooling_type": "MEAN"}'], ["--pooling", "mean"]):
        sources = read_config([*shared, "--config", path]).sources
        assert [source.loading.pooling for source in sources] == ["cls", "last"]
