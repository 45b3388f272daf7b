"""States on disk and on the fly: what they hold, and what a kill leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.training import Answer, ShardedStates, StreamedStates, states, write_states
from selfspec.training.batches import Batch
from tests.families import tiny
from tests.training.learnable import TAPS, answers, target

OPTIONS: dict[str, Any] = {"dtype": torch.float32, "tokens_per_shard": 120, "top_k": 5}


def write(folder: Path, given: list[Answer] | None = None, **changes: Any) -> ShardedStates:
    return write_states(target(), given or answers(), folder, TAPS, **{**OPTIONS, **changes})


def row_of(answer: Answer, found: ShardedStates) -> int:
    ids = torch.tensor([*answer.prompt_ids, *answer.response_ids])
    for row, length in enumerate(found.lengths):
        if length == len(ids) and torch.equal(found.read([row], ()).ids[0], ids):
            return row
    raise AssertionError("the sequence is not there")


def test_states_and_distributions_are_the_target_s(tmp_path: Path) -> None:
    found = write(tmp_path)
    assert len(found.lengths) == len(answers())
    assert len(found.manifest["shards"]) > 3
    model = target()
    for answer in answers()[::7]:
        row = row_of(answer, found)
        batch = found.read([row], (4, 1))
        assert found.prompts[row] == StreamedStates(model, [answer]).prompts[0]
        with torch.no_grad():
            truth = model(batch.ids, output_hidden_states=True)
        # transformers applies the final norm to the last of these; the tap is before it.
        last = model.model.norm(batch.taps[0, :, :64])
        torch.testing.assert_close(last, truth.hidden_states[4][0])
        torch.testing.assert_close(batch.taps[0, :, 64:], truth.hidden_states[1][0])
        probs, top = truth.logits.softmax(-1).topk(5)
        assert torch.equal(batch.top, top)
        torch.testing.assert_close(batch.probs, probs)
        assert batch.prompt_lengths.tolist() == [len(answer.prompt_ids)]


def test_batches_are_padded_with_nothing(tmp_path: Path) -> None:
    found = write(tmp_path)
    rows = [3, 30, 11]
    batch = found.read(rows, TAPS)
    for b, row in enumerate(rows):
        alone = found.read([row], TAPS)
        n = found.lengths[row]
        for name in ("ids", "taps", "top", "probs"):
            assert torch.equal(getattr(batch, name)[b, :n], getattr(alone, name)[0])
            assert not getattr(batch, name)[b, n:].any()
    assert batch.num_tokens == sum(found.lengths[row] for row in rows)


def test_streamed_states_are_those_on_disk(tmp_path: Path) -> None:
    disk, streamed = write(tmp_path), StreamedStates(target(), answers(), top_k=5)
    assert torch.equal(disk.token_counts, streamed.token_counts)
    assert sorted(disk.prompts) == sorted(streamed.prompts)
    assert len(set(streamed.prompts)) == len({tuple(a.prompt_ids) for a in answers()})
    wanted = answers()[5:9]
    one = streamed.read([5, 6, 7, 8], (1, 4))
    other = disk.read([row_of(a, disk) for a in wanted], (1, 4))
    real = torch.arange(one.ids.shape[1]) < one.lengths[:, None]
    for name in ("ids", "taps", "lengths", "prompt_lengths"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))
    assert torch.equal(one.top[real], other.top[real])
    torch.testing.assert_close(one.probs[real], other.probs[real])


def test_token_counts_are_of_answers_alone(tmp_path: Path) -> None:
    given = [Answer("a", [9, 9, 9], [5, 7, 5]), Answer("b", [8], [7])]
    counts = write(tmp_path, given).token_counts
    assert counts.nonzero()[:, 0].tolist() == [5, 7]
    assert counts[[5, 7]].tolist() == [2, 2]
    assert len(counts) == tiny.VOCAB


def test_long_texts_are_cut_at_their_end(tmp_path: Path) -> None:
    given = [Answer("a", [9] * 4, [5] * 10), Answer("b", [8] * 12, [7]), Answer("c", [3], [])]
    found = write(tmp_path, given, max_length=12)
    assert found.lengths == [12]
    assert found.read([0], ()).ids.tolist() == [[9] * 4 + [5] * 8]
    with pytest.raises(ValueError, match=r"max_length=4 .* raise max_length"):
        write(tmp_path, given, max_length=4)


def test_two_bytes_a_number_by_default(tmp_path: Path) -> None:
    found = write(tmp_path, dtype=torch.bfloat16)
    assert found.read([0], TAPS).taps.dtype == torch.bfloat16
    exact = write(tmp_path / "exact").read([0], TAPS).taps
    assert torch.equal(found.read([0], TAPS).taps, exact.bfloat16())


def test_killed_inside_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "whole")
    forwards: list[Any] = []
    true_observe = states.observe

    def counted(*arguments: Any) -> Any:
        forwards.append(arguments)
        if len(forwards) == kill_at:
            raise KeyboardInterrupt
        return true_observe(*arguments)

    monkeypatch.setattr(states, "observe", counted)
    kill_at = 4
    options = {"tokens_per_batch": 60}  # several forwards a shard
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        write(folder, **options)
    done = sorted(folder.glob("*.safetensors"))
    assert 0 < len(done) < len(whole.manifest["shards"])
    with pytest.raises(ValueError, match=r"manifest\.json does not exist: run write_states"):
        ShardedStates(folder)
    stamps = [path.stat().st_mtime_ns for path in done]
    (folder / ".states-half.safetensors.0").write_bytes(b"half")
    before, kill_at = len(forwards), 0
    found = write(folder, **options)
    assert [path.stat().st_mtime_ns for path in done] == stamps
    again = len(forwards) - before
    forwards.clear()
    write(tmp_path / "fresh", **options)
    assert again < len(forwards)
    assert not list(folder.glob(".*"))
    assert found.lengths == whole.lengths
    batch, other = found.read([0, 5], TAPS), whole.read([0, 5], TAPS)
    torch.testing.assert_close(batch.taps, other.taps)


def test_more_answers_keep_full_shards(tmp_path: Path) -> None:
    first = set(write(tmp_path, answers()[:30]).manifest["shards"])
    second = set(write(tmp_path).manifest["shards"])
    assert len(first - second) <= 1  # the last one was not full


def test_other_taps_or_models_are_other_shards(tmp_path: Path) -> None:
    first = set(write(tmp_path).manifest["shards"])
    other = write_states(target(), answers(), tmp_path, (2,), **OPTIONS)
    assert not first & set(other.manifest["shards"])


def test_missing_shard_and_wrong_model_are_named(tmp_path: Path) -> None:
    found = write(tmp_path)
    ShardedStates(tmp_path, target())
    with pytest.raises(ValueError, match="embeddings"):
        ShardedStates(
            tmp_path,
            tiny.llama(
                hidden_size=64, eos_token_id=2, tie_word_embeddings=True, initializer_range=0.2
            ),
        )
    name = found.manifest["shards"][1]
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=rf"lacks {name}"):
        ShardedStates(tmp_path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="'version': 2"):
        ShardedStates(tmp_path)


def test_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    model = tiny.llama().train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        write_states(model, answers(), tmp_path, TAPS)
    with pytest.raises(ValueError, match=r"taps=\[9\]"):
        write_states(model.eval(), answers(), tmp_path, (1, 9))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_weights_mark_answers() -> None:
    zeros = torch.zeros(2, 6, 1)
    batch = Batch(
        ids=torch.zeros(2, 6, dtype=torch.int64),
        prompt_lengths=torch.tensor([2, 1]),
        lengths=torch.tensor([6, 3]),
        taps=zeros,
        top=zeros.long(),
        probs=zeros,
    )
    # At t: is token t + 1 one of the answer?
    assert batch.weights().tolist() == [[0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
    prompt = replace(batch, prompt_lengths=torch.tensor([3, 3]))
    assert prompt.weights(0.5).tolist() == [[0.5, 0.5, 1, 1, 1, 0], [0.5, 0.5, 0, 0, 0, 0]]


@pytest.mark.parametrize("size", [0, 5000])
def test_a_broken_shard_is_named_and_made_again(size: int, tmp_path: Path) -> None:
    whole = write(tmp_path)
    rows = range(len(whole.lengths))
    before = whole.read(rows, TAPS).taps
    path = tmp_path / whole.manifest["shards"][1]
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ValueError, match=f"{path.name} is broken .* run write_states again"):
        ShardedStates(tmp_path)
    assert torch.equal(write(tmp_path).read(rows, TAPS).taps, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"tokens_per_shard": 0}, "tokens_per_shard=0 must be at least 1"),
        ({"tokens_per_batch": -1}, "tokens_per_batch=-1 must be at least 1"),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be a floating one"),
        ({"taps": ()}, "taps is empty"),
    ],
)
def test_options_are_checked(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_states(target(), answers(), tmp_path, **{"taps": TAPS, **changes})


@pytest.mark.parametrize("token", [64, -1, 1.5])
def test_tokens_that_the_model_does_not_have(token: Any, tmp_path: Path) -> None:
    given = [Answer("a", [3, 4], [5]), Answer("b", [3, token], [5])]
    for make in (lambda: write(tmp_path, given), lambda: StreamedStates(target(), given)):
        with pytest.raises(ValueError, match=rf"answer 'b' has the token {token}, .* 0\.\.63"):
            make()


def test_states_that_are_no_vectors(tmp_path: Path) -> None:
    model = tiny.build("gemma3n_text")
    with pytest.raises(ValueError, match="they have 4 dimensions, not 3"):
        write_states(model, answers(), tmp_path, (1,))
