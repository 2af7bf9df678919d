"""``GET /info`` tells TEI's clients what they ask for before they send work."""

from pathlib import Path

import attrs

import trio_pool_serve
from tests.api.dialects.tei_models import serving
from tests.conftest import client_of, listening
from tests.model_folders import write_scripted_folder
from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import Config
from trio_pool_serve.models.model_kind import ModelSpec
from trio_pool_serve.service import Service


async def info_of(config, spec=None) -> dict:
    async with serving(config, spec) as served:
        answer = await served.http.get("/info")
        assert answer.status_code == 200, answer.text
        return answer.json()


async def test_every_field_is_told(config):
    assert await info_of(config) == {
        "model_id": config.models[0],
        "model_sha": None,
        "model_dtype": "auto",
        "served_model_name": config.models[0],
        "model_type": {"embedding": {"pooling": "mean"}},
        "max_concurrent_requests": 512,
        "max_input_length": 64,
        "max_batch_tokens": ScriptedRunner().default_batch_tokens,
        "max_client_batch_size": 2048,
        "auto_truncate": True,
        "tokenization_workers": 2,
        "version": trio_pool_serve.__version__,
        "max_batch_requests": None,
        "sha": None,
        "docker_label": None,
    }


async def test_settings_are_told_as_they_are(config):
    other = attrs.evolve(
        config,
        loading=attrs.evolve(config.loading, served_model_name="tiny", dtype="float32", long_text="refuse"),
        network=attrs.evolve(config.network, max_inputs_per_request=7),
        scheduling=attrs.evolve(config.scheduling, max_batch_tokens=512),
        threads=attrs.evolve(config.threads, renderer_num_workers=1),
    )
    told = await info_of(other)
    assert told["model_id"] == told["served_model_name"] == "tiny"  # not the folder's path
    assert told["model_dtype"] == "float32"
    assert told["auto_truncate"] is False
    assert told["max_client_batch_size"] == 7
    assert told["max_batch_tokens"] == 512
    assert told["tokenization_workers"] == 1


class LastToken(ModelSpec):
    tasks = frozenset({"embed"})
    pooling = "lasttoken"


async def test_the_last_token_has_tei_s_name(config):
    assert (await info_of(config, LastToken()))["model_type"] == {"embedding": {"pooling": "last_token"}}


async def test_a_snapshot_of_the_hub_is_told_by_its_commit(tmp_path: Path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = write_scripted_folder(tmp_path / "models--org--tiny" / "snapshots" / commit)
    told = await info_of(Config(models=(f"org/tiny={folder}",)))
    assert told["model_sha"] == commit
    assert told["served_model_name"] == "org/tiny"


async def test_a_model_that_is_being_loaded_is_503(config, scripted):
    async with (
        listening(Service(config, lambda *_: scripted)) as url,  # nothing runs it: it is loading for ever
        client_of(url) as client,
    ):
        answer = await client.get("/info")
        assert (answer.status_code, answer.json()["error_type"]) == (503, "Unhealthy")
        assert answer.headers["retry-after"]
        answer = await client.post("/embed", json={"inputs": "hello"})
        assert (answer.status_code, answer.json()["error_type"]) == (503, "Unhealthy")
