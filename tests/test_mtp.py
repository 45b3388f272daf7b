"""MTP modules as drafters: driven as transformers drives them, and over ragged batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_layers

import selfspec
from selfspec.testing import check_drafter
from tests.families import tiny
from tests.generate.test_drawn_drafts import CRITICAL, largest_gaps
from tests.mtp import GREEDY, HAS_MTP, NEW, chained, trained

MODULES = [("glm4_moe", 1), ("glm4_moe", 2), ("deepseek_v3", 1), ("mellum", 1)]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_draft_tokens": 4, "branches": 3},
    {"max_draft_tokens": 3, "confidence": 0.5, "branches": 2},
    {"max_draft_tokens": 3},
]


class Recorder(selfspec.MtpDrafter if HAS_MTP else object):  # type: ignore[misc]
    """Remembers its drafts, and what it kept."""

    def draft(self, state: Any, budget: int) -> Any:
        tree = super().draft(state, budget)
        self.__dict__.setdefault("drafts", []).append(tree)
        if tree.width > 1:
            rows = self._rows
            self.cache, self.lengths, self.last = rows.cache, rows.cache.lengths, [*rows.last]
            assert not any(self._seen.counts)
            self.seen = [state.tokens(b).copy() for b in range(state.batch)]
        return tree


class Lazy:
    """Asks its drafter at every third step only; plain steps in between."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.steps = drafter, 0

    hidden_taps = property(lambda self: self.drafter.hidden_taps)

    def bind(self, architecture: Any) -> None:
        self.drafter.bind(architecture)

    def draft(self, state: Any, budget: int) -> Any:
        self.steps += 1
        if self.steps % 3:
            return selfspec.TokenTree.root_only(state.root)
        return self.drafter.draft(state, budget)

    def observe(self, state: Any, output: Any, acceptance: Any) -> None:
        self.drafter.observe(state, output, acceptance)

    def reset(self) -> None:
        self.drafter.reset()


@torch.no_grad()
def check_cache(model: Any, module: Any, drafter: Any) -> None:
    """All that the drafter kept of final tokens is what transformers' own calls compute at once."""
    from transformers.cache_utils import MtpCache

    config = copy.deepcopy(module.config)
    # A window's cache would drop what ours keeps (and masks).
    config.layer_types = config.sliding_window = None
    for b, text in enumerate(drafter.seen):
        length = drafter.lengths[b]
        assert length == len(text) - 1
        ids, theirs = torch.tensor(text)[None], MtpCache(config=config)
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        outs = chained(module, len(module.layers), ids, hidden, theirs)
        for k, layer in enumerate(theirs.layers):
            for name in ("keys", "values"):
                ours = getattr(drafter.cache.layers[k], name)[b, :, k:length]
                torch.testing.assert_close(ours, getattr(layer, name)[0], atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(drafter.last[k][b], outs[k][0, -1], atol=1e-4, rtol=1e-3)


class TestModules:
    """With a transformers that has MTP."""

    __test__ = HAS_MTP

    @pytest.mark.parametrize(("name", "layers"), MODULES)
    def test_drafts_are_those_of_transformers(
        self, name: str, layers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers.generation import candidate_generator

        model, module = trained(name, layers)
        theirs: list[list[int]] = []
        get = candidate_generator.MTPCandidateGenerator.get_candidates

        def recording(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = get(self, input_ids, *args, **kwargs)
            if found[0].shape[1] > input_ids.shape[1]:
                theirs.append(found[0][0, input_ids.shape[1] :].tolist())
            return found

        monkeypatch.setattr(candidate_generator.MTPCandidateGenerator, "get_candidates", recording)
        monkeypatch.setattr(
            modeling_layers.MtpModel, "from_pretrained", lambda *args, **kwargs: module
        )
        ids = tiny.prompts(1)["input_ids"]
        text = model.generate(ids, **GREEDY, use_mtp=True)
        drafter = Recorder(module)
        spec = selfspec.wrap(model, drafter)
        assert spec.generate(ids, **GREEDY).tolist() == text.tolist()
        ours = [tree.tokens[0, 1:].tolist() for tree in drafter.drafts]
        assert abs(len(ours) - len(theirs)) <= 1  # without room nothing is drafted here
        for mine, draft in zip(ours, theirs, strict=False):
            assert mine == draft[: len(mine)]
        assert sum(map(len, ours)) >= sum(map(len, theirs)) - 2 * layers
        assert 4 < spec.stats.accepted < spec.stats.drafted - 2  # both happened

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize(("module", "options"), list(zip(MODULES, OPTIONS, strict=True)))
    def test_text_is_that_of_plain(
        self, module: tuple[str, int], options: dict[str, Any], batch: int
    ) -> None:
        model, mtp_model = trained(*module)
        prompt = tiny.prompts(batch)
        spec = selfspec.wrap(model, selfspec.MtpDrafter(mtp_model, **options))
        for settings in (GREEDY, {"max_new_tokens": NEW, "do_sample": True}):
            out = []
            for one in (model, spec):
                torch.manual_seed(1)
                out.append(one.generate(**prompt, **settings).tolist())
            assert out[0] == out[1]
        assert spec.stats.fallbacks == 0
        assert spec.stats.accepted > 4

    @pytest.mark.parametrize(("name", "layers"), MODULES)
    def test_known_text_is_accepted_in_every_row(self, name: str, layers: int) -> None:
        """A row, a position or a state beside the right one would show here."""
        model, module = trained(name, layers)
        drafter = Recorder(module)
        spec = selfspec.wrap(model, drafter)
        spec.generate(**tiny.prompts(3), max_new_tokens=NEW // 2 - layers, do_sample=False)
        assert spec.stats.acceptance_rate > 0.85
        check_cache(model, module, drafter)

    @pytest.mark.parametrize(
        ("name", "layers", "tokens"),
        [("glm4_moe", 2, 1), ("glm4_moe", 2, 4), ("deepseek_v3", 1, 2), ("mellum", 1, 3)],
    )
    def test_what_is_kept_comes_from_true_states(self, name: str, layers: int, tokens: int) -> None:
        model, module = trained(name, layers)
        drafter = Recorder(module, max_draft_tokens=tokens)
        spec = selfspec.wrap(model, drafter)
        spec.generate(**tiny.prompts(3), **GREEDY)
        assert 0 < spec.stats.accepted < spec.stats.drafted
        check_cache(model, module, drafter)

    def test_it_catches_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With steps of another drafter, plain steps, and texts longer than a call takes."""
        model, module = trained("glm4_moe", 2)
        prompt = tiny.prompts(3)
        plain = model.generate(**prompt, **GREEDY).tolist()
        expected = Recorder(module)
        selfspec.wrap(model, expected).generate(**prompt, **GREEDY)
        monkeypatch.setattr("selfspec.drafters.mtp.AT_ONCE", 3)
        for wrapped in (lambda d: d, lambda d: [selfspec.NGramDrafter(1, min_prob=0.0), d], Lazy):
            drafter = Recorder(module)
            spec = selfspec.wrap(model, wrapped(drafter))
            assert spec.generate(**prompt, **GREEDY).tolist() == plain
            assert spec.stats.accepted > 4
            check_cache(model, module, drafter)
            if isinstance(spec._drafter, Recorder):
                drafts = [tree.tokens.tolist() for tree in drafter.drafts]
                assert drafts == [tree.tokens.tolist() for tree in expected.drafts]

    def test_contract(self) -> None:
        model, module = trained("glm4_moe", 2)
        drafter = selfspec.MtpDrafter(module, 3, branches=2, do_sample=True)
        check_drafter(drafter, model, max_new_tokens=8, draws=100)

    def test_asking_twice_gives_the_same(self) -> None:
        model, module = trained("glm4_moe", 2)

        class Twice(selfspec.MtpDrafter):
            def draft(self, state: Any, budget: int) -> Any:
                first = super().draft(state, budget)
                again = super().draft(state, budget)
                assert first.tokens.tolist() == again.tokens.tolist()
                return again

        selfspec.wrap(model, Twice(module, 4)).generate(**tiny.prompts(3), **GREEDY)

    def test_leaves_and_lengths(self) -> None:
        model, module = trained("glm4_moe", 2)
        drafter = Recorder(module, max_draft_tokens=3, branches=3)
        spec = selfspec.wrap(model, drafter, max_draft_tokens=6)
        spec.generate(**tiny.prompts(3), **GREEDY)
        first = drafter.drafts[0]
        assert first.parents[0].tolist() == [-1, 0, 0, 0, 1, 1, 4]  # a chain of 3, 3 are left
        assert max(tree.width for tree in drafter.drafts) == 7
        check_cache(model, module, drafter)  # states of accepted leaves, not of the chain

    def test_drawn_drafts_follow_the_law(self) -> None:
        model, module = trained("glm4_moe", 1)
        drafter = selfspec.MtpDrafter(module, 3, branches=2, do_sample=True)
        gaps, stats = largest_gaps(model, drafter, "traversal", rows=500)
        assert max(gaps) < CRITICAL
        assert stats.accepted > 50

    def test_a_cache_is_continued(self) -> None:
        """What came before it is not known to the module: its text starts later."""
        model, module = trained("glm4_moe", 2)
        ids = tiny.prompts(1)["input_ids"]
        settings = {**GREEDY, "max_new_tokens": 8, "return_dict_in_generate": True}
        out = []
        for one in (model, selfspec.wrap(model, selfspec.MtpDrafter(module))):
            first = one.generate(ids, **settings)
            out.append(one.generate(first.sequences, **settings, cache=first.cache).sequences)
        assert out[0].tolist() == out[1].tolist()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtypes(self, dtype: torch.dtype) -> None:
        small, module = trained("glm4_moe", 2)
        model = copy.deepcopy(small).to(dtype)
        model.set_experts_implementation("eager")
        other = modeling_layers.MtpModel(model, 2)
        other.layers.load_state_dict(module.layers.state_dict())
        spec = selfspec.wrap(model, selfspec.MtpDrafter(other.to(dtype).eval()))
        text = spec.generate(**tiny.prompts(3), **GREEDY)
        assert spec.stats.accepted > 4
        if dtype == torch.float64:
            assert text.tolist() == model.generate(**tiny.prompts(3), **GREEDY).tolist()

    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_attention(self, attention: str) -> None:
        model, module = trained("glm4_moe", 1)
        other = copy.deepcopy(module)
        other.set_attn_implementation(attention)
        drafter = Recorder(other)
        selfspec.wrap(model, drafter).generate(**tiny.prompts(3), **GREEDY)
        check_cache(model, module, drafter)

    def test_requests_at_a_time(self) -> None:
        """A second request on the same drafter leaves the first alone, and nothing stays."""
        model, module = trained("glm4_moe", 2)
        drafter = selfspec.MtpDrafter(module)
        one, other = selfspec.wrap(model, drafter), selfspec.wrap(model, drafter)
        plain = model.generate(**tiny.prompts(3), **GREEDY)[:, 17:].tolist()
        rows: list[list[int]] = [[], [], []]
        for step in one.stream(**tiny.prompts(3), **GREEDY):
            for row, new in zip(rows, step.tokens, strict=True):
                row += new
            other.generate(**tiny.prompts(2, seed=1), max_new_tokens=3, do_sample=False)
        assert rows == plain
        assert one.stats.accepted > 4
        assert drafter._rows is None

    def test_copies(self) -> None:
        model, module = trained("glm4_moe", 1)
        spec = selfspec.wrap(model, selfspec.MtpDrafter(module, 3))
        text = spec.generate(**tiny.prompts(3), **GREEDY).tolist()
        other = copy.deepcopy(spec)
        assert other.model is not model
        assert other.generate(**tiny.prompts(3), **GREEDY).tolist() == text
        assert other.stats.accepted == spec.stats.accepted
        weight = other._drafter.mtp_model.embed_tokens.weight
        assert weight is other.model.get_input_embeddings().weight

    def test_the_model_is_left_alone(self) -> None:
        model, module = trained("glm4_moe", 1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        keys, config = set(vars(model)), model.config.to_json_string()
        selfspec.wrap(model, selfspec.MtpDrafter(module)).generate(**tiny.prompts(3), **GREEDY)
        assert set(vars(model)) == keys
        assert model.config.to_json_string() == config
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
