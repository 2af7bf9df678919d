"""Settings are declared once and reach flags, environment and TOML from there."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
from cyclopts import CycloptsError

from trio_pool_serve.cli import check_references, main, read_config
from trio_pool_serve.command_line.server_commands import ENVIRONMENT_PREFIX
from trio_pool_serve.config import Config, ModelConfig, ModelSource, decode_config, encode_config

pytestmark = pytest.mark.unit

GROUPS = {field.name: field.type for field in attrs.fields(Config) if attrs.has(field.type) and field.name != "tables"}
SETTINGS = [(group, setting) for group, kind in GROUPS.items() for setting in attrs.fields(kind)]

# One value, other than the default, for each setting; the two sides are what people write and what is meant.
WRITTEN = {
    "served_model_name": ("name", "name"),
    "revision": ("v2", "v2"),
    "trust_remote_code": ("true", True),
    "dtype": ("float16", "float16"),
    "device": ("cpu", "cpu"),
    "backend": ("torch", "torch"),
    "cache_dir": ("/var/cache/models", "/var/cache/models"),
    "max_model_len": ("99", 99),
    "engine": ("process", "process"),
    "engine_hosts": ("a:9000,b:9000", "a:9000,b:9000"),
    "key_file": ("/etc/engine.key", Path("/etc/engine.key")),
    "zone": ("eu-1", "eu-1"),
    "gpus_per_replica": ("0.5", 0.5),
    "replicas": ("3", 3),
    "api_workers": ("2", 2),
    "plugins": ("one.module,another", "one.module,another"),
    "long_text": ("chunk", "chunk"),
    "pooling": ("cls", "cls"),
    "normalize": ("false", False),
    "chat_template": ("/srv/chat.jinja", "/srv/chat.jinja"),
    "default_prompt_name": ("query", "query"),
    "default_prompt": ("query: ", "query: "),
    "task": ("score", "score"),
    "adapter": ("law=/adapters/law", ("law=/adapters/law",)),
    "adapter_base": ("/models/base", "/models/base"),
    "pooler_config": ('{"step_tag_id": 3}', '{"step_tag_id": 3}'),
    "host": ("::1", "::1"),
    "port": ("8123", 8123),
    "api_key": ("k", "k"),
    "api_keys_file": ("/etc/keys.toml", Path("/etc/keys.toml")),
    "trusted_proxies": ("10.0.0.0/8,unix", "10.0.0.0/8,unix"),
    "api_key_scope": ("vllm", "vllm"),
    "cors_allow_origins": ("https://a.org,https://b.org", "https://a.org,https://b.org"),
    "max_body_bytes": ("1024", 1024),
    "client_timeout_s": ("6.5", 6.5),
    "ssl_certfile": ("/etc/tls.pem", Path("/etc/tls.pem")),
    "ssl_keyfile": ("/etc/tls.key", Path("/etc/tls.key")),
    "ssl_ca_certs": ("/etc/ca.pem", Path("/etc/ca.pem")),
    "strict_requests": ("true", True),
    "max_inputs_per_request": ("7", 7),
    "max_batch_tokens": ("512", 512),
    "max_queue_s": ("2.5", 2.5),
    "memory_budget_bytes": ("1000000", 1_000_000),
    "batch_timeout_s": ("2.5", 2.5),
    "renderer_num_workers": ("5", 5),
    "request_timeout_s": ("9", 9.0),
    "drain_timeout_s": ("7", 7.0),
    "trust_request_chat_template": ("true", True),
    "enable_prompt_embeds": ("true", True),
    "allowed_media_path": ("/srv/images", Path("/srv/images")),
    "allowed_media_domains": ("a.org,10.0.0.0/8", "a.org,10.0.0.0/8"),
    "result_cache_bytes": ("4096", 4096),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "access_log": ("true", True),
    "data_dir": ("/srv/batches", "/srv/batches"),
    "file_retention_days": ("7.5", 7.5),
    "max_stored_bytes": ("4096", 4096),
    "model_api": ("true", True),
    "idle_unload_s": ("600", 600.0),
    "max_loaded_models": ("3", 3),
}


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def read_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return settings as they are read from flags, from a file, and from the environment; keys are names of fields."""

    def read(written: Mapping[str, str], *more: str) -> list[Config]:
        flags, lines = [], []
        for name, text in written.items():
            flag, is_switch = name.replace("_", "-"), text in ("true", "false")
            flags += [f"--{'no-' * (text == 'false')}{flag}"] if is_switch else [f"--{flag}", text]
            is_bare = is_switch or re.fullmatch(r"\d+(\.\d+)?", text)
            lines.append(f"{flag} = {text if is_bare else json.dumps(text)}\n")
        (toml := tmp_path / "settings.toml").write_text("".join(lines))
        configs = [read_config(["m", *more, *flags]), read_config(["m", *more, "--config", str(toml)])]
        with monkeypatch.context() as patch:
            for name, text in written.items():
                patch.setenv(ENVIRONMENT_PREFIX + name.upper(), text)
            return [*configs, read_config(["m", *more])]

    return read


def value_of(config: Config, group: str, name: str) -> object:
    return getattr(getattr(config, group), name)


def test_every_setting_is_tried_here():
    assert {setting.name for _, setting in SETTINGS} == set(WRITTEN)


APART = {
    "default_prompt", "idle_unload_s", "max_loaded_models", "model_api",
}  # fmt: skip
"""Settings that exclude others."""


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_all_settings_reach_the_config_from_flags_the_environment_and_a_file(read_everywhere, apart):
    groups = {setting.name: group for group, setting in SETTINGS if (setting.name in APART) == apart}
    meant = {name: WRITTEN[name][1] for name in groups}

    def values(config: Config) -> dict[str, object]:
        return {name: value_of(config, group, name) for name, group in groups.items()}

    defaults = values(Config(models=("m",)))
    assert defaults == {setting.name: setting.default for _, setting in SETTINGS if setting.name in groups}
    assert not [name for name in meant if defaults[name] == meant[name]], "what is written must be another value"

    for config in read_everywhere({name: WRITTEN[name][0] for name in groups}):
        assert values(config) == meant
        assert decode_config(encode_config(config)) == config, "as it reaches another process"


def test_both_answers_to_a_question_without_a_default_can_be_given():
    for flag, meant in (("--normalize", True), ("--no-normalize", False)):
        assert read_config(["m", flag]).loading.normalize is meant


def test_an_empty_data_dir_is_not_the_default(read_everywhere):
    for config in (*read_everywhere({"data_dir": ""}), read_config(["m", "--data-dir="])):
        config = decode_config(encode_config(config))
        assert (config.batch.data_dir, config.batch.is_served) == ("", False)
    assert Config(models=("m",)).batch.is_served


def test_vllm_s_settings_for_pooling_are_read_from_a_flag_the_environment_and_a_file(read_everywhere):
    written = '{"pooling_type": "CLS", "use_activation": false}'
    meant = (ModelSource("m", "m", (), ModelConfig(pooler_config=written, pooling="cls", normalize=False)),)
    configs = read_everywhere({"pooler_config": written})
    assert [config.sources for config in (*configs, decode_config(encode_config(configs[0])))] == [meant] * 4


def test_one_model_may_have_several_names():
    (source,) = read_config(["org/a", "--served-model-name", "one,two,three"]).sources
    assert (source.name, source.location, source.aliases) == ("one", "org/a", ("two", "three"))


def test_flags_win_over_the_environment_and_that_over_the_file(monkeypatch, tmp_path):
    toml = tmp_path / "settings.toml"
    toml.write_text("port = 1\nhost = 'file'\ndtype = 'float32'\n")
    monkeypatch.setenv("TRIO_POOL_SERVE_CONFIG", str(toml))
    monkeypatch.setenv("TRIO_POOL_SERVE_PORT", "2")
    monkeypatch.setenv("TRIO_POOL_SERVE_HOST", "environment")
    config = read_config(["m", "--port", "3"])
    assert (config.network.port, config.network.host, config.loading.dtype) == (3, "environment", "float32")


def test_several_models_are_named_by_an_equals_sign():
    assert read_config(["org/a", "b=org/other", "c=/models/x=y"]).sources == (
        ModelSource("org/a", "org/a"),
        ModelSource("b", "org/other"),
        ModelSource("c", "/models/x=y"),
    )


def test_models_can_come_from_the_environment_and_from_a_file(monkeypatch, tmp_path):
    (tmp_path / "settings.toml").write_text('model = ["org/a", "b=org/other"]')
    assert read_config(["--config", str(tmp_path / "settings.toml")]).models == ("org/a", "b=org/other")
    for written in ("org/a b=org/other", "org/a"):
        monkeypatch.setenv("TRIO_POOL_SERVE_MODEL", written)
        assert read_config([]).models == tuple(written.split())


def test_a_folder_whose_name_has_an_equals_sign_is_itself(tmp_path):
    (tmp_path / "a=b").mkdir()
    assert read_config([str(tmp_path / "a=b")]).sources[0].location == str(tmp_path / "a=b")


WRONG = {
    "no model": ([], "No model"),
    "an unknown flag": (["m", "--no-such-flag"], "--no-such-flag"),
    "a port that is no number": (["m", "--port", "http"], "--port"),
    "a negative port": (["m", "--port", "-1"], "port"),
    "a port past the last": (["m", "--port", "70000"], "port"),
    "no body at all": (["m", "--max-body-bytes", "0"], "--max-body-bytes must be more than 0, not 0"),
    "an unknown type": (["m", "--dtype", "int3"], "--dtype"),
    "no time at all": (["m", "--request-timeout-s", "0"], "--request-timeout-s must be more than 0"),
    "an empty name": (["m", "--served-model-name", ""], "--served-model-name: "),
    "a name that is empty": (["m", "--served-model-name", "a,"], "--served-model-name: "),
    "an unknown pooling": (["m", "--pooling", "median"], "--pooling"),
    "an unknown scope": (["m", "--api-key-scope", "some"], "--api-key-scope"),
    "no key": (["m", "--api-key", " , "], "--api-key"),
    "a proxy that is no address": (["m", "--trusted-proxies", "front"], "--trusted-proxies"),
    "a Unix socket without a path": (["m", "--host", "unix:"], "1 to 107 bytes, not 0"),
    "a path that is too long for a Unix socket": (["m", "--host", f"unix:/{'x' * 107}"], "1 to 107 bytes, not 108"),
    "only any other name": (["m", "--served-model-name", "*"], "stands for all other names"),
    "two models of any name": (["m", "--served-model-name", "a,*,*"], "same name"),
    "two default prompts": (["m", "--default-prompt", "a", "--default-prompt-name", "b"], "not both"),
    "no number of replicas": (["m", "--replicas", "0"], "--replicas: `0` is not a number, a range such as 1..8, or"),
    "replicas that are no range": (["m", "--engine", "ray", "--replicas", "1-8"], "`1-8` is not a number, a range"),
    "no number of replicas per GPU": (["m", "--replicas", "/gpu"], "a number per GPU such as 2/gpu"),
    "a range of replicas on this machine": (["m", "--engine", "process", "--replicas", "1..8"], "--engine ray"),
    "a range from above": (["m", "--engine", "ray", "--replicas", "8..1"], "write the smaller number first"),
    "replicas on each GPU by Ray": (["m", "--engine", "ray", "--replicas", "2/gpu"], "--gpus-per-replica"),
    "more than one GPU": (["m", "--gpus-per-replica", "2"], "--gpus-per-replica must be from 0 to 1"),
    "no template": (["m", "--chat-template", ""], "--chat-template: `` is not a file or a template"),
    "settings for pooling that are no JSON": (
        ["m", "--pooler-config", "CLS"],
        "--pooler-config: `CLS` is not a JSON object",
    ),
    "settings for pooling that differ": (["m", "--pooler-config", '{"task": "embed"}', "--task", "score"], "--task"),
    "two models of one name": (["a=x", "a=y"], "same name"),
    "one name for two models": (["a", "b", "--served-model-name", "n"], "NAME=MODEL"),
    "models that change in engine processes": (["m", "--engine", "process", "--idle-unload-s", "9"], "--idle-unload-s"),
    "models that change for API workers": (["m", "--api-workers", "2", "--max-loaded-models", "1"], "--engine local"),
    "models that change on hosts": (["m", "--engine-hosts", "a:1", "--model-api"], "--model-api requires"),
    "models that change by Ray": (["m", "--engine", "ray", "--model-api"], "--model-api requires"),
    "API workers without engine processes": (["m", "--engine", "local", "--api-workers", "2"], "--api-workers"),
    "a file that is not there": (["m", "--config", "/nowhere.toml"], "nowhere.toml"),
}


@pytest.mark.parametrize(("arguments", "blamed"), WRONG.values(), ids=WRONG)
def test_the_command_blames_a_wrong_setting_by_name(arguments, blamed, capfd, monkeypatch):
    with pytest.raises((CycloptsError, ValueError, OSError), match=blamed):
        read_config(arguments)
    monkeypatch.setattr("sys.argv", ["trio-pool-serve", "serve", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capfd.readouterr().err
    assert blamed in said
    assert "Traceback" not in said


def test_an_unknown_key_in_the_file_is_an_error(tmp_path):
    toml = tmp_path / "settings.toml"
    toml.write_text("prot = 8000\n")
    with pytest.raises(ValueError, match="prot is not a setting; did you mean port"):
        read_config(["m", "--config", str(toml)])


def test_the_api_key_is_not_shown_where_settings_are_printed():
    assert "hunter2" not in repr(read_config(["m", "--api-key", "hunter2"]))


def test_replicas_may_be_counted_by_gpu_where_there_are_gpus():
    config = read_config(["m", "--device", "cuda", "--replicas", "2/gpu"])
    assert (config.processes.replicas_per_gpu, config.processes.replica_range) == (2, None)
    check_references(config)
    with pytest.raises(ValueError, match=r"^--replicas 2/gpu requires a GPU\. On CPU, give a number, such as 2\.$"):
        check_references(read_config(["m", "--device", "cpu", "--replicas", "2/gpu"]))


@pytest.mark.parametrize(("written", "meant"), [("8", (8, 8)), ("1..8", (1, 8)), ("3..3", (3, 3))])
def test_replicas_are_a_number_or_a_range_wherever_they_are_written(read_everywhere, written, meant):
    configs = read_everywhere({"replicas": written}, "--engine", "ray")
    for config in (*configs, decode_config(encode_config(configs[0]))):
        assert config.processes.replica_range == meant


def test_only_an_id_of_the_hub_is_shown_to_clients():
    models = ["a=/srv/models/x", "b=./x", "c=../x", "d=org/model", "e=model", "f=~/x/y", "g=C:\\x"]
    shown = [source.shown_location for source in read_config(models).sources]
    assert shown == ["a", "b", "c", "org/model", "model", "f", "g"]
