"""The target answers prompts: plain generate's text, and nothing done twice."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.training import Answer, answer_prompts, read_answers, read_prompts
from selfspec.training import answers as module
from tests.families import tiny

END = 7
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "batch_size": 4, "temperatures": (0.0,)}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama(eos_token_id=END, pad_token_id=None)


@pytest.fixture
def prompts() -> dict[str, dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    return {
        f"p{i}": {
            "prompt_ids": torch.randint(8, 64, (2 + (5 * i) % 7,), generator=g).tolist(),
            "task": "chat",
        }
        for i in range(10)
    }


def test_greedy_answers_are_plain_generate_s(model: Any, prompts: Any, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    assert answer_prompts(model, prompts, out, **OPTIONS) == 10
    found = read_answers(out)
    assert {a.id for a in found} == set(prompts)
    ended = 0
    for answer in found:
        assert answer.prompt_ids == prompts[answer.id]["prompt_ids"]
        ids = torch.tensor([answer.prompt_ids])
        mask = torch.ones_like(ids)
        text = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert answer.response_ids == text[0, ids.shape[1] :].tolist()
        ended += answer.response_ids[-1] == END
    assert 0 < ended < 10, "some texts should end and some be cut"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row["task"] == "chat" and row["temperature"] == 0 for row in rows)


def test_temperatures_follow_from_ids(model: Any, prompts: Any, tmp_path: Path) -> None:
    def run(name: str, seed: int, chosen: Any) -> dict[str, Any]:
        out = tmp_path / name
        options = {**OPTIONS, "temperatures": (0.0, 0.9), "seed": seed}
        answer_prompts(model, chosen, out, **options)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        return {row["id"]: (row["temperature"], row["response_ids"]) for row in rows}

    state = torch.get_rng_state()
    first = run("a", 0, prompts)
    assert torch.equal(torch.get_rng_state(), state)
    assert {temperature for temperature, _ in first.values()} == {0.0, 0.9}
    assert run("b", 0, prompts) == first
    assert run("c", 1, prompts) != first
    hot = {name: {**row, "temperature": 2.0} for name, row in prompts.items()}
    assert {temperature for temperature, _ in run("d", 0, hot).values()} == {2.0}


@pytest.mark.parametrize("cut", [0, 1, 17])
def test_killed_and_started_again(
    model: Any, prompts: Any, tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    answer_prompts(model, prompts, whole, **OPTIONS)
    answer_prompts(model, dict(list(prompts.items())[:6]), out, **OPTIONS)
    if cut:  # inside the last line, or just before its end
        out.write_bytes(out.read_bytes()[:-cut])
    asked: list[int] = []
    true_generate = module._generate

    def counted(model: Any, prompts: Any, *rest: Any) -> Any:
        asked.append(len(prompts))
        return true_generate(model, prompts, *rest)

    monkeypatch.setattr(module, "_generate", counted)
    assert answer_prompts(model, prompts, out, **OPTIONS) == sum(asked) == (5 if cut else 4)
    by_id = {answer.id: answer for answer in read_answers(whole)}
    found = read_answers(out)
    assert len(found) == 10
    assert {answer.id: answer for answer in found} == by_id
    assert answer_prompts(model, prompts, out, **OPTIONS) == 0


class Words:
    """A tokenizer of numbers."""

    chat_template: str | None = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def apply_chat_template(self, chat: Any, **options: Any) -> dict[str, list[int]]:
        assert options["add_generation_prompt"]
        return {"input_ids": [1, *self(chat[0]["content"])["input_ids"], 2]}


def test_prompts_of_text_and_of_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "5 6", "task": "a"}\n\n{"id": 4, "prompt_ids": [9]}\n')
    found = read_prompts(path, Words())
    assert found == {"1": {"task": "a", "prompt_ids": [5, 6]}, "4": {"prompt_ids": [9]}}
    chat = Words()
    chat.chat_template = "yes"
    assert read_prompts(path, chat)["1"]["prompt_ids"] == [1, 5, 6, 2]
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_prompts(packed, Words()) == found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "5"', "line 2: no JSON"),
        ('{"text": "5"}', "line 2: neither prompt nor prompt_ids"),
        ('{"id": "1", "prompt": "5"}', "line 2: id '1' is there twice"),
        ('{"prompt_ids": []}', "line 2: the prompt has no tokens"),
    ],
)
def test_lines_that_are_no_prompts_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "5"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_prompts(path, Words())
    with pytest.raises(ValueError, match="line 1: a prompt of text needs a tokenizer"):
        read_prompts(path)


def test_answers_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"id": 3, "prompt_ids": [1], "response_ids": [2], "task": "x"}\n')
    assert read_answers(path) == [Answer("3", [1], [2])]
    path.write_text('{"id": 3, "prompt_ids": [1]}\n')
    with pytest.raises(ValueError, match="line 1: response_ids missing"):
        read_answers(path)


def test_options_are_checked(model: Any, prompts: Any, tmp_path: Path) -> None:
    wrong: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "temperatures is empty": ({"temperatures": ()}, {}),
        "temperature=-1.0": ({"temperatures": (0.5, -1.0)}, {}),
        "temperature=nan": ({"temperatures": (float("nan"),)}, {}),
        "temperature='hot'": ({}, {"temperature": "hot"}),
        "batch_size=-3 must be at least 1": ({"batch_size": -3}, {}),
        "max_new_tokens=0 must be at least 1": ({"max_new_tokens": 0}, {}),
        "prompt 'p' must be a list of tokens": ({}, {"prompt_ids": "ab"}),
        "must be a list of tokens, got '.1.5.'": ({}, {"prompt_ids": [1.5]}),
    }
    for message, (options, row) in wrong.items():
        own = {**prompts, "p": {"prompt_ids": [3, 4], **row}}
        with pytest.raises(ValueError, match=message):
            answer_prompts(model, own, tmp_path / "a", **options)
        assert not (tmp_path / "a").exists()


def test_a_prompt_may_have_a_temperature(model: Any, tmp_path: Path) -> None:
    prompts = {"a": {"prompt_ids": [3, 4], "temperature": 0.3}, "b": {"prompt_ids": [5]}}
    answer_prompts(model, prompts, tmp_path / "a", temperatures=(0.0,), max_new_tokens=2)
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert {row["id"]: row["temperature"] for row in rows} == {"a": 0.3, "b": 0.0}


def test_lines_that_are_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for line, message in (
        ("[1]", "line 1: no JSON object"),
        ('{"prompt_ids": [1.5]}', "line 1, must be a list of tokens"),
        ('{"prompt_ids": "ab"}', "line 1, must be a list of tokens"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match=message):
            read_prompts(path)
