"""Traces of every position hold what each drafter would have drafted, and leave no other mark."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import selfspec
from selfspec import simulate
from tests.drafters import small
from tests.families import tiny
from tests.networks import random_heads

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
NEW = 24


def run(spec: Any, ids: torch.Tensor = IDS, **options: Any) -> list[list[int]]:
    mask = torch.ones_like(ids)
    out = spec.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **options)
    return out[:, ids.shape[1] :].tolist()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_position_has_the_drafts_that_would_have_been_made(tmp_path: Path) -> None:
    model = tiny.build("llama")
    plain = run(model)
    spec = selfspec.wrap(model, ["ngram", selfspec.SuffixDrafter(min_prob=1e-4)])
    run(spec)
    spec.costs.forget_texts()
    with spec.trace(tmp_path / "t.jsonl", every_position=True):
        assert run(spec) == plain
    trace = simulate.read(tmp_path / "t.jsonl")
    (request,) = trace.every_position
    assert [request.tokens] == plain
    assert trace.drafters == ["NGramDrafter", "SuffixDrafter"]
    assert len(request.drafts) == NEW
    assert request.drafts[0] == {}  # the prompt gives the first token
    # A drafter that copies says at every position what followed there before.
    whole = IDS[0].tolist() + request.tokens
    assert sum(len(d["SuffixDrafter"].nodes.tokens) > 1 for d in request.drafts[1:-1]) > 3
    assert request.drafts[-1] == {}  # there is no room for a draft and a token after it
    for at in range(1, NEW - 1):
        text = whole[: IDS.shape[1] + at]
        draft = request.drafts[at]["SuffixDrafter"]
        assert draft.nodes.tokens[0] == text[-1]
        for token, parent in zip(draft.nodes.tokens[1:], draft.nodes.parents[1:], strict=True):
            pair = [draft.nodes.tokens[parent], token]
            assert any(text[i : i + 2] == pair for i in range(len(text)))


def test_steps_are_written_as_they_are(tmp_path: Path) -> None:
    spec = selfspec.wrap(tiny.build("llama"), "ngram", off_switch=False)
    seen = []
    with spec.trace(tmp_path / "t.jsonl"):
        mask = torch.ones_like(IDS)
        for step in spec.stream(IDS, attention_mask=mask, do_sample=False, max_new_tokens=NEW):
            seen.append(step)
    first, *steps, end = lines(tmp_path / "t.jsonl")
    assert (first["type"], first["batch"], first["prompt"]) == ("request", 1, IDS.shape[1])
    assert first["drafters"] == ["NGramDrafter"]
    assert [line["tokens"] for line in steps] == [step.tokens for step in seen]
    assert [line["nodes"] for line in steps] == [step.num_nodes for step in seen]
    assert [line["accepted"] for line in steps] == [step.num_accepted for step in seen]
    assert [line["is_prefill"] for line in steps] == [True] + [False] * (len(seen) - 1)
    assert end["type"] == "end"
    assert [nodes for nodes, _ in end["verify"]] == sorted({nodes for nodes, _ in end["verify"]})
    (request,) = simulate.read(tmp_path / "t.jsonl").requests
    assert request.steps == len(seen) - 1
    assert request.seconds == pytest.approx(sum(sum(s.seconds.values()) for s in seen[1:]), 1e-3)


def test_rows_of_a_batch_are_texts_of_their_own(tmp_path: Path) -> None:
    model = tiny.build("llama")
    ids = torch.cat([IDS, IDS.flip(1), IDS + 3])
    plain = run(model, ids)
    spec = selfspec.wrap(model, ["suffix"])
    with spec.trace(tmp_path / "t.jsonl", every_position=True):
        run(spec, ids)
    requests = simulate.read(tmp_path / "t.jsonl").every_position
    assert [request.tokens for request in requests] == plain
    for request in requests:
        for at in range(1, NEW - 1):
            assert request.drafts[at]["SuffixDrafter"].nodes.tokens[0] == request.tokens[at - 1]


def test_looking_does_not_count_as_decoding(tmp_path: Path) -> None:
    spec = selfspec.wrap(tiny.build("llama"), ["ngram"])
    run(spec)
    before = spec.costs.verify_points(1)
    with spec.trace(tmp_path / "t.jsonl", every_position=True):
        run(spec)
    assert spec.costs.verify_points(1) == before
    assert spec._tracer is None


def test_requests_of_all_threads_are_told_apart(tmp_path: Path) -> None:
    model = tiny.build("llama")
    plain = [run(model, IDS + shift) for shift in range(4)]
    spec = selfspec.wrap(model, ["suffix"])
    with spec.trace(tmp_path / "t.jsonl", every_position=True):
        threads = [threading.Thread(target=run, args=(spec, IDS + shift)) for shift in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    texts = [[r.tokens] for r in simulate.read(tmp_path / "t.jsonl").every_position]
    assert sorted(texts) == sorted(plain)


def test_models_that_take_chains_are_traced_by_chains(tmp_path: Path) -> None:
    spec = selfspec.wrap(tiny.build("bloom"), ["suffix"])
    with spec.trace(tmp_path / "t.jsonl", every_position=True):
        run(spec)
    (request,) = simulate.read(tmp_path / "t.jsonl").every_position
    for drafts in request.drafts[1:-1]:
        nodes = drafts["SuffixDrafter"].nodes
        assert nodes.parents == list(range(-1, len(nodes.tokens) - 1))


def test_early_exits_say_what_they_share(tmp_path: Path) -> None:
    spec = selfspec.wrap(tiny.build("llama"), selfspec.EarlyExitDrafter(exit_layer=1))
    with spec.trace(tmp_path / "t.jsonl", every_position=True):
        run(spec)
    (request,) = simulate.read(tmp_path / "t.jsonl").every_position
    layers = spec.model.config.num_hidden_layers
    drafts = [d["EarlyExitDrafter"] for d in request.drafts[1:-1]]
    shared = [d.shared for d in drafts if len(d.nodes.tokens) > 1]
    assert shared == [pytest.approx(1 / layers, abs=1e-4)] * len(shared) != []
    assert all(d.network and d.by_level for d in drafts if len(d.nodes.tokens) > 1)


def test_what_draws_or_is_lossy_is_refused(tmp_path: Path) -> None:
    model = tiny.build("llama")
    network = random_heads(model.config.hidden_size, model.config.vocab_size)
    spec = selfspec.wrap(model, selfspec.HeadsDrafter(network, do_sample=True))
    with (
        spec.trace(tmp_path / "t.jsonl", every_position=True),
        pytest.raises(ValueError, match="HeadsDrafter draws its tokens"),
    ):
        run(spec)
    with spec.trace(tmp_path / "t.jsonl"):  # as it is
        run(spec)


def test_a_trace_in_a_trace_is_refused(tmp_path: Path) -> None:
    spec = selfspec.wrap(small(), "ngram")
    with (
        spec.trace(tmp_path / "t.jsonl"),
        pytest.raises(ValueError, match="traced already"),
        spec.trace(tmp_path / "u.jsonl"),
    ):
        pass
    assert not (tmp_path / "u.jsonl").exists()
    with pytest.raises(OSError, match="nowhere"), spec.trace(tmp_path / "nowhere" / "t.jsonl"):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is no line of a trace"),
        ('{"type": "step", "request": 0}', "line 1 is no line of a trace: KeyError"),
        ("[]", "line 1 is no line of a trace"),
        ('{"type": "request", "request": 0, "format": 99, "batch": 1}', "later version"),
    ],
)
def test_broken_traces_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        simulate.read(tmp_path / "t.jsonl")


def test_ordinary_traces_cannot_be_simulated(tmp_path: Path) -> None:
    spec = selfspec.wrap(small(), "ngram")
    with spec.trace(tmp_path / "t.jsonl"):
        run(spec)
    trace = simulate.read(tmp_path / "t.jsonl")
    with pytest.raises(ValueError, match="every_position=True"):
        simulate.oracle(trace)
    with pytest.raises(ValueError, match="every_position=True"):
        simulate.replay(trace)
