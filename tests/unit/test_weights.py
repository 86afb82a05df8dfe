"""Weight slots in host memory, and what can be checked of CUDA slots without a GPU."""

import msgpack
import pytest
import torch

from shm.block import WRONG_LOOKING, Block
from shm.cuda_weights import SlotHandle
from shm.errors import BlockError, WeightsError
from shm.layout import ELEMENT_BYTES
from shm.weights import CpuWeightSlots, open_slots

NUM_ELEMENTS = 1000


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture
def blocks(dtype):
    blocks = [Block.create(f"slot-{slot}", NUM_ELEMENTS * dtype.itemsize, fill=WRONG_LOOKING) for slot in range(3)]
    yield blocks
    for block in blocks:
        block.close()


@pytest.fixture
def slots(blocks, dtype):
    slots = CpuWeightSlots(blocks, NUM_ELEMENTS, dtype)
    yield slots
    slots.close()


def master(seed):
    return torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(seed))


def test_fresh_slots_hold_nan(slots):
    assert all(slots.flat(slot).isnan().all() for slot in range(3))


def test_another_opener_sees_what_was_published_cast_and_in_place(slots, dtype):
    description = msgpack.unpackb(msgpack.packb(slots.description()))
    reader = open_slots(description, NUM_ELEMENTS, dtype)
    assert reader.in_place and reader.num_slots == 3
    view = reader.flat(1)
    assert slots.publish(1, master(0).requires_grad_()) == NUM_ELEMENTS * dtype.itemsize
    assert view.dtype == dtype and torch.equal(view, master(0).to(dtype))
    assert reader.flat(0).isnan().all() and reader.flat(2).isnan().all()
    assert reader.checksum(1) == slots.checksum(1)
    reader.close()


def test_a_checksum_notices_any_mixture_of_two_versions(slots, dtype, monkeypatch):
    monkeypatch.setattr("shm.weight_slots._STRIP_ELEMENTS", 64)  # several strips
    old, new = master(0).to(dtype), master(1).to(dtype)
    slots.publish(0, old)
    slots.publish(1, new)
    whole = {slots.checksum(0), slots.checksum(1)}
    assert len(whole) == 2 and all(0 <= value < 2**63 for value in whole)
    for cut in range(1, NUM_ELEMENTS, 37):
        slots.publish(2, torch.cat([new[:cut], old[cut:]]))
        assert slots.checksum(2) not in whole
    slots.publish(2, old[torch.randperm(NUM_ELEMENTS, generator=torch.Generator().manual_seed(2))])
    assert slots.checksum(2) not in whole


def test_a_checksum_does_not_depend_on_how_it_is_cut_into_strips(slots, monkeypatch):
    slots.publish(0, master(0))
    whole = slots.checksum(0)
    monkeypatch.setattr("shm.weight_slots._STRIP_ELEMENTS", 7)
    assert slots.checksum(0) == whole


@pytest.mark.parametrize("shape", [(NUM_ELEMENTS - 1,), (1,), (NUM_ELEMENTS, 1)])
def test_weights_of_another_shape_are_refused_and_nothing_is_written(slots, shape):
    with pytest.raises(WeightsError, match="can't be published into a slot of 1000 elements"):
        slots.publish(0, torch.zeros(shape))
    assert slots.flat(0).isnan().all()


@pytest.mark.parametrize("slot", [-1, 3])
def test_there_is_no_slot_beyond_the_last(slots, slot):
    with pytest.raises(WeightsError, match="no weight slot"):
        slots.publish(slot, master(0))


def test_a_block_too_small_for_the_model_is_refused(blocks, dtype):
    with pytest.raises(WeightsError, match="1001 elements"):
        CpuWeightSlots(blocks, NUM_ELEMENTS + 1, dtype)


def test_closed_slots_say_so_and_tensors_taken_before_stay_valid(slots, blocks):
    slots.publish(0, torch.ones(NUM_ELEMENTS))
    flat = slots.flat(0)
    slots.close()
    slots.close()
    with pytest.raises(WeightsError, match="closed"):
        slots.flat(0)
    with pytest.raises(BlockError, match="closed"):
        _ = blocks[0].view
    assert flat.float().sum() == NUM_ELEMENTS


@pytest.mark.parametrize("description", [{}, {"blocks": [], "handles": []}, {"path": 3}])
def test_a_description_names_exactly_one_kind_of_slots(description):
    with pytest.raises(WeightsError, match="exactly one of blocks, num_slots, handles"):
        open_slots(description, NUM_ELEMENTS, torch.float32)


def test_blocks_opened_before_one_that_is_gone_are_given_up():
    with Block.create("there", 4000) as block:
        fields = [{"path": block.path, "num_bytes": 4000}, {"path": "/proc/self/fd/100000", "num_bytes": 4000}]
        with pytest.raises(BlockError, match="cannot be opened"):
            open_slots({"blocks": fields}, NUM_ELEMENTS, torch.float32)


# CUDA slots without a GPU: what travels, and what is refused.

HANDLE = {
    "handle": bytes(range(64)),
    "device_uuid": "1b4e28ba-2fa1-11d2-883f-0016d3cca427",
    "num_elements": 1000,
    "dtype": "bfloat16",
}


def test_a_handle_survives_a_message_as_plain_fields():
    fields = msgpack.unpackb(msgpack.packb(SlotHandle.from_fields(HANDLE).to_fields()))
    assert fields == HANDLE
    for dtype in ELEMENT_BYTES:
        assert SlotHandle.from_fields(HANDLE | {"dtype": dtype}).dtype == dtype


@pytest.mark.parametrize(
    "change, why",
    [
        ({"handle": bytes(63)}, "must be 64 bytes"),
        ({"handle": "x" * 64}, "must be 64 bytes"),
        ({"handle": None}, "must be 64 bytes"),
        ({"device_uuid": "GPU-0"}, "UUID is 'GPU-0'"),
        ({"device_uuid": b"1b4e28ba-2fa1-11d2-883f-0016d3cca427"}, "UUID is b'"),
        ({"num_elements": 0}, "0 elements"),
        ({"num_elements": True}, "True elements"),
        ({"num_elements": 1e3}, "1000.0 elements"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"address": 1}, "Not a CUDA slot's handle"),
    ],
)
def test_a_handle_with_a_wrong_field_is_refused_before_cuda_sees_it(change, why):
    with pytest.raises(WeightsError, match=why):
        open_slots({"handles": [HANDLE | change]}, NUM_ELEMENTS, torch.bfloat16, "cuda:0")


def test_handles_that_do_not_belong_together_are_refused():
    for handles in ([], [HANDLE, HANDLE | {"num_elements": 999}]):
        with pytest.raises(WeightsError, match="differ in device, size or dtype"):
            open_slots({"handles": handles}, NUM_ELEMENTS, torch.bfloat16, "cuda:0")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_cuda_slots_need_a_gpu(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for description in ({"num_slots": 2}, {"handles": [HANDLE]}):
        with pytest.raises(WeightsError, match=f"asked for on {device}; that needs an NVIDIA GPU"):
            open_slots(description, NUM_ELEMENTS, torch.bfloat16, device)
