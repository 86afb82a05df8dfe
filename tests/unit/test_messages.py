"""Messages on the wire: what is sent arrives equal, and nothing else passes for a message."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import messages
from workers.errors import MessageError
from workers.message_codec import PROTOCOL, decode, encode

SEGMENT = messages.Segment(7, 3, 2, 4096, 12, 8, True, 0.25, 0.0, 1, 5)
REQUEST = messages.GenerateRequest(7, -1, 2, 3, 1, 4096, 100, 64, 12, 1)
CALL = messages.EnvironmentCall(9, 4, 2, "reset", {"row": {"number": 3}, "seed": 2**63 - 1})
REPLY = messages.EnvironmentReply(
    9, {"messages": None, "reward": 1.0}, [messages.ToolRecord("guess", 0.5, None)], 0.75, None
)

# One of each kind, no field at its default.
EXAMPLES = [
    messages.Hello(role="sampler", pid=4321),
    messages.Start(config={"seed": 3, "nested": {"list": [1, 2.5, None, "ä"]}, "raw": b"\x00\xff"}),
    messages.Ready(detail={"slots": {"num_slots": 4}}),
    messages.Failed(why="No room.", is_final=True),
    messages.Stop(),
    messages.Consumed(consumed=2**40),
    messages.Payload(position=3, length=17),
    messages.EndRun(),
    messages.RunEnded(),
    messages.Generate(requests=[REQUEST, REQUEST._replace(request=8)], consumed=5),
    messages.Release(trajectories=[[4, 2], [-1, 0]], versions=[3], consumed=5),
    messages.Segments(segments=[SEGMENT], consumed=5),
    messages.ForwardBackward(batch=1, num_rows=2, num_tokens=30, position=-1, length=500, zero_gradients=False),
    messages.GradientsDone(batch=1, metrics={"train/loss": -0.5}, consumed=5),
    messages.OptimStep(
        batch=1, from_version=3, to_version=4, slot=2, groups=[4, 5], epoch=9, lr=1e-3, gradient_scale=0.125
    ),
    messages.Published(version=4, slot=2, metrics={"train/grad_norm": 1.5}, consumed=5),
    messages.Save(version=4, path="run/.tmp-4/model.safetensors", optimizer_path="run/.tmp-4/optimizer.safetensors"),
    messages.Saved(version=4, num_bytes=2**40, checksums=[0, 2**64 - 1], error="No room.", consumed=5),
    messages.ReplayStep(batch=3, from_version=2, slot=-1, lr=1e-3, gradient_scale=0.5),
    messages.Replayed(version=3, difference=1e-9, consumed=6),
    messages.Environments(calls=[CALL]),
    messages.EnvironmentReplies(replies=[REPLY, REPLY._replace(error="It broke.", tools=[])]),
]


def wire(message=EXAMPLES[0], **changes):
    """The message as the list that msgpack packs, with parts replaced: protocol, incarnation, kind, fields."""
    protocol, incarnation, kind, *content = msgpack.unpackb(encode(message, 1))
    parts = {"protocol": protocol, "incarnation": incarnation, "kind": kind, "fields": content} | changes
    return msgpack.packb([parts["protocol"], parts["incarnation"], parts["kind"], *parts["fields"]])


def test_there_is_an_example_of_every_kind():
    assert [type(example) for example in EXAMPLES] == list(messages.KINDS.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_kind_arrives_as_it_was_sent(message):
    incarnation, received = decode(encode(message, 3))
    assert (incarnation, received, type(received)) == (3, message, type(message))


def test_records_arrive_as_named_tuples():
    _, generate = decode(encode(EXAMPLES[9], 0))
    assert [type(request) for request in generate.requests] == [messages.GenerateRequest] * 2
    assert generate.requests[1].request == 8
    _, replies = decode(encode(EXAMPLES[-1], 0))
    assert type(replies.replies[0]) is messages.EnvironmentReply
    assert type(replies.replies[0].tools[0]) is messages.ToolRecord


def test_whole_numbers_are_taken_for_floats():
    """A peer may write 1.0 as 1; a learning rate of 1 is one."""
    message = EXAMPLES[14]
    content = msgpack.unpackb(encode(message, 1))[3:]
    content[6] = 1
    assert decode(wire(message, fields=content))[1].lr == 1


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (wire(protocol=PROTOCOL + 1), f"speaks protocol {PROTOCOL + 1}, this process speaks {PROTOCOL}"),
        (wire(protocol=None), "speaks protocol None"),
        (wire(kind=99), "of kind 99"),
        (wire(kind="Hello"), "of kind 'Hello'"),
        (wire(kind=[1]), r"of kind \[1\]"),
        (wire(incarnation="1"), "incarnation '1'"),
        (wire(fields=["sampler"]), "Hello message has 1 fields, not 2"),
        (wire(fields=["sampler", 1, 2]), "Hello message has 3 fields, not 2"),
        (wire(fields=["sampler", "1"]), "Hello.pid is '1', which is of the wrong type"),
        (wire(fields=[None, 1]), "Hello.role is None"),
        (wire(EXAMPLES[9], fields=[[[1, 2]], 0]), "GenerateRequest record is .* not an array of 10 fields"),
        (wire(EXAMPLES[9], fields=[[5], 0]), "GenerateRequest record is 5"),
        (wire(EXAMPLES[9], fields=[{}, 0]), "Generate.requests is {}"),
        (wire(EXAMPLES[-1], fields=[[[9, {}, [["guess", 0.5]], 0.75, None]]]), "ToolRecord record is"),
        (wire(EXAMPLES[-1], fields=[[[9, {}, 3, 0.75, None]]]), "EnvironmentReply"),
        (b"", "no msgpack"),
        (b"\xc1", "no msgpack"),
        (encode(EXAMPLES[1], 0) + b"\x00", "no msgpack"),
        (msgpack.packb({"protocol": 1}), "no array"),
        (msgpack.packb([PROTOCOL, 0]), "no array"),
        (b"cos\nsystem\n(S'true'\ntR.", "no msgpack"),  # a pickle is never loaded
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_message_is_refused_in_one_sentence(data, sentence):
    with pytest.raises(MessageError, match=sentence):
        decode(data)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_torn_messages_are_refused(message):
    data = encode(message, 3)
    for length in range(len(data)):
        with pytest.raises(MessageError):
            decode(data[:length])


@pytest.mark.parametrize(
    "message",
    [
        messages.Generate(requests=[REQUEST._replace(max_tokens="64")]),
        messages.Segments(segments=[SEGMENT._replace(num_tokens=None)]),
        messages.Environments(calls=[CALL._replace(argument=[])]),
        messages.EnvironmentReplies(replies=[REPLY._replace(result=None)]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_record_with_a_field_of_the_wrong_type_is_refused(message):
    with pytest.raises(MessageError):
        decode(encode(message, 0))


def decodes_or_refuses(data):
    try:
        incarnation, message = decode(data)
    except MessageError as error:
        assert str(error).endswith(".")
    else:
        assert isinstance(incarnation, int) and isinstance(message, messages.Message)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_else(data):
    decodes_or_refuses(data)


WRONG = [None, True, -1, 2**64 - 1, 0.5, float("nan"), "", "ä", b"", [], [1, 2], [[]], {}, {1: "x"}]


def with_one_replaced(value, replacement):
    """Every value like `value` in which one item, at any depth, is `replacement`."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            for changed in (replacement, *with_one_replaced(item, replacement)):
                yield [*value[:index], changed, *value[index + 1 :]]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_any_value_in_the_place_of_any_other_raises_nothing_else(message):
    original = msgpack.unpackb(encode(message, 1))
    for replacement in WRONG:
        for changed in with_one_replaced(original, replacement):
            decodes_or_refuses(msgpack.packb(changed))


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_message_with_one_byte_changed_raises_nothing_else(message, data):
    packed = bytearray(encode(message, 1))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses(bytes(packed))


@pytest.mark.parametrize("place", range(5))
def test_lists_in_lists_as_deep_as_they_are_read_are_refused_in_words(place):
    """Deeper than Python can show them."""
    deep = b"\x91" * 1000 + b"\xc0"
    parts = [bytes([PROTOCOL]), b"\x01", b"\x1f", b"\x91" + deep]  # EnvironmentReplies
    data = bytes([0x90 + max(4, place + 1)]) + b"".join([*parts[:place], deep, *parts[place + 1 :]])
    with pytest.raises(MessageError) as refused:
        decode(data)
    assert len(str(refused.value)) < 500
