"""`wrap(model, drafts=...)`: which trained drafts are found, and who uses them."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import selfspec
from selfspec.checkpoints import save
from selfspec.controller import OffSwitch
from selfspec.costs import StepCosts
from selfspec.networks.exit import ExitConfig, ExitNetwork
from selfspec.networks.feature import FeatureConfig, FeatureNetwork
from selfspec.networks.heads import HeadsConfig, HeadsNetwork
from tests.families import tiny
from tests.oracle import RandomTreeDrafter

GREEDY = {"max_new_tokens": 16, "do_sample": False}


def networks() -> dict[str, Any]:
    feature = FeatureConfig(64, 64, (1, 2, 4), 64, 32, 4, 2, 16, own_head=False)
    made = {
        "feature": FeatureNetwork(feature),
        "heads": HeadsNetwork(HeadsConfig(64, 64, num_heads=2)),
        "exit": ExitNetwork(ExitConfig(64, 64, exit_layer=2, intermediate_size=32)),
    }
    return {kind: network.eval() for kind, network in made.items()}


def folder_of(tmp_path: Path, kinds: tuple[str, ...]) -> Path:
    """A model's folder with drafts of `kinds` in it."""
    model = tiny.build("llama")
    model.save_pretrained(tmp_path)
    for kind in kinds:
        save(networks()[kind], tmp_path / "drafts" / kind, base=model)
    return tmp_path


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [("feature", "FeatureDrafter"), ("heads", "HeadsDrafter"), ("early-exit", "EarlyExitDrafter")],
)
def test_a_name_takes_the_draft_of_its_kind(drafter: str, kind: str) -> None:
    model, drafts = tiny.build("llama"), networks()
    spec = selfspec.wrap(model, drafter, drafts=drafts)
    part = spec._drafter
    assert type(part).__name__ == kind
    assert part.network in drafts.values()
    prompt = tiny.prompts(2)
    assert spec.generate(**prompt, **GREEDY).tolist() == model.generate(**prompt, **GREEDY).tolist()
    assert spec.stats.drafted > 0


def test_auto_copies_and_drafts_with_the_best_there_is() -> None:
    model, drafts = tiny.build("llama"), networks()
    spec = selfspec.wrap(model, drafts=drafts)
    names = [type(part).__name__ for part in spec._drafter.drafters]
    assert names == ["SuffixDrafter", "FeatureDrafter"]
    assert "suffix + FeatureDrafter (auto: trained for the model)" in repr(spec)
    assert "off switch on" in repr(spec)
    del drafts["feature"]
    assert "suffix + HeadsDrafter" in repr(selfspec.wrap(model, drafts=drafts))


def test_an_exit_beside_the_model_takes_longer_than_a_copy_is_worth(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder_of(tmp_path, ("exit",)))
    assert "drafts: suffix (auto" in repr(selfspec.wrap(model))
    # Who names it is told so.
    with pytest.raises(ValueError, match=r"of kind exit.*has no use with drafter='auto'"):
        selfspec.wrap(model, drafts=tmp_path / "drafts")
    assert "early-exit (trained)" in repr(selfspec.wrap(model, "early-exit"))
    assert "early-exit," in repr(selfspec.wrap(tiny.build("llama"), "early-exit"))


def test_drafts_beside_the_model_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path, ("feature", "exit"))
    model = LlamaForCausalLM.from_pretrained(folder)
    with caplog.at_level(logging.INFO, "selfspec"):
        spec = selfspec.wrap(model)
    assert "suffix + FeatureDrafter" in caplog.text
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, **GREEDY).tolist()
    assert spec.generate(**prompt, **GREEDY).tolist() == plain
    assert selfspec.wrap(model, "early-exit")._drafter.network is not None
    # Who names a folder gets that one, whatever lies beside the model.
    other = folder_of(tmp_path / "other", ("heads",)) / "drafts"
    assert "suffix + HeadsDrafter" in repr(selfspec.wrap(model, drafts=other))
    # A copy and a pickle draft as the wrapper does.
    for again in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert repr(again) == repr(spec)
        assert again.generate(**prompt, **GREEDY).tolist() == plain


def test_drafts_of_another_model_are_refused(tmp_path: Path) -> None:
    drafts = folder_of(tmp_path, ("feature",)) / "drafts"
    other = tiny.llama(initializer_range=0.2)
    with pytest.raises(ValueError, match="base"):
        selfspec.wrap(other, drafts=drafts)
    spec = selfspec.wrap(other, drafts=drafts, strict_base=False)
    assert "suffix + FeatureDrafter" in repr(spec)
    prompt = tiny.prompts(1)
    plain = other.generate(**prompt, **GREEDY).tolist()
    for same in (spec, copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert same.generate(**prompt, **GREEDY).tolist() == plain


def test_models_whose_states_are_no_vectors_are_refused() -> None:
    model = tiny.build("gemma3n_text")
    assert selfspec.wrap(model)._target.architecture.support == "tree"
    for kind, name in (("feature", "feature"), ("exit", "early-exit")):
        with pytest.raises(ValueError, match="they have 4 dimensions, not 3"):
            selfspec.wrap(model, name, drafts={kind: networks()[kind]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafter": "feature"}, "needs a trained draft, and none lie beside the model"),
        ({"drafter": "heads", "drafts": {"exit": None}}, "of kind exit.*drafter='heads'"),
        ({"drafter": "early-exit", "drafts": {"heads": None}}, "of kind heads.*has no use"),
        ({"drafter": ["ngram", "layer-skip"], "drafts": {"heads": None}}, "has no use"),
        ({"drafter": "exit", "drafts": {"exit": None}}, "drafter='exit' is unknown"),
        ({"drafter": "feature", "drafts": {"feature": networks()["feature"].to("meta")}}, "meta"),
        ({"drafter": "ngram", "drafts": {"exit": None}}, "has no use with drafter='ngram'"),
        ({"drafter": selfspec.NGramDrafter(), "drafts": "x/y"}, "has no use"),
        ({"drafts": "/nowhere/at/all"}, "no folder"),
    ],
)
def test_what_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selfspec.wrap(tiny.build("llama"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drafts": ""}, "must be a folder, a repository, or networks by kind"),
        ({"drafts": networks()["heads"]}, "must be a folder, a repository, or networks by kind"),
        ({"drafts": {"heads": networks()["feature"]}}, "must be a HeadsNetwork"),
        ({"drafter": "early-exit", "drafts": {"exit": "x"}}, "must be an ExitNetwork"),
        ({"drafter": object()}, "an instance of object without hidden_taps"),
    ],
)
def test_what_is_of_another_type(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        selfspec.wrap(tiny.build("llama"), **arguments)


def test_names_in_a_list_take_their_drafts() -> None:
    spec = selfspec.wrap(tiny.build("llama"), ["ngram", "feature"], drafts=networks())
    assert [type(d).__name__ for d in spec._drafter.drafters] == ["NGramDrafter", "FeatureDrafter"]


def test_trees_that_size_themselves_get_the_whole_budget() -> None:
    assert OffSwitch(StepCosts(), 31, sizes_itself=True).length == 31
    spec = selfspec.wrap(tiny.build("llama"), drafts=networks())
    controller = spec._controller()
    assert isinstance(controller, OffSwitch)
    assert controller.sizes_itself
    alone = selfspec.wrap(tiny.build("llama"), RandomTreeDrafter(), off_switch=True)
    assert not alone._controller().sizes_itself  # type: ignore[attr-defined]


def test_the_users_network_is_left_as_it_is() -> None:
    model = tiny.build("llama", dtype=torch.float64)
    for kind, name in (("feature", "feature"), ("heads", "heads"), ("exit", "early-exit")):
        network = networks()[kind]
        before = {k: v.clone() for k, v in network.state_dict().items()}
        selfspec.wrap(model, name, drafts={kind: network}).generate(**tiny.prompts(1), **GREEDY)
        after = network.state_dict()
        assert list(after) == list(before)
        assert all(
            torch.equal(after[k], v) and after[k].dtype == v.dtype for k, v in before.items()
        )
