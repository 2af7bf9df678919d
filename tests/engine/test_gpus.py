"""The GPUs of a machine, as an ``nvidia-smi``, the driver's folder and the environment tell them."""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_nvidia_smi import EIGHT, LABELS, MODEL, UUIDS, printing, write_nvidia_smi
from tests.pipes import read
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.engine import gpus
from trio_pool_serve.engine.gpus import Gpu, find_gpus, parse_listing, sharing_by_mps, visible_among

pytestmark = pytest.mark.unit

A100 = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
OTHER_A100 = "GPU-5d5b0000-d33d-2b2c-524d-9e3d8d2b8a77"
MIG = ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb")
OLD_MIG = (f"MIG-{A100}/7/0", f"MIG-{A100}/8/0")


def with_mig(*uuids: str) -> str:
    """An A100 that is divided, and one that is not."""
    devices = (f"  MIG 1g.5gb      Device  {number}: (UUID: {uuid})\n" for number, uuid in enumerate(uuids))
    return (
        f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {A100})\n{''.join(devices)}"
        f"GPU 1: NVIDIA A100-SXM4-40GB (UUID: {OTHER_A100})\n"
    )


@pytest.fixture
def find(tmp_path: Path) -> Callable:
    """Look for GPUs where ``nvidia-smi`` is a script, and the driver's folder has files of these texts."""

    async def look(script: str | None, *information: str, device: str = "cuda", limit_s: float = 60, **variables: str):
        path = tmp_path / "bin"
        path.mkdir()
        if script is not None:
            write_nvidia_smi(path, script)
        for number, text in enumerate(information):
            gpu = tmp_path / "gpus" / f"0000:{number:02x}:00.0"
            gpu.mkdir(parents=True)
            (gpu / "information").write_text(text)
        environment = {"PATH": f"{path}:/usr/bin:/bin", **variables}
        loading, folder = ModelConfig(device=device), tmp_path / "gpus"
        return await find_gpus(loading, environment=environment, driver_folder=folder, timeout_s=limit_s)

    return look


def information(uuid: str, *, excluded: str = "No") -> str:
    return (
        f"Model: \t\t {MODEL}\nIRQ:   \t\t 212\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.74.00.01\n"
        f"Bus Type: \t PCIe\nDevice Minor: \t 0\nGPU Firmware: \t 535.161.08\nGPU Excluded:\t {excluded}\n"
    )


# -- nvidia-smi and the driver ------------------------------------------------------------------------


async def test_nvidia_smi_lists_the_gpus(find):
    gpus = await find(printing(EIGHT))
    assert [gpu.number for gpu in gpus] == list(range(8))
    assert [gpu.uuid for gpu in gpus] == UUIDS
    assert [gpu.label for gpu in gpus] == LABELS
    assert str(gpus[5]) == f"{LABELS[5]} (GPU 5, {MODEL})"
    assert gpus[5].environment["CUDA_VISIBLE_DEVICES"] == UUIDS[5]


@pytest.mark.parametrize(
    ("device", "numbers"),
    [("cuda", [6, 2]), ("cuda:1", [2]), ("cuda:2", []), ("cpu", [])],
)
async def test_the_device_of_the_settings_chooses_among_the_visible(find, device, numbers):
    found = await find(printing(EIGHT), device=device, CUDA_VISIBLE_DEVICES="6,2")
    assert [gpu.number for gpu in found] == numbers


async def test_on_cpu_nvidia_smi_is_not_run(find, tmp_path):
    assert await find(f"touch {tmp_path / 'ran'}", device="cpu") == []
    assert not (tmp_path / "ran").exists()


UNUSABLE = {
    "missing": None,
    "without a driver": 'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the driver."; exit 9',
    "without devices": "echo 'No devices were found'; exit 6",
    "killed": "kill -9 $$",
    "empty": "true",
    "noise": "head -c 100000 /dev/urandom",
}


@pytest.mark.parametrize("script", UNUSABLE.values(), ids=UNUSABLE)
async def test_without_nvidia_smi_the_driver_lists_them(find, script):
    gpus = await find(script, information(UUIDS[0]), information(UUIDS[1], excluded="Yes"), information(UUIDS[2]))
    assert gpus == [Gpu(0, MODEL, UUIDS[0], UUIDS[0]), Gpu(1, MODEL, UUIDS[2], UUIDS[2])]


async def test_where_nothing_lists_them_there_are_none(find):
    assert await find(None) == []


async def test_one_that_cannot_be_executed_is_as_good_as_none(find, tmp_path):
    write_nvidia_smi(tmp_path / "broken", "")
    (tmp_path / "broken" / "nvidia-smi").write_bytes(b"\x7fELF\0\0")
    assert await find(None, information(UUIDS[0]), PATH=str(tmp_path / "broken")) == [Gpu(0, MODEL, UUIDS[0], UUIDS[0])]


async def test_a_gpu_without_a_uuid_is_seen_by_its_number_in_the_order_of_addresses(find):
    unknown = information("GPU-????????-????-????-????-????????????")
    first, second = await find(None, unknown, information("SECRET\x1b[2J"))
    assert first.label == "cuda:0"
    assert second.environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}


async def test_one_that_hangs_is_ended_and_the_driver_lists_them(find, tmp_path, caplog):
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    found = []

    async def look() -> None:
        script = f"echo 'GPU 7: half a list (UUID: {UUIDS[7]})'; echo $$ > {begun}; trap '' TERM; exec sleep 1000"
        found.extend(await find(script, information(UUIDS[0]), limit_s=2))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            pid = int(await read(begun))
    assert [gpu.uuid for gpu in found] == [UUIDS[0]]
    assert "did not end within" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_one_that_is_cancelled_leaves_no_process(find, tmp_path):
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(find, f"echo $$ > {begun}; exec sleep 1000")
        pid = int(await read(begun))
        nursery.cancel_scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_one_that_prints_without_end_is_ended_and_its_first_lines_count(find):
    gpus = await find(f"{printing(EIGHT)}\nexec yes 'GPU 9: of a loop (UUID: GPU-9)'")
    assert [gpu.uuid for gpu in gpus] == [*UUIDS, "GPU-9"]


async def test_a_gpu_that_is_lost_is_left_out(find):
    """The driver may fail for one GPU while it lists the others."""
    lost = "Unable to determine the device handle for gpu 0000:45:00.0: GPU is lost.  Reboot the system to recover."
    lines = EIGHT.splitlines(keepends=True)
    gpus = await find(f"{printing(''.join([*lines[:3], lost, chr(10), *lines[4:]]))}\nexit 15")
    assert [gpu.number for gpu in gpus] == [0, 1, 2, 4, 5, 6, 7]


def test_odd_lines_are_no_gpus():
    odd = [
        f"GPU 0: {MODEL}",
        f"GPU x: {MODEL} (UUID: {UUIDS[0]})",
        f"GPU 12345: {MODEL} (UUID: {UUIDS[0]})",
        f"GPU ٣: {MODEL} (UUID: {UUIDS[0]})",
        f"GPU 0: {MODEL} (UUID: GPU-{'a' * 100})",
        f"GPU 0: {MODEL} (UUID: GPU-1,GPU-2)",
        f"GPU 0: {MODEL} (UUID: {UUIDS[0]}) and more",
        "  MIG 1g.5gb Device 0: (UUID: MIG-of-no-gpu)",
        "",
    ]
    assert parse_listing("\n".join(odd)) == []
    (gpu,) = parse_listing("\r\n".join([*odd, f"GPU 4: {'x' * 500}\x1b[31m (UUID: {UUIDS[4]})", EIGHT.splitlines()[4]]))
    assert (gpu.number, gpu.name) == (4, "x" * 80)
    (gpu,) = parse_listing(f"GPU 4: a\x1b[31mb\tc (UUID: {UUIDS[4]})")
    assert gpu.name == "a?[31mb?c"


LINES = st.sampled_from([*EIGHT.splitlines(), *with_mig(*MIG).splitlines(), with_mig(*OLD_MIG), "\0", "("])


@given(st.text(max_size=200) | st.lists(LINES).map("\n".join))
def test_no_listing_is_an_error_and_no_device_is_listed_twice(listing):
    devices = parse_listing(listing)
    assert len({gpu.uuid for gpu in devices}) == len(devices)


# -- MIG ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uuids", [MIG, OLD_MIG], ids=["by UUID", "by instances"])
async def test_the_devices_of_a_divided_gpu_stand_in_its_place(find, uuids):
    gpus = await find(printing(with_mig(*uuids)))
    assert [gpu.uuid for gpu in gpus] == [*uuids, OTHER_A100]
    assert [gpu.number for gpu in gpus] == [0, 0, 1]
    assert gpus[0].name == "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert gpus[0].environment["CUDA_VISIBLE_DEVICES"] == uuids[0]
    short = ["cuda:MIG-c6d4f1ef", "cuda:MIG-cba663e8"] if uuids is MIG else [f"cuda:{uuid}" for uuid in uuids]
    assert [gpu.label for gpu in gpus] == [*short, "cuda:GPU-5d5b0000"]


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, [*MIG, OTHER_A100]),
        ("0", MIG),
        ("1,0", [OTHER_A100, *MIG]),
        (A100, MIG),
        ("GPU-5d5ba", MIG),
        (MIG[1], MIG[1:]),
        ("MIG-cba663e8", MIG[1:]),
        ("MIG-c", []),
        (f"{MIG[0]},{A100}", MIG[:1]),
        (f"MIG-{A100}/7/0", [f"MIG-{A100}/7/0"]),
        (f"MIG-{OTHER_A100}/7/0", []),
        ("MIG-", []),
    ],
)
def test_mig_devices_are_visible_by_their_names_and_by_their_gpus(variable, uuids):
    assert [gpu.uuid for gpu in visible_among(parse_listing(with_mig(*MIG)), variable)] == list(uuids)


# -- CUDA_VISIBLE_DEVICES -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "numbers"),
    [
        (None, range(8)),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("3", [3]),
        (" 7 , 0", [7, 0]),
        ("+2", [2]),
        ("00000000000000000003,00", [3, 0]),
        ("1gpu,2ampere", [1, 2]),
        ("0,2,-1,1", [0, 2]),
        ("0,8,1", [0]),
        ("0,,1", [0]),
        ("1,1", []),
        ("0,1,0", []),
        ("12345678901234567890,0", []),
        ("1" * 10_000, []),
        ("٣", []),
        (f"{UUIDS[2]},{UUIDS[0]}", [2, 0]),
        ("GPU-000000a5", [5]),
        ("GPU-000000a", []),
        ("GPU-", []),
        (f"{UUIDS[2]},GPU-ffffffff,{UUIDS[0]}", [2]),
        (f"{UUIDS[2]},{UUIDS[2]}", []),
        (f"{UUIDS[2]},GPU-000000a2", []),
        (f"{UUIDS[2]},1", [2]),
        (f"1,{UUIDS[2]}", [1]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(variable, numbers):
    assert [gpu.number for gpu in visible_among(parse_listing(EIGHT), variable)] == list(numbers)


# -- MPS control daemons ------------------------------------------------------------------------------


@pytest.fixture
def directory():
    """One with a short name, as a socket's path has at most 107 bytes."""
    with TemporaryDirectory() as name:
        yield Path(name)


def test_a_daemon_listens_to_the_socket_in_its_directory_which_has_a_default(directory, monkeypatch):
    environment, control = {"CUDA_MPS_PIPE_DIRECTORY": str(directory)}, directory / "control"
    assert "take turns" in sharing_by_mps(environment)
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as daemon:
            daemon.bind(str(control))
            daemon.listen()
            found = sharing_by_mps(environment)
            assert found == f"replicas on the same GPU compute concurrently, by the MPS control daemon at {directory}"
            monkeypatch.setattr(gpus, "MPS_PIPE_DIRECTORY", str(directory))
            assert found == sharing_by_mps({}) == sharing_by_mps({"CUDA_MPS_PIPE_DIRECTORY": ""})
        assert control.is_socket()
        assert "take turns" in sharing_by_mps(environment)
        assert "(Connection refused)" in sharing_by_mps(environment)
        control.unlink()


def test_a_daemon_that_is_busy_answers(directory):
    """CUDA waits for it; this does not."""
    with socket.socket(socket.AF_UNIX) as daemon, ExitStack() as waiting:
        daemon.bind(str(directory / "control"))
        daemon.listen(0)
        for _ in range(2):
            client = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            with suppress(BlockingIOError):
                client.connect(str(directory / "control"))
        assert "concurrently" in sharing_by_mps({"CUDA_MPS_PIPE_DIRECTORY": str(directory)})


def test_what_is_no_socket_is_no_daemon(directory):
    os.mkfifo(directory / "control")
    assert "take turns" in sharing_by_mps({"CUDA_MPS_PIPE_DIRECTORY": str(directory)})


@pytest.mark.parametrize("name", ["/nowhere", "x" * 5000, "/proc/1/cwd", "/dev/null"])
def test_a_directory_that_cannot_be_read_has_no_daemon(name):
    assert "take turns" in sharing_by_mps({"CUDA_MPS_PIPE_DIRECTORY": name})


def test_where_no_daemon_answers_it_is_said_where_to_start_one(tmp_path):
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "PATH": str(tmp_path)}
    reason = f"replicas on the same GPU take turns: no MPS control daemon answers at {tmp_path}"
    start = "(No such file or directory). Start nvidia-cuda-mps-control -d"
    without_tool = sharing_by_mps(environment)
    assert without_tool == f"{reason} {start} on the host, and mount its directory here."
    (tmp_path / "nvidia-cuda-mps-control").touch(mode=0o755)
    assert sharing_by_mps(environment) == f"{reason} {start} before the server."
