"""A message that a worker does not take ends its run with the message's kind: who sent it would wait for an answer."""

import asyncio

import pytest
from learner_in_process import InProcess, Recorded, Training, spec

from workers.attach import Attachments
from workers.errors import MessageError, WorkerFailed
from workers.messages import Generate, Save
from workers.sampler import Sampler

SECONDS = 20.0  # bound on every run


class OneMessage:
    """A worker's channel, on which one message comes."""

    incarnation = 0

    def __init__(self, message):
        self._left = [message]

    def receive(self, seconds):
        return self._left.pop()


def test_a_learner_that_gets_a_samplers_message_ends_with_its_kind():
    async def send():
        with Training(spec(), InProcess(), Recorded()) as training:
            await training.learner.start(0, ())
            training.workers.send(Generate([]))
            async with asyncio.timeout(SECONDS):
                while training.failure is None:
                    await asyncio.sleep(0)
            return training.failure

    failure = asyncio.run(send())
    assert isinstance(failure, WorkerFailed)
    assert str(failure) == (
        "The learner got Generate. It takes Payload, ForwardBackward, ReplayStep, OptimStep, Save, EndRun, Start and "
        "Stop. This is a mistake of the supervisor."
    )


def test_a_sampler_that_gets_a_learners_message_ends_with_its_kind():
    async def send():
        with Training(spec(num_samplers=1, sampler_devices=["cpu"]), InProcess(), Recorded()) as training:
            slots = await training.learner.start(0, ())
            queues = training.blocks.sampler_queues(0)[-1]
            config = training.blocks.sampler_config(0, slots) | queues
            attached = Attachments(config)
            try:
                Sampler(OneMessage(Save(0, "", "")), config, attached).loop()
            finally:
                attached.close()

    with pytest.raises(MessageError, match="The sampler got Save. It takes Generate, Payload, Release, EndRun, Start"):
        asyncio.run(send())
