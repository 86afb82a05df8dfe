"""Devices are chosen by counting GPUs through the driver, as CUDA_VISIBLE_DEVICES leaves them visible."""

import pytest

from workers.machine.devices import DeviceError, count_gpus, resolve_devices, sampler_device, visible_gpus


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2, 3", 2),
        ("0,7,1", 1),  # the list ends at the first index that doesn't exist
        ("1,1", 0),
        ("GPU-1234,GPU-5678", 2),
        ("none", 0),
    ],
)
def test_visible_gpus_follow_the_variable(chosen, count):
    assert visible_gpus(chosen, 4) == count


def test_no_driver_means_no_gpu():
    assert visible_gpus("0", 0) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


@pytest.mark.parametrize(
    ("device", "samplers", "num_gpus", "expected"),
    [
        ("cpu", None, 8, ("cpu", 1)),
        ("cpu", 3, 0, ("cpu", 3)),
        ("auto", None, 0, ("cpu", 1)),
        ("auto", None, 1, ("cuda", 1)),
        ("auto", None, 4, ("cuda", 3)),
        ("cuda", 2, 4, ("cuda", 2)),
    ],
)
def test_learner_takes_one_gpu_and_samplers_the_others(device, samplers, num_gpus, expected):
    assert resolve_devices(device, samplers, num_gpus=num_gpus, cuda_build=True) == expected


def test_cpu_build_of_torch_cannot_use_a_gpu():
    assert resolve_devices("auto", None, num_gpus=1, cuda_build=False) == ("cpu", 1)
    with pytest.raises(DeviceError, match="built for the CPU only"):
        resolve_devices("cuda", None, num_gpus=1, cuda_build=False)


@pytest.mark.parametrize(
    ("device", "samplers", "num_gpus", "part"),
    [
        ("cuda", None, 0, "no NVIDIA GPU"),
        ("cuda", 2, 1, "1 GPU has room for 1"),
        ("cuda", 4, 4, "4 GPUs have room for 3"),
        ("auto", 4, 4, "4 GPUs have room for 3"),
        ("tpu", None, 1, "tpu"),
        ("cpu", 0, 1, "samplers is 0"),
        ("cpu", True, 1, "samplers is True"),
    ],
)
def test_impossible_devices_are_refused(device, samplers, num_gpus, part):
    with pytest.raises(DeviceError, match=part):
        resolve_devices(device, samplers, num_gpus=num_gpus, cuda_build=True)


def test_a_sampler_shares_the_only_gpu():
    assert sampler_device(0, 1) == "cuda:0"
    assert [sampler_device(i, 3) for i in range(2)] == ["cuda:1", "cuda:2"]


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_far_more_samplers_than_cores_are_refused_on_the_cpu(device):
    with pytest.raises(DeviceError, match=r"samplers is 100000, but 4 per core"):
        resolve_devices(device, 100_000, num_gpus=0, cuda_build=False)
    assert resolve_devices(device, 2, num_gpus=0, cuda_build=False) == ("cpu", 2)
