"""Sizes and durations are read with their units, wherever they are written, and refused with what is accepted."""

import pytest
from cyclopts import CycloptsError

from trio_pool_serve.cli import read_config
from trio_pool_serve.command_line.server_commands import read_settings

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("16MiB", 16 * 2**20), ("16mi", 16 * 2**20), ("1.5GiB", 3 * 2**29), ("500MB", 500_000_000), ("4096", 4096),
        ("20 kB", 20_000), ("1e6", 1_000_000), ("7b", 7),
    ],
)  # fmt: skip
def test_sizes(written, meant, monkeypatch, tmp_path):
    toml = tmp_path / "settings.toml"
    toml.write_text(f"max-body-bytes = '{written}'\n")
    assert read_config(["m", "--max-body-bytes", written]).network.max_body_bytes == meant
    assert read_config(["m", "--config", str(toml)]).network.max_body_bytes == meant
    monkeypatch.setenv("TRIO_POOL_SERVE_MAX_BODY_BYTES", written)
    assert read_config(["m"]).network.max_body_bytes == meant


def test_durations():
    meant = {"30s": 30, "500ms": 0.5, "2m": 120, "2min": 120, "1h": 3600, "1.5": 1.5, "1d": 86400}
    read = {each: read_config(["m", "--request-timeout-s", each]).time_limits.request_timeout_s for each in meant}
    assert read == meant


@pytest.mark.parametrize("written", ["", "16 stones", "MiB", "1,5GiB", "0x10", "1e400", "nan", "inf"])
def test_a_size_or_duration_that_is_not_understood_is_refused_by_the_flag_s_name(written):
    with pytest.raises((CycloptsError, ValueError), match=r"--max-body-bytes.*(not a size|must be)"):
        read_config(["m", f"--max-body-bytes={written}"])
    with pytest.raises((CycloptsError, ValueError), match=r"--max-queue-s.*(not a duration|must be)"):
        read_config(["m", f"--max-queue-s={written}"])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (["--max-model-len=8k"], "--max-model-len: `8k` is not a whole number"),
        (["--max-batch-tokens=16k"], "--max-batch-tokens: `16k` is not auto or a whole number"),
        (["--max-batch-tokens=0"], "--max-batch-tokens: `0` is not auto or a number of tokens"),
        (["--host="], "--host: `` is not a host name"),
        (["--api-key="], "--api-key is empty"),
    ],
)
def test_a_value_that_is_not_accepted_is_refused_with_what_is(written, said):
    with pytest.raises((CycloptsError, ValueError), match=said):
        read_config(["m", *written])


def test_the_engine_takes_units_and_bounds_too():
    arguments = ["m", "--listen=127.0.0.1:9000", "--key-file=/etc/key"]
    settings = read_settings("engine", [*arguments, "--drain-timeout-s=2m"])
    assert settings.config.time_limits.drain_timeout_s == 120
    with pytest.raises(ValueError, match="--drain-timeout-s must be more than 0, not -1"):
        read_settings("engine", [*arguments, "--drain-timeout-s=-1"])
    with pytest.raises(ValueError, match="--key-file is missing"):
        read_settings("engine", arguments[:2])


def test_of_a_flag_that_is_given_twice_the_last_value_counts(tmp_path):
    first, last = tmp_path / "first.toml", tmp_path / "last.toml"
    first.write_text("port = 1\n")
    last.write_text("port = 2\n")
    twice = {"--dtype": ("float32", "bfloat16"), "--request-timeout-s": ("1s", "2m"), "--api-key": ("a", "b")}
    flags = [f"{flag}={value}" for flag, values in twice.items() for value in values]
    read = read_config(["m", "--config", str(first), *flags, "--access-log", "--access-log", f"--config={last}"])
    assert read.loading.dtype == "bfloat16"
    assert read.time_limits.request_timeout_s == 120
    assert read.network.api_key_list == ("b",)
    assert read.logging.access_log
    assert read.network.port == 2
    assert read_config(["m", "--adapter", "a=/a", "--adapter", "b=/b"]).loading.adapter == ("a=/a", "b=/b")
