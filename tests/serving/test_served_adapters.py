"""Adapters of served models: which requests compute with them, and how they come and go; scripted runners."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.api.serving import key_file_of
from tests.conftest import wait_idle
from tests.model_folders import write_scripted_folder
from tests.models.adapter_folders import factors, write_adapter
from tests.scripted_runner import ScriptedRunner, computed_by
from tests.server.server_process import until
from tests.serving.changing_models import ADMIN, Changing, Loader, changing
from trio_pool_serve.config import Config, ModelConfig, ModelTables, NetworkConfig
from trio_pool_serve.errors import AdapterError, ConflictError, ModelLoadError
from trio_pool_serve.service import Service
from trio_pool_serve.serving.adapter_changes import add_adapter
from trio_pool_serve.serving.served_adapter import ServedAdapter
from trio_pool_serve.types import Batch


class Adaptable(Loader):
    """Loads runners that have a row to try adapters with, refuse a folder named ``wrong`` and fail for ``broken``."""

    def load(self, folder: Any, *arguments: object) -> ScriptedRunner:
        from tests.engine.engines import request

        runner = super().load(folder, *arguments)
        runner.probe_request = request(1, 2)
        runner.on_launch = self._refuse
        runner.computed_by = computed_by("0123456789abcdef")
        return runner

    def _refuse(self, batch: Batch) -> None:
        if batch.adapter is not None and batch.adapter.folder.endswith("broken"):
            raise RuntimeError("sizes of tensors differ")
        if batch.adapter is not None and batch.adapter.folder.endswith("wrong"):
            raise AdapterError(f"{batch.adapter.folder} is for another model")


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Changing]:
    for seed, name in enumerate(("law", "art", "wrong"), start=2):
        write_adapter(tmp_path / name, factors(r=seed), r=seed)
    async with changing(tmp_path, loader=Adaptable()) as live:
        yield live


async def add(live: Changing, name: str, folder: str | None = None, parent: str = "a", **more: object) -> Any:
    body = {"model": str(live.folder / (folder or name)), "name": name, "parent": parent, **more}
    return await live.client.post("/v1/models", json=body, headers=ADMIN)


async def lora(live: Changing, change: str, **body: object) -> tuple[int, str]:
    answer = await live.client.post(f"/v1/{change}_lora_adapter", json=body, headers=ADMIN)
    said = answer.json()["error"]["message"] if answer.status_code >= 400 else answer.text
    return answer.status_code, said


def last_adapter(live: Changing, model: str = "a") -> str | None:
    adapter = live.loader.runners[model][-1].batches[-1].adapter
    return None if adapter is None else Path(adapter.folder).name


async def test_the_name_of_an_adapter_selects_it(live):
    for name in ("law", "art"):
        card = (await add(live, name)).json()
        shown = (card["id"], card["parent"], card["root"], card["state"], card["task"])
        assert shown == (name, "a", name, "loaded", "embed")
    for name, expected in {"law": "law", "art": "art", "a": None, None: None}.items():
        answer = await live.embed(name)
        assert (answer.json()["model"], last_adapter(live)) == (name or "a", expected)
    assert await live.states() == dict.fromkeys(("a", "law", "art"), "loaded")
    assert (await live.client.get("/v1/models/law", headers=ADMIN)).json()["parent"] == "a"
    shown = (await live.client.get("/console/models", headers=ADMIN)).json()
    assert {each["id"]: each["tasks"] for each in shown}.keys() == {"a", "law", "art"}
    fingerprints = {(await live.embed(name)).headers["model-fingerprint"] for name in ("a", "law", "art")}
    assert len(fingerprints) == 3, "each has its own"
    assert (await live.client.delete("/v1/models/law", headers=ADMIN)).json() == {
        "id": "law", "deleted": True, "object": "model",
    }  # fmt: skip
    gone = await live.embed("law")
    assert (gone.status_code, "This server has: a, art." in gone.text) == (404, True)


async def test_an_adapter_that_cannot_be_applied_is_a_400_and_disturbs_nothing(live):
    refused = await add(live, "wrong")
    assert (refused.status_code, "is for another model" in refused.text) == (400, True)
    assert (await add(live, "new", folder="d")).status_code == 400  # a model's folder
    assert (await add(live, "new", folder="nowhere")).status_code == 400
    assert await live.states() == {"a": "loaded"}
    assert (await live.embed("wrong")).status_code == 404
    assert (await live.embed("a")).status_code == 200


async def test_an_adapter_that_cannot_be_applied_does_not_fail_the_load_of_its_model(tmp_path: Path):
    write_adapter(tmp_path / "wrong", factors(r=2), r=2)
    async with changing(tmp_path, at_start=("a", "b"), loader=Adaptable(), max_loaded_models=1) as live:
        assert (await live.states())["b"] == "unloaded"
        answer = await add(live, "wrong", parent="b")
        assert (answer.status_code, "wrong is for another model" in answer.text) == (400, True)
        assert (await live.embed("b")).status_code == 200


async def test_names_are_of_one_model_or_adapter(live):
    assert (await live.load("b", aliases=["bee"])).status_code == 200
    assert (await add(live, "law")).status_code == 200
    names = {name: live.service.models.own_name(name, among=None) for name in ("a", "bee", "law", None)}
    assert names == {"a": "a", "bee": "b", "law": "law", None: "a"}, "a batch is for one of these"
    assert live.service.models.own_name(None, among={"law"}) == "law"
    for taken in ("a", "bee", "law"):
        assert (await add(live, taken, folder="art")).status_code == 409
    assert (await live.load("c", name="law")).status_code == 409
    assert (await live.load("c", aliases=["law"])).status_code == 409
    assert (await add(live, "x", folder="art", parent="law")).json()["error"]["param"] == "parent"
    assert (await add(live, "x", folder="art", parent="nobody")).status_code == 404
    assert (await add(live, "x", folder="art", dtype="float32")).status_code == 400
    for unnamed in ("*", " ", "x ", "x\ny"):
        assert (await add(live, unnamed, folder="art")).status_code == 400
        assert (await live.load("c", name=unnamed)).status_code == 400
        assert (await lora(live, "load", lora_name=unnamed, lora_path=str(live.folder / "art")))[0] == 400
    assert '"parent": "MODEL"}' in (await add(live, "", folder="art")).json()["error"]["message"]
    assert (await add(live, "art", parent="bee")).json()["parent"] == "b"
    assert (await live.unload("b")).status_code == 200
    assert (await live.embed("art")).status_code == 404, "adapters leave with their model"


async def test_a_key_that_is_limited_to_names_needs_that_of_the_adapter(tmp_path: Path):
    write_adapter(tmp_path / "law")
    keys = {"admin-key": "admin = true", "base": 'models = ["a"]', "law": 'models = ["law"]'}
    keys["limited"] = 'admin = true\nmodels = ["mine"]'
    path = key_file_of(tmp_path, "".join(f'[{key}]\nkey = "{key}"\n{more}\n' for key, more in keys.items()))
    async with changing(tmp_path, loader=Adaptable(), network=NetworkConfig(api_keys_file=path)) as live:
        assert (await add(live, "law")).status_code == 200
        admin = {"Authorization": "Bearer limited"}
        live.service.served["a"].is_leaving = True
        assert live.service.models.own_name(None, among={"law"}) == "law", "there is no other"
        live.service.served["a"].is_leaving = False
        body = {"model": str(tmp_path / "law"), "name": "mine", "parent": "a"}
        assert (await live.client.post("/v1/models", json=body, headers=admin)).status_code == 404
        for key, mine, other in (("base", "a", "law"), ("law", "law", "a")):
            headers = {"authorization": f"Bearer {key}"}
            listed = (await live.client.get("/v1/models", headers=headers)).json()["data"]
            assert [card["id"] for card in listed] == [mine]
            for name, status in ((mine, 200), (other, 404), (None, 200)):
                body = {"input": "hello"} | ({} if name is None else {"model": name})
                answer = await live.client.post("/v1/embeddings", json=body, headers=headers)
                assert status == 404 or last_adapter(live) == (None if mine == "a" else mine)
                assert (answer.status_code, f"This server has: {mine}." in answer.text) == (status, status == 404)


async def test_adapters_of_a_new_model_and_unknown_parents_are_refused(live):
    body = {"model": str(live.folder / "a"), "name": "c", "adapter": [f"law={live.folder / 'law'}"]}
    answer = await live.client.post("/v1/models", json=body, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapter")
    assert (await add(live, "law", parent="typo")).status_code == 404
    assert (await lora(live, "load", lora_name="x", lora_path=str(live.folder / "law"), paarent="a"))[0] == 400
    path = str(live.folder / "law")
    assert (await lora(live, "load", lora_name="x", lora_path=path, is_3d_lora_weight=False))[0] == 200
    assert (await lora(live, "unload", lora_name="x"))[0] == 200
    assert (await live.load("c", aliases=["*"])).status_code == 200
    assert (await add(live, "law", parent="typo")).status_code == 404, "* names no parent"
    assert (await lora(live, "unload", lora_name="a"))[0] == 404
    status, said = await lora(live, "load", lora_name="a", lora_path=str(live.folder / "law"))
    assert (status, "A model `a` exists already" in said) == (409, True)


async def test_the_fingerprint_of_an_adapter_is_that_of_its_responses(live):
    card = (await add(live, "law")).json()
    base = (await live.client.get("/v1/models/a", headers=ADMIN)).json()
    assert card["fingerprint"] != base["fingerprint"]
    assert (await live.embed("law")).headers["model-fingerprint"] == card["fingerprint"]
    assert (await live.embed("a")).headers["model-fingerprint"] == base["fingerprint"]


async def test_vllm_s_routes_have_its_statuses_and_messages(live):
    law, art = str(live.folder / "law"), str(live.folder / "art")
    loaded = 200, "Success: LoRA adapter 'law' added successfully."
    assert await lora(live, "load", lora_name="law", lora_path=law) == loaded
    again = (
        400,
        (
            "The lora adapter 'law' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True."
        ),
    )
    assert await lora(live, "load", lora_name="law", lora_path=art) == again
    await live.embed("law")
    assert last_adapter(live) == "law"
    assert await lora(live, "load", lora_name="law", lora_path=art, load_inplace=True) == loaded
    await live.embed("law")
    assert last_adapter(live) == "art"
    for body in ({}, {"lora_name": "x"}, {"lora_path": art}):
        assert await lora(live, "load", **body) == (400, "Both 'lora_name' and 'lora_path' must be provided.")
    assert await lora(live, "load", lora_name="x", lora_path="/nowhere") == (
        404, "Loading lora x failed: No adapter found for /nowhere",
    )  # fmt: skip
    assert (await lora(live, "load", lora_name="x", lora_path=str(live.folder / "wrong")))[0] == 400
    assert await lora(live, "unload") == (400, "'lora_name' needs to be provided to unload a LoRA adapter.")
    for name in ("x", "a"):
        assert await lora(live, "unload", lora_name=name) == (404, f"The lora adapter '{name}' cannot be found.")
    assert await lora(live, "unload", lora_name="law") == (200, "Success: LoRA adapter 'law' removed successfully.")
    assert (await live.embed("law")).status_code == 404
    without_key = await live.client.post("/v1/load_lora_adapter", json={"lora_name": "law", "lora_path": law})
    assert without_key.status_code == 401


async def test_requests_finish_with_an_adapter_that_is_unloaded_meanwhile(live):
    assert (await add(live, "law")).status_code == 200
    (runner,) = live.loader.runners["a"]
    runner.gate.clear()
    async with live.asking(live.embed, "law") as answers:
        await until(lambda: live.service.served["a"].users)
        assert (await live.unload("law")).status_code == 200
        assert (await live.embed("law")).status_code == 404
        runner.gate.set()
    assert answers[0].json()["model"] == "law"
    assert last_adapter(live) == "law"


async def test_an_adapter_is_there_once_it_is_checked(live):
    (runner,) = live.loader.runners["a"]
    runner.gate.clear()
    async with live.asking(lambda: add(live, "law")) as answers:
        await until(lambda: "law" in live.service.served["a"].adapters)
        assert (await live.embed("law")).status_code == 503
        assert (await live.states())["law"] == "loading"
        assert (await add(live, "law")).status_code == 409
        assert (await live.unload("law")).status_code == 200
        runner.gate.set()
    assert answers[0].status_code == 409, "it was unloaded before it was loaded"
    assert "law" not in await live.states()


async def test_of_two_loads_in_place_the_one_that_finishes_first_remains(live):
    assert (await add(live, "law")).status_code == 200
    served, models = live.service.served["a"], live.service.models
    (runner,) = live.loader.runners["a"]
    runner.gate.clear()
    found: dict[str, object] = {}

    async def load(name: str) -> None:
        try:
            found[name] = await add_adapter(models, "a", ServedAdapter("law", str(live.folder / name)), replaces=True)
        except ConflictError as error:
            found[name] = str(error)

    async with trio.open_nursery() as nursery:
        for name in ("art", "law"):
            nursery.start_soon(load, name)
        await until(lambda: served.engine.statistics().queued_rows == 1)
        runner.gate.set()
    kept, late = ("art", "law") if found["art"] is served else ("law", "art")
    assert found == {kept: served, late: "The adapter `law` has been unloaded or replaced before it was loaded."}
    await live.embed("law")
    assert last_adapter(live) == kept


async def test_a_request_that_is_cancelled_adds_no_adapter(live):
    (runner,) = live.loader.runners["a"]
    runner.gate.clear()
    models, adapter = live.service.models, ServedAdapter("law", str(live.folder / "law"))
    with trio.move_on_after(0.05) as scope:
        await add_adapter(models, "a", adapter)
    runner.gate.set()
    assert scope.cancelled_caught
    assert not live.service.served["a"].adapters
    with trio.CancelScope() as scope:
        scope.cancel()
        await adapter.check(live.service.served["a"].engine, live.service.offload)
    assert scope.cancelled_caught
    await wait_idle(live.service)


async def test_an_error_of_an_adapter_names_no_path_to_clients(live):
    assert (await add(live, "law")).status_code == 200
    (live.folder / "law").rename(live.folder / "wrong law")
    served = live.service.served["a"].adapters["law"]
    served.adapter = type(served.adapter)("/secret/wrong", served.adapter.digest)
    answer = await live.embed("law")
    assert (answer.status_code, "/secret" in answer.text) == (500, False)
    assert "cannot be applied" in answer.text


# -- settings -----------------------------------------------------------------------------------------


def config_of(*models: str, adapter: tuple[str, ...] = (), **tables: Any) -> Config:
    return Config(models=models, tables=ModelTables("f", tables), loading=ModelConfig(adapter=adapter))


def test_adapters_are_set_by_flag_for_one_model_and_in_tables():
    (source,) = config_of("m", adapter=("law=/l", "art=org/art")).sources
    assert source.adapters == {"law": "/l", "art": "org/art"}
    first, second = config_of("m", adapter=("law=/l",), b={"model": "n", "adapter": ["art=/a"]}).sources
    assert (first.adapters, second.adapters) == ({"law": "/l"}, {"art": "/a"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (lambda: config_of("m", "n", adapter=("law=/l",)), "--adapter is for one model"),
        (lambda: config_of("m", adapter=("law",)), "`law` is not NAME=FOLDER"),
        (lambda: config_of("m", adapter=("law=/l", "law=/m")), "Two adapters of m have the same name"),
        (lambda: config_of("m", adapter=("*=/l",)), "Give the adapter a name of its own"),
        (lambda: config_of("m", adapter=("m=/l",)), "Two models have the same name `m`"),
        (lambda: config_of("m", b={"model": "n", "adapter": ["m=/l"]}), "Two models have the same name `m`"),
        (lambda: config_of("m", b={"model": "n", "adapter": "art=/a"}), "`adapter` is 'art=/a'; accepted: a list"),
    ],
)
def test_settings_of_adapters_that_are_refused(settings, said: str):
    with pytest.raises(ValueError, match=said):
        settings()


@pytest.mark.parametrize(
    ("folder", "said"),
    [("wrong", "is for another model"), ("broken", "The forward pass failed"), ("d", "adapter_config.json")],
)
async def test_a_server_does_not_start_with_an_adapter_that_cannot_be_applied(tmp_path: Path, folder: str, said: str):
    for name in ("wrong", "broken"):
        write_adapter(tmp_path / name)
    config = config_of(f"a={write_scripted_folder(tmp_path / 'd')}", adapter=(f"law={tmp_path / folder}",))
    with pytest.raises(ModelLoadError, match=f"a cannot be loaded: the adapter law: .*{said}"):
        await Service(config, Adaptable().load).run()
