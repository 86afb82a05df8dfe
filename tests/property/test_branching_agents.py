"""An agent that goes on, branches, asks again and begins anew in any order is always answered behind the exact ids."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.played_agent import LetterChat, letters, play, said, user
from tests.unit.played_trajectory import STOP

MOVES = st.lists(st.tuples(st.sampled_from(("on", "again", "anew", "foreign")), st.integers(0, 9)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(MOVES)
def test_every_answer_is_sampled_behind_the_ids_of_the_conversation(moves):
    # Turn i writes i twice: 9, in a turn, would be a call.
    segments = [(10 + index, 10 + index, STOP) for index in range(len(moves) + 1)]

    async def script(agent):
        known = []  # (messages with the answer, the ids up to its end, the messages before it, the ids before it)

        async def ask(messages, ids):
            answer = await agent.ask(*messages)
            assert agent.requests[-1][0] == ids, "the context is the exact ids, whatever came in between"
            assert answer.prompt_tokens == len(ids)
            known.append(([*messages, said(answer)], [*ids, *answer.turn.ids], messages, ids))

        await ask([user("a")], [*letters(user("a")), LetterChat.OPENING])
        for number, (move, which) in enumerate(moves):
            spoken, ids, before, ids_before = known[which % len(known)]
            new = user(f"b{number}")
            if move == "on":
                await ask([*spoken, new], [*ids, *letters(new), LetterChat.OPENING])
            elif move == "again":
                await ask(before, ids_before)
            elif move == "foreign":
                other = {"role": "assistant", "content": "mine"}
                framing = [*letters(other), *letters(new), LetterChat.OPENING]
                await ask([*spoken, other, new], [*ids, *framing])
            else:
                await ask([new], [*letters(new), LetterChat.OPENING])
        agent.post(1.0)
        assert await agent.end() == (None, 1.0)
        for span in agent.trajectory.spans:
            if span.kind == "generated":
                assert len(span.tokens) == len(span.logprobs) == 3
        generated = [token for span in agent.trajectory.spans if span.kind == "generated" for token in span.tokens]
        assert generated == [token for segment in segments for token in segment], "all that was sampled is recorded"

    play(segments, script, max_turns=100)
