"""Area A, output: the text is that of plain `generate`, whatever was drafted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessor

import selfspec
from selfspec import TokenTree
from tests.families import tiny
from tests.families.test_identity import DRAFTERS
from tests.generate.common import snapshot
from tests.oracle import OracleDrafter, RandomTreeDrafter
from tests.scenarios.test_a_trees import Looking

NEW = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama")


def rows_of(*lengths: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of these lengths."""
    prompt = tiny.prompts(len(lengths), ragged=False)
    for row, length in enumerate(lengths):
        for tensor in prompt.values():
            tensor[row, : 17 - length] = 0
    return {name: tensor[:, 17 - max(lengths) :] for name, tensor in prompt.items()}


@pytest.fixture(scope="module")
def short_prompts(model: Any) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    prompts = [rows_of(1), rows_of(17, 1, 2)]
    return [(prompt, model.generate(**prompt, max_new_tokens=NEW)) for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "graphs"),
    [*((name, False) for name in DRAFTERS), ("oracle-tree", True), ("early-exit", True)],
)
def test_a1_prompts_of_1_2_and_17_tokens(
    model: Any, short_prompts: Any, name: str, graphs: bool
) -> None:
    drafted = 0
    # The slow ones see the short prompts as rows of a batch alone.
    for prompt, plain in short_prompts[1 if "layer" in name or "merged" in name else 0 :]:
        spec = selfspec.wrap(model, DRAFTERS[name](plain), max_draft_tokens=12, cuda_graphs=graphs)
        assert spec.generate(**prompt, max_new_tokens=NEW).equal(plain)
        drafted += spec.stats.drafted
    assert drafted > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "defaults",
    [
        {"repetition_penalty": 1.05},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"do_sample": True, "temperature": 0.7, "top_k": 5},
    ],
    ids=str,
)
def test_a7_defaults_of_the_model_hold_without_arguments(
    defaults: dict[str, Any], batch: int
) -> None:
    model, prompt = copy.deepcopy(tiny.build("qwen2")), tiny.prompts(batch)
    model.generation_config.max_length = 44
    torch.manual_seed(0)
    without = model.generate(**prompt)
    for name, value in defaults.items():
        setattr(model.generation_config, name, value)
    torch.manual_seed(0)
    plain = model.generate(**prompt)
    spec = selfspec.wrap(model, OracleDrafter(plain, 5, (0, 3)))
    torch.manual_seed(0)
    assert spec.generate(**prompt).equal(plain)
    assert spec.stats.accepted > 0
    assert spec.stats.fallbacks == 0
    if defaults != {"repetition_penalty": 1.05}:  # which is too weak to show in every text
        assert not plain.equal(without)


class Banning(LogitsProcessor):
    """Forbids one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token] = -torch.inf
        return scores


@pytest.mark.parametrize("branches", [0, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("how", ["own processor", "suppress_tokens", "bad_words_ids"])
def test_a9_a_banned_token_that_is_drafted_never_appears(
    model: Any, how: str, batch: int, branches: int
) -> None:
    prompt = tiny.prompts(batch)
    drafts = model.generate(**prompt, max_new_tokens=20)
    banned = int(drafts[0, 17 + 3])
    options: dict[str, Any] = {
        "own processor": {"logits_processor": [Banning(banned)]},
        "suppress_tokens": {"suppress_tokens": [banned]},
        "bad_words_ids": {"bad_words_ids": [[banned]]},
    }[how]
    plain = model.generate(**prompt, max_new_tokens=20, **options)
    spec = selfspec.wrap(model, OracleDrafter(drafts, 6, branches=branches))
    text = spec.generate(**prompt, max_new_tokens=20, **options)
    assert text.equal(plain)
    assert not (text[:, 17:] == banned).any()
    falls_back = how == "own processor" and batch > 1  # it may keep a state
    assert spec.stats.fallbacks == falls_back
    assert falls_back or spec.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_a10_one_word_many_times(name: str, dtype: torch.dtype) -> None:
    model = tiny.build(name, dtype=dtype)
    for token in (7, 23) if name == "llama" else (23,):
        prompt = torch.full((1, 48), token)
        plain = model.generate(prompt, attention_mask=prompt**0, max_new_tokens=NEW)
        for candidates in (1, 3):
            drafter = selfspec.NGramDrafter(2, 5, max_candidates=candidates, min_prob=0.0)
            spec = selfspec.wrap(model, drafter, max_draft_tokens=4)
            out = spec.generate(prompt, attention_mask=prompt**0, max_new_tokens=NEW)
            assert out.equal(plain)
            assert spec.stats.drafted > 0


@pytest.mark.parametrize(("layers", "do_sample"), [(1, False), (2, True), (4, False)])
def test_a12_early_exit_recurses_nowhere_and_restores_the_model(
    layers: int, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    prompt = {**tiny.prompts(2), "max_new_tokens": 16, "do_sample": do_sample}
    torch.manual_seed(0)
    plain = model.generate(**prompt)
    spec = selfspec.wrap(model, selfspec.EarlyExitDrafter(layers, 3, 0.0))
    calls, counts, generate = [], set(), GenerationMixin.generate

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(self))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", counting)
    before = snapshot(model)

    def look(module: Any, args: Any) -> None:
        counts.add(model.config.num_hidden_layers)
        if len(fails) and fails[0] == 0:
            raise RuntimeError("a step fails")
        fails[:] = [n - 1 for n in fails]

    fails: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(look)
    torch.manual_seed(0)
    assert spec.generate(**prompt).equal(plain)
    assert len(calls) == 1
    assert counts == {4}
    assert spec.stats.drafted > 0
    for n in (0, 1, 2, 3, 7):  # in the prefill, a draft, a verification
        fails[:] = [n]
        with pytest.raises(RuntimeError, match="a step fails"):
            spec.generate(**prompt)
    fails.clear()
    hook.remove()
    assert snapshot(model) == before
    torch.manual_seed(0)
    assert spec.generate(**prompt).equal(plain)


@pytest.mark.parametrize(("kind", "batch", "do_sample"), [("skip", 3, False), ("exit", 1, True)])
def test_a15_a_model_that_drafts_for_itself_is_always_right(
    kind: str, batch: int, do_sample: bool
) -> None:
    """k + 1 tokens per verification for 200 tokens; anything that drifts would show."""
    model = tiny.build("llama", dtype=torch.float64)
    drafter = {
        "exit": selfspec.EarlyExitDrafter(4, 7, 0.0, do_sample=do_sample),
        "skip": selfspec.LayerSkipDrafter(selfspec.SkipSet(), 7, 0.0, do_sample=do_sample),
    }[kind]
    spec = selfspec.wrap(model, drafter)
    prompt = {**tiny.prompts(batch), "max_new_tokens": 201, "do_sample": do_sample}
    text = spec.generate(**prompt)
    assert spec.stats.acceptance_rate == 1
    assert spec.stats.forwards == 200 / 8
    if not do_sample:
        assert text.equal(model.generate(**prompt))


SHAPES: dict[str, Any] = {
    "chain": lambda answers: OracleDrafter(answers, 5, (0, 3)),
    "short chain": lambda answers: OracleDrafter(answers, 1, (0, 1)),
    "siblings": lambda answers: OracleDrafter(answers, 2, (0, 2), branches=2),
    "wide": lambda answers: OracleDrafter(answers, 3, branches=4),
    "random": lambda answers: RandomTreeDrafter(3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a16_the_shape_of_trees_changes_no_score(dtype: torch.dtype) -> None:
    """Beyond rounding; in bfloat16 texts may part where two tokens are tied within it."""
    model, prompt = tiny.build("llama", dtype=dtype), tiny.prompts(1)
    settings = {"max_new_tokens": 24, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(**prompt, **settings)
    scale = float(torch.stack(plain.logits).abs().max())
    noise = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}[dtype] * scale
    for make in SHAPES.values():
        spec = selfspec.wrap(model, make(plain.sequences))
        out = spec.generate(**prompt, **settings)
        same = (out.sequences == plain.sequences)[0, 17:].long().cumprod(0)
        until = int(same.sum())
        assert dtype == torch.bfloat16 or until == 24
        for ours, theirs in zip(out.logits[:until], plain.logits, strict=False):
            assert float((ours - theirs).abs().max()) < noise
        if until < 24:
            pair = [int(o.sequences[0, 17 + until]) for o in (out, plain)]
            gap = plain.logits[until][0, pair]
            assert abs(float(gap[0] - gap[1])) < 2 * noise
        assert spec.stats.drafted > 0


@pytest.mark.parametrize(
    ("name", "graphs"),
    [("llama", False), ("llama", True), ("gpt2", False), ("gemma2", False), ("bloom", False)],
)
def test_a18_every_width_chooses_as_one_token_at_a_time_does(name: str, graphs: bool) -> None:
    model, prompt = tiny.build(name), tiny.prompts(1)
    for width in (1, 2, 3, 4, 5, 8, 16):
        drafter = Looking([-1, *range(width - 1)])
        spec = selfspec.wrap(model, drafter, cuda_graphs=graphs)
        spec.generate(**prompt, max_new_tokens=width + 4)
        assert drafter.seen or width == 1
        for texts, tree, logits in drafter.seen[:1]:
            text = [*texts[0], *tree.tokens[0, 1:].tolist()]
            with torch.no_grad():
                for node in range(width):
                    alone = model(torch.tensor([text[: len(texts[0]) + node]])).logits[0, -1]
                    assert int(logits[0, node].argmax()) == int(alone.argmax())


class Rootless:
    """Drafts nothing in rounds where the pattern says 0, and in rows where it says -1."""

    hidden_taps = ()

    def __init__(self, drafter: Any, pattern: tuple[int, ...]) -> None:
        self.drafter, self.pattern = drafter, pattern

    def draft(self, state: Any, budget: int) -> TokenTree:
        now = self.pattern[self.rounds % len(self.pattern)]
        self.rounds += 1
        tree = self.drafter.draft(state, budget)
        if now == 0:
            return TokenTree.root_only(state.root)
        if now == -1:
            paths = [row if b % 2 else [] for b, row in enumerate(tree.paths())]
            return TokenTree.from_paths(state.root, paths, budget)
        return tree

    def observe(self, state: Any, output: Any, acceptance: Any) -> None: ...

    def reset(self) -> None:
        self.rounds = 0
        self.drafter.reset()


@pytest.mark.parametrize(("do_sample", "graphs"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("batch", [1, 3])
def test_a19_a21_rounds_without_a_draft_or_without_a_right_one(
    model: Any, batch: int, do_sample: bool, graphs: bool
) -> None:
    """One token a round then; no id outside of the vocabulary is ever embedded."""
    prompt = {**tiny.prompts(batch), "max_new_tokens": 14, "do_sample": do_sample}
    torch.manual_seed(0)
    plain = model.generate(**prompt)
    embedded: list[tuple[int, int]] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: embedded.append((int(args[0].min()), int(args[0].max())))
    )
    wrong = OracleDrafter(plain, 4, (1,), branches=0)
    wrong_trees = OracleDrafter(plain, 4, (1,), branches=2)
    right = OracleDrafter(plain, 4)
    cases = [
        (Rootless(right, (0,)), 0.0),
        (Rootless(wrong, (1,)), 0.0),
        (wrong_trees, 0.0),
        (Rootless(right, (1, 0)), 1.0),
        (Rootless(right, (0, 1, -1, 0, 0)), 1.0),
        (Rootless(OracleDrafter(plain, 4, (0, 1, 4)), (1, -1)), None),
    ]
    try:
        for drafter, rate in cases:
            spec = selfspec.wrap(model, drafter, cuda_graphs=graphs)
            torch.manual_seed(0)
            assert spec.generate(**prompt).equal(plain)
            assert rate is None or spec.stats.acceptance_rate == rate
            if rate == 0:
                assert spec.stats.forwards == 13
            else:
                assert spec.stats.accepted > 0
    finally:
        hook.remove()
    assert min(low for low, _ in embedded) >= 0
    assert max(high for _, high in embedded) < tiny.VOCAB


@pytest.mark.parametrize("do_sample", [False, True])
def test_a21_ends_at_every_place_of_a_draft(model: Any, do_sample: bool) -> None:
    """With rounds in which nothing is drafted between them."""
    prompt = {**tiny.prompts(1), "do_sample": do_sample}
    torch.manual_seed(0)
    text = model.generate(**prompt, max_new_tokens=9)
    right = OracleDrafter(text, 4)
    for pattern in ((1,), (0, 1)):
        spec = selfspec.wrap(model, Rootless(right, pattern))
        for place in range(9):
            eos = int(text[0, 17 + place])
            plain = text[:, : 18 + text[0, 17:].tolist().index(eos)]
            torch.manual_seed(0)
            out = spec.generate(**prompt, max_new_tokens=9, eos_token_id=eos)
            assert out.equal(plain)
            torch.manual_seed(0)
            out = spec.generate(**prompt, max_new_tokens=place + 1)
            assert out.equal(text[:, : 18 + place])


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("length", [513, 1025])
def test_a19_prompts_longer_than_a_power_of_two(length: int, graphs: bool) -> None:
    model = tiny.llama(max_position_embeddings=2048)
    ids = torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :500] = 0
    prompt = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 16}
    plain = model.generate(**prompt)
    for drafter in (
        OracleDrafter(plain, 5, (0, 3), branches=1),
        selfspec.NGramDrafter(1, min_prob=0.0),
    ):
        spec = selfspec.wrap(model, drafter, cuda_graphs=graphs)
        assert spec.generate(**prompt).equal(plain)
        assert spec.stats.drafted > 0
