"""Flags of vLLM and TEI, and those of earlier versions, are taken as this server's or answered with what to use."""

import re

import pytest

from tests.server.server_process import ROOT
from trio_pool_serve.cli import main, read_config
from trio_pool_serve.command_line.other_names import ALIASES, FOREIGN, GONE, VALUES, notes_of, translate

pytestmark = pytest.mark.unit
OURS = set(re.findall(r"^\| `--([\w-]+)` \|", (ROOT / "docs" / "settings.md").read_text(), flags=re.M))


def test_no_name_is_both_a_setting_and_another_s_or_in_two_tables():
    tables = (OURS, set(ALIASES), set(GONE), set(FOREIGN))
    assert sum(map(len, tables)) == len(set().union(*tables))


@pytest.mark.parametrize("text", [*GONE.values(), *FOREIGN.values(), *ALIASES.values(), *filter(None, VALUES.values())])
def test_what_replaces_a_name_exists(text):
    assert set(re.findall(r"(?<![\w-])--([\w-]+)", text)) <= {*OURS, "config"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["--model-id", "m", "--hostname", "0.0.0.0", "--payload-limit", "4MiB"], ("0.0.0.0", 4 * 2**20)),
        (["m", "--uds", "/run/x.sock", "--payload-limit=2000000"], ("unix:/run/x.sock", 2_000_000)),
        (["m", "--uds=/run/x=y.sock", "--payload_limit=2000000"], ("unix:/run/x=y.sock", 2_000_000)),
    ],
)
def test_flags_of_tei_and_vllm_that_mean_one_of_ours_are_taken(written, meant):
    config = read_config(written)
    assert config.models == ("m",)
    assert (config.network.host, config.network.max_body_bytes) == meant


@pytest.mark.parametrize("written", [["a=/x", "b=/y", "--port", "9"], ["a=/x", "--lora_modules=b=/y"]])
def test_the_flag_for_adapters_of_vllm_takes_several(written):
    assert read_config(["m", "--lora-modules", *written]).loading.adapter == ("a=/x", "b=/y")


def test_switches_and_values_of_other_flags_stay_as_they_are():
    assert translate(["m", "--json-output", "--api-key", "uds", "--port=1"]) == [
        "m", "--log-format=json", "--api-key", "uds", "--port=1",
    ]  # fmt: skip


@pytest.mark.parametrize("written", [["--uds"], ["--uds="], ["--hostname", "--port", "9"], ["--json-output=maybe"]])
def test_a_value_that_is_missing_or_too_much_is_named(written):
    with pytest.raises(ValueError, match=f"^{written[0].partition('=')[0]} (needs a|takes no) value"):
        translate(["m", *written])


@pytest.mark.parametrize(("written", "ours"), VALUES.items())
def test_values_of_tei_and_vllm_that_mean_one_of_ours_are_taken_and_logged(written, ours):
    flag, _, value = written.partition("=")
    for words in ([written], [flag, value], [f"--{flag[2:].replace('-', '_')}", value.title()]):
        assert translate(["m", *words, "--port", "9"]) == ["m", *([ours] if ours else []), "--port", "9"]
        (note,) = notes_of(["m", *words])
        assert (ours or "the model's files determine the task") in note
    assert notes_of(["m", "--dtype", "float32"]) == []
    assert read_config(["m", written]).models == ("m",)


@pytest.mark.parametrize("value", ["generate", "classify", "draft", ""])
def test_what_this_server_does_not_do_is_refused_whatever_else_the_flag_may_say(value):
    for flag in ("--runner", "--convert"):
        with pytest.raises(ValueError, match=f"^{flag} is not supported"):
            translate(["m", flag, value])


@pytest.mark.parametrize(("value", "meant"), [("true", True), ("false", False), ("False", False)])
def test_true_or_false_after_a_switch_is_its_value(value, meant):
    config = read_config(["--access-log", value, "--normalize", value, "m"])
    assert (config.models, config.logging.access_log, config.loading.normalize) == (("m",), meant, meant)


@pytest.mark.parametrize(
    "written",
    [
        "m --served-model-name a b",
        "--served_model_name a b --model m",
        "--served-model-name a b m",
        "m --Served_Model_Name=a b",
        "--served-model-name=a b m",
    ],
)
def test_several_names_are_to_be_separated_by_commas(written):
    with pytest.raises(ValueError, match=r"commas: write a,b\.$"):
        read_config(written.split())


@pytest.mark.parametrize("name", [["--served-model-name", "a"], ["--served-model-name=a"]])
def test_a_model_may_stand_behind_its_name(name):
    config = read_config(["--port", "9", *name, "b"])
    assert (config.models, config.sources[0].name) == (("b",), "a")


def test_vllms_quantization_while_loading_is_a_dtype_here():
    assert read_config(["m", "--quantization", "fp8"]).sources[0].loading.dtype == "fp8"


@pytest.mark.parametrize("name", [*GONE, *FOREIGN])
def test_each_other_name_is_refused_with_what_to_use(name):
    reason = {**GONE, **FOREIGN}[name]
    for flag in (f"--{name}", f"--no-{name}", f"--{name.replace('-', '_')}=3"):
        with pytest.raises(ValueError, match=re.escape(reason)):
            translate(["m", flag, "3"])


def test_all_that_are_refused_are_named_at_once(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["trio-pool-serve", "serve", "m", "--fairness", "client", "--quantization=awq"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--fairness was removed:" in said
    assert "--quantization is not supported:" in said


@pytest.mark.parametrize("name", ["fairness", "uds", "max-concurrent-requests"])
def test_variables_and_keys_of_files_are_refused_too(name, monkeypatch, tmp_path):
    toml = tmp_path / "settings.toml"
    toml.write_text(f"{name} = 'x'\n")
    with pytest.raises(ValueError, match=f"^{toml}: {name} (is|was) "):
        read_config(["m", "--config", str(toml)])
    variable = "TRIO_POOL_SERVE_" + name.upper().replace("-", "_")
    monkeypatch.setenv(variable, "x")
    with pytest.raises(ValueError, match=f"^{variable} (is|was) "):
        read_config(["m"])


def test_every_flag_that_a_migration_table_maps_to_a_setting_is_taken_or_answered():
    known = {*OURS, "config", *ALIASES, *FOREIGN, *GONE}
    for page in ("migrate-from-vllm.md", "migrate-from-tei.md"):
        section = (ROOT / "docs" / page).read_text().partition("## Flags")[2].partition("\n## ")[0]
        for theirs, ours in re.findall(r"^\| (`--.*?) \| (`--[^|]*) \|", section, re.M):
            for flag in re.findall(r"`--([\w-]+)`", theirs):
                assert flag.removeprefix("no-") in known, f"{page}: --{flag}: {ours}"
