"""check_drafter: sound drafters pass, and every broken one is caught by the rule that it breaks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import selfspec
from selfspec.testing import DrafterError, check_drafter
from selfspec.testing.rules import RULES
from tests.drafters import BROKEN, HOARD, Drawn, Sound, small
from tests.networks import random_exit, random_feature, random_heads

PROMPTS = [[5, 9, 3, 7, 5, 9, 3], [4, 8, 4]]


def check(drafter: Any) -> Any:
    return check_drafter(drafter, small(), PROMPTS, max_new_tokens=9, draws=600)


SOUND: dict[str, Callable[[], Any]] = {
    "two tokens again": Sound,
    "drawn": Drawn,
    "ngram": lambda: selfspec.NGramDrafter(1, max_candidates=3, min_prob=0.0),
    "early-exit": lambda: selfspec.EarlyExitDrafter(1, 3, 0.1),
    "early exit, drawn": lambda: selfspec.EarlyExitDrafter(1, 2, 0.0, branches=2, do_sample=True),
    "layer-skip": lambda: selfspec.LayerSkipDrafter([1], 3, 0.0, branches=2),
    "merged": lambda: [selfspec.NGramDrafter(1, min_prob=0.0), selfspec.LayerSkipDrafter([0], 2)],
    "heads": lambda: selfspec.HeadsDrafter(random_heads(32, 32)),
    "medusa heads": lambda: selfspec.HeadsDrafter(random_heads(32, 32, conditioned=False)),
    "feature": lambda: selfspec.FeatureDrafter(random_feature(32, 32), min_gain=0.0),
    "feature, drawn": lambda: selfspec.FeatureDrafter(
        random_feature(32, 32), 2, 4, 0.0, do_sample=True, branches=2
    ),
    "trained exit": lambda: selfspec.EarlyExitDrafter(
        confidence=0.0, branches=2, network=random_exit(32, 32, 1)
    ),
    "heads, drawn": lambda: selfspec.HeadsDrafter(random_heads(32, 32), do_sample=True),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_drafters(name: str) -> None:
    report = check(SOUND[name]())
    assert report.drawn == ("drawn" in name)
    assert report.drafted > 0 or name == "drawn"
    assert report.mean_accepted_length >= 1
    rules = set(RULES) if report.drawn else set(RULES) - {"log_q", "law"}
    assert set(report.rules) == rules
    assert f"{len(rules)} rules hold" in str(report)


def test_what_the_models_own_config_asks_for_is_another_matter() -> None:
    model = copy.deepcopy(small())
    model.generation_config.return_dict_in_generate = True
    check_drafter(Sound(), model, PROMPTS, max_new_tokens=9, draws=600)


@pytest.mark.parametrize(("broken", "rule"), BROKEN, ids=lambda x: getattr(x, "__name__", x))
def test_broken_drafters(broken: type, rule: str) -> None:
    model = small()
    weight = model.lm_head.weight.data
    try:
        with pytest.raises(DrafterError) as info:
            check(broken())
    finally:
        model.lm_head.weight.data = weight
        HOARD.clear()
    assert info.value.rule == rule, str(info.value)
    holds, remedy = RULES[rule]
    assert str(info.value).startswith(f"{broken.__name__} breaks the rule {rule!r}: {holds}.")
    assert info.value.seen
    assert str(info.value).endswith(remedy)


def test_a_text_off_the_targets_law_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is the acceptance here: no drafter can bring that about by itself."""
    reject = selfspec.accept._reject

    def even(*args: Any) -> Any:
        acceptance = reject(*args)
        return replace(acceptance, next_token=acceptance.next_token // 2 * 2)

    monkeypatch.setattr("selfspec.accept._reject", even)
    with pytest.raises(DrafterError, match="does not follow the target's distribution") as info:
        check(Drawn())
    assert info.value.rule == "law"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda m: m.train(), {}, "training=True"),
        (lambda m: m.bfloat16(), {}, r"torch.bfloat16 .* use model.float\(\).eval\(\)"),
        (lambda m: m, {"prompts": [[1, 2]]}, "two or more lists"),
        (lambda m: m, {"prompts": [[1, 2], []]}, "none of them empty"),
        (lambda m: m, {"max_new_tokens": 3}, "max_new_tokens=3 must be at least 8"),
    ],
)
def test_refusals(change: Any, options: Any, message: str) -> None:
    model = change(copy.deepcopy(small()))
    with pytest.raises(ValueError, match=message):
        check_drafter(Sound(), model, **options)
