"""Recorded faults of chat templates and token masks, through the trajectory loop to the learner's micro-batches."""

import json

import numpy as np
import pytest
from chat_models import CASES, sampled, write_chat_model
from played_trajectory import Environment, Played, segment

from pipeline.advantages import Batchwise
from pipeline.batches.batch_rules import BatchRules
from pipeline.batches.make_batch import make_batch
from pipeline.chat.model_chat import load_chat
from pipeline.config import Truncation
from pipeline.errors import TemplateError
from pipeline.trajectory import Group, Span, Trajectory
from workers.learning.packing import TrainingRows, micro_batches

ARRAYS = ("lengths", "tokens", "weights", "scales", "behaviour_logprobs", "versions")


def read(case, name):
    return json.loads((CASES / case / name).read_text())


def case_chat(tmp_path, case="HR10", tokenizer="HR10", **config):
    """The chat format of a model directory with the case's template and tokenizer."""
    (tmp_path / "chat_template.jinja").write_text((CASES / case / "chat_template.jinja").read_text())
    (tmp_path / "tokenizer.json").write_text((CASES / tokenizer / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | config))
    return load_chat(tmp_path)


def play(chat, start, turns, replies):
    """One trajectory whose sampler gives `turns` and whose environment answers with `replies`."""
    environment = Environment(
        [{"messages": messages, "max_turn_tokens": None} for messages in replies],
        reset={"messages": start, "tools": [], "wrap_up": []},
    )
    played = Played([segment(*ids, stopped=ids[-1] in chat.stop_ids) for ids in turns], environment)
    played.loop.turns.chat = chat
    return played.run()


def micro_batch_of(*trajectories):
    """The learner's one micro-batch of them, with all tokens trained."""
    for index, trajectory in enumerate(trajectories):
        trajectory.member, trajectory.reward = index, float(index)
    rules = BatchRules(advantage=Batchwise(), normalize="sum", truncation=Truncation())
    batch = make_batch([Group(0, 0, 0, list(trajectories))], 5, rules)
    (made,) = micro_batches(TrainingRows(**dict(zip(ARRAYS, batch.rows.payload(), strict=True))), 10_000)
    return batch.rows, made


def masks(rows):
    """Per row, whether each token at its own place is trained."""
    ends = np.cumsum(rows.lengths)
    return [
        [0, *(scale > 0 for scale in rows.scales[end - length : end - 1])]
        for end, length in zip(ends, rows.lengths, strict=True)
    ]


def test_hr10_sampled_ids_stay_though_their_text_would_give_others(tmp_path):
    chat = case_chat(tmp_path)
    forced = read("HR10", "forced_ids.json")
    ids = forced["turn_1_sampled"]
    assert sampled(chat, chat.decode(ids)) == [6, 9] != ids
    user = {"role": "user", "content": "hello"}
    played = play(chat, [user], [ids, [6, 9]], [[{"role": "user", "content": forced["turn_2_user"]}]])
    prompt = chat.render_prompt([user], [])
    assert prompt == sampled(chat, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    framing = sampled(chat, "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n")
    assert played.requests[1][0] == [*prompt, *ids, *framing]
    assert played.tokens == [("prompt", prompt), ("generated", ids), ("framing", framing), ("generated", [6, 9])]
    assert played.trajectory.spans[1].logprobs == [-4.0, -5.0, -9.0]

    rows, made = micro_batch_of(played.trajectory, play(chat, [user], [[6, 9]], []).trajectory)
    first = rows.tokens[: rows.lengths[0]].tolist()
    assert first == [*prompt, *ids, *framing, 6, 9]
    assert masks(rows)[0] == [0] * len(prompt) + [1] * 3 + [0] * len(framing) + [1, 1]
    assert sorted(made.targets.tolist()) == sorted([*ids, 6, 9, 6, 9])


def test_hr11_the_newline_behind_a_turns_end_is_there_once_and_not_trained(tmp_path):
    chat = case_chat(tmp_path, "HR11", "HR11")
    first, said, second = read("HR11", "messages.json")
    played = play(chat, [first], [sampled(chat, said["content"] + "<|im_end|>"), [6, 9]], [[second]])
    expected = sampled(chat, (CASES / "HR11" / "expected_text.txt").read_text())
    assert played.requests[1][0] == expected == chat.render_prompt([first, said, second], [])
    kind, tokens = played.tokens[2]
    assert (kind, chat.decode(tokens[:2])) == ("framing", "\n<|im_start|>")
    rows, _ = micro_batch_of(played.trajectory, play(chat, [first], [[6, 9]], []).trajectory)
    newline = len(played.tokens[0][1]) + len(played.tokens[1][1])
    assert masks(rows)[0][newline - 1 : newline + 1] == [1, 0]


def test_hr11_a_turn_without_its_end_gets_it_untrained(tmp_path):
    chat = case_chat(tmp_path, "HR11", "HR11")
    first, said, second = read("HR11", "messages.json")
    prompt = chat.render_prompt([first], [])
    played = Played(
        [segment(6, stopped=False), segment(9, stopped=True)],
        Environment(
            [{"messages": [second], "max_turn_tokens": None}],
            reset={"messages": [first], "tools": [], "wrap_up": []},
        ),
        max_turn_tokens=1,
    )
    played.loop.turns.chat = chat
    played.run()
    assert played.requests[1][0] == chat.render_prompt([first, said, second], [])
    assert played.tokens[1:3] == [("generated", [6]), ("framing", played.requests[1][0][len(prompt) + 1 :])]


def test_hr13_the_mask_is_the_record_of_sampling_and_no_template_is_asked(tmp_path):
    chat = case_chat(tmp_path, "HR13")
    messages = read("HR13", "messages.json")
    assert "% generation %" not in (CASES / "HR13" / "chat_template.jinja").read_text()
    turns = [[6, 9], [4, 5, 6, 9]]
    played = play(chat, messages[:1], turns, [messages[2:]])
    rows, made = micro_batch_of(played.trajectory, play(chat, messages[:1], [[7, 9]], []).trajectory)
    assert [sum(mask) for mask in masks(rows)] == [6, 2]
    trained = [token for token, mask in zip(rows.tokens[: rows.lengths[0]], masks(rows)[0], strict=True) if mask]
    assert trained == [6, 9, 4, 5, 6, 9]
    assert len(made.targets) == 8


def test_hr14_masks_go_by_place_also_where_padding_has_the_ids_of_an_end(tmp_path):
    config = read("HR14", "tokenizer_config.json")
    given = read("HR14", "tokens.json")
    assert config["pad_token"] == config["eos_token"]
    chat = case_chat(tmp_path, **config)
    assert chat.stop_ids == (given["eos_id"],)
    trajectories = []
    for member, row in enumerate(given["rows"]):
        logprobs = [-1.0] * len(row["sampled"])
        spans = [Span("prompt", row["prompt"]), Span("generated", row["sampled"], 5, 5, logprobs)]
        trajectories.append(Trajectory(0, member, 0, spans))
    rows, made = micro_batch_of(*trajectories)
    # The longest row comes first in a micro-batch; what it predicts at each place of the padded batch is trained there.
    num_rows, longest = made.shape
    padded = np.zeros((num_rows, longest + 1), dtype=int)
    places = made.pack_index[made.predict_index]
    padded[places // longest, places % longest + 1] = 1
    assert padded[::-1].tolist() == given["expected_mask"]
    assert made.targets.tolist().count(given["eos_id"]) == 2
    assert masks(rows)[0] == given["expected_mask"][0][: rows.lengths[0]]


def test_hr16_control_text_in_messages_stays_text(tmp_path):
    chat = case_chat(tmp_path, "HR16", "HR16")
    messages, expected = read("HR16", "messages.json"), read("HR16", "expected.json")
    ids = chat.render_prompt(messages, [])
    assert ids.count(8) == expected["count_id_8_with_generation_prompt"]
    assert ids.count(9) == expected["count_id_9"]
    said = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    assert chat.decode(ids) == said + "<|im_start|>assistant\n"

    played = play(chat, messages[:1], [sampled(chat, messages[1]["content"] + "<|im_end|>"), [6, 9]], [messages[2:]])
    assert played.requests[1][0] == ids, "a reply is guarded as a prompt is"


def test_hr18_arguments_as_text_and_as_an_object_render_the_same(tmp_path):
    chat = case_chat(tmp_path, "HR18")
    as_text, as_object = (read("HR18", f"args_as_{form}.json") for form in ("text", "object"))
    text = chat.decode(chat.render_prompt(as_object, []))
    assert chat.decode(chat.render_prompt(as_text, [])) == text
    assert text == 'user: weather?\n<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}</tool_call>'


def test_hr18_arguments_that_are_no_json_are_refused_by_message_and_call(tmp_path):
    chat = case_chat(tmp_path, "HR18")
    with pytest.raises(TemplateError, match=r"In message 1 of a conversation, call 0 of 'look' can't be rendered: "):
        chat.render_prompt(read("HR18", "args_broken.json"), [])


def test_a_past_that_the_template_rewrites_is_a_row_of_its_own(tmp_path):
    """Reasoning that the next prompt leaves out was sampled and is trained; what follows is trained on what it saw."""
    chat = load_chat(write_chat_model(tmp_path, "qwen3"))
    user, more = {"role": "user", "content": "What is 1 + 2?"}, {"role": "user", "content": "And 2 + 3?"}
    turns = [sampled(chat, f"<think>\nhm\n</think>\n\nIt is {number}.<|im_end|>") for number in (3, 5)]
    played = play(chat, [user], turns, [[more]])
    assert [(span.kind, span.run) for span in played.trajectory.spans] == [
        ("prompt", 0),
        ("generated", 0),
        ("prompt", 1),
        ("generated", 1),
    ]
    said = {"role": "assistant", "content": "It is 3."}
    assert played.requests[1][0] == chat.render_prompt([user, said, more], [])
    rows, _ = micro_batch_of(play(chat, [user], [turns[0]], []).trajectory, played.trajectory)
    assert rows.members.tolist() == [0, 1, 1] and rows.first_tokens.tolist()[:2] == [0, 0]
    for row, turn in ((1, turns[0]), (2, turns[1])):
        end = int(np.cumsum(rows.lengths)[row])
        assert rows.tokens[end - len(turn) : end].tolist() == turn
        assert masks(rows)[row] == [0] * (int(rows.lengths[row]) - len(turn)) + [1] * len(turn)
