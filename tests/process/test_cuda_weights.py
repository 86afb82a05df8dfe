"""Weight slots in CUDA memory, opened by a second process through their IPC handles."""

import json

import msgpack
import pytest
import torch
from test_shared_memory import WAIT_SECONDS, start

from shm.errors import WeightsError
from shm.weights import CudaWeightSlots, open_slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU that torch can use; there is none"),
]

NUM_ELEMENTS = 1_000_003


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def slots(request):
    slots = open_slots({"num_slots": 3}, NUM_ELEMENTS, request.param, "cuda:0")
    yield slots
    slots.close()


def read_in_another_process(slots, device="cuda:0"):
    child = start("cuda_reader", device)
    child.stdin.buffer.write(msgpack.packb(slots.description()))
    output, errors = child.communicate(timeout=WAIT_SECONDS)
    assert child.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def test_another_process_sees_the_published_weights_in_place(slots):
    assert slots.flat(1).isnan().all()
    master = torch.randn(NUM_ELEMENTS, device="cuda:0")
    for slot in range(3):
        assert slots.publish(slot, master + slot) == NUM_ELEMENTS * slots.dtype.itemsize
    expected = [slots.checksum(slot) for slot in range(3)]
    report = read_in_another_process(slots)
    assert report["checksums"] == expected and report["in_place"] and report["device"] == "cuda:0"
    assert report["first"] == master[:4].to(slots.dtype).tolist()
    assert (slots.flat(2) == 3.0).all()  # the other process wrote to the same memory
    assert slots.checksum(1) == expected[1]


def test_a_checksum_is_the_same_on_cpu_and_gpu(slots):
    from shm.block import Block
    from shm.weights import CpuWeightSlots

    master = torch.randn(NUM_ELEMENTS)
    with Block.create("twin", NUM_ELEMENTS * slots.dtype.itemsize) as block:
        twin = CpuWeightSlots([block], NUM_ELEMENTS, slots.dtype)
        twin.publish(0, master)
        slots.publish(0, master)
        assert slots.checksum(0) == twin.checksum(0)
        twin.close()


def test_closing_gives_the_device_memory_back():
    num_elements = 64 << 20
    CudaWeightSlots.allocate(1, 1000, torch.float32, "cuda:0").close()  # whatever the first use takes
    before, _ = torch.cuda.mem_get_info(0)
    slots = CudaWeightSlots.allocate(2, num_elements, torch.float32, "cuda:0")
    assert before - torch.cuda.mem_get_info(0)[0] >= 2 * num_elements * 4
    slots.close()
    slots.close()
    assert torch.cuda.mem_get_info(0)[0] >= before - (64 << 20)
    with pytest.raises(WeightsError, match="closed"):
        slots.flat(0)


def test_slots_too_large_for_the_device_are_refused_and_leave_nothing():
    before, total = torch.cuda.mem_get_info(0)
    with pytest.raises(WeightsError, match="do not fit on cuda:0"):
        CudaWeightSlots.allocate(3, total // 8, torch.float32, "cuda:0")
    assert torch.cuda.mem_get_info(0)[0] >= before - (64 << 20)
    assert torch.ones(3, device="cuda:0").sum() == 3  # the error does not linger


def test_a_handle_of_a_gpu_that_is_not_here_is_refused(slots):
    fields = slots.handles()
    for slot in fields:
        slot["device_uuid"] = "00000000-0000-0000-0000-000000000000"
    with pytest.raises(WeightsError, match="not visible here"):
        open_slots({"handles": fields}, NUM_ELEMENTS, slots.dtype, "cuda:0")
