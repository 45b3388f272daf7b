"""Steps of fixed shape: the same text, nothing read back, and what becomes of graphs.

No GPU is at hand here. What is captured is `FixedStep.body`; these tests run that very code, and
put a stand-in where `torch.cuda` would record and replay it.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import selfspec
from selfspec import fixed_step
from selfspec.accept import accept
from selfspec.arena import Arena
from selfspec.cache import TreeCache
from selfspec.fingerprint import fingerprint
from selfspec.fixed_cache import FixedCache
from selfspec.fixed_step import FixedStep, bucket, pad_tree
from selfspec.sampling import Sampler
from selfspec.target import Target
from selfspec.tree import TokenTree
from tests.families import tiny
from tests.oracle import OracleDrafter, RandomTreeDrafter


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama_gqa3")


def arena_of(spec: selfspec.SpeculativeModel) -> Arena:
    arena = spec._decoder._arena
    assert arena is not None
    return arena


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama_gqa3", "gemma2", "gpt_oss", "gpt2", "falcon"])
def test_text_is_that_of_plain(name: str, batch: int) -> None:
    model, prompt = tiny.build(name), tiny.prompts(batch)
    plain = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    drafters = [
        OracleDrafter(plain, 4, wrong_at=(0, 3), branches=1),
        RandomTreeDrafter(),
        selfspec.EarlyExitDrafter(1, 3, 0.0),
        selfspec.LayerSkipDrafter([1], 3, 0.0),
        "none",
    ]
    for drafter in drafters:
        spec = selfspec.wrap(model, drafter=drafter, max_draft_tokens=16, cuda_graphs=True)
        for _ in range(2):  # the second request finds the first one's cache full of its tokens
            assert spec.generate(**prompt, max_new_tokens=24, do_sample=False).equal(plain)
        assert {key[0] for key in arena_of(spec).steps.steps} <= {1, 2, 4, 8, 16, 32}


def test_sampled_text_is_that_of_plain(model: Any) -> None:
    prompt = tiny.prompts(3)
    settings = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    torch.manual_seed(3)
    plain = model.generate(**prompt, **settings)
    oracle = OracleDrafter(plain, 3, wrong_at=(0, 2))
    spec = selfspec.wrap(model, drafter=oracle, cuda_graphs=True)
    torch.manual_seed(3)
    assert spec.generate(**prompt, **settings).equal(plain)
    assert spec.stats.mean_accepted_length > 1.5
    assert all(not greedy for *_, greedy in arena_of(spec).steps.steps)


def test_taps_scores_and_cache_outlive_the_next_step(model: Any) -> None:
    class Keeping(OracleDrafter):
        hidden_taps = (2,)

        def observe(self, state: Any, output: Any, acceptance: Any) -> None:
            seen.append((output.hidden[2], output.hidden[2].clone()))

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    prompt = tiny.prompts(2)
    asked = {
        "max_new_tokens": 15,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    plain = model.generate(**prompt, **asked)
    drafter = Keeping(plain.sequences, 3)
    spec = selfspec.wrap(model, drafter=drafter, cuda_graphs=True)
    result = spec.generate(**prompt, **asked)
    assert result.sequences.equal(plain.sequences)
    for name in ("scores", "logits"):
        for mine, theirs in zip(result[name], plain[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    before = [layer.keys.clone() for layer in result.past_key_values.layers]
    spec.generate(**tiny.prompts(2, seed=9), max_new_tokens=15)
    after = [layer.keys for layer in result.past_key_values.layers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(kept, then) for kept, then in seen)


def test_a_cache_that_has_to_grow(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.arena._GRAIN", 1)
    target = Target(model)
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=90)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 3), cuda_graphs=True)
    cache = FixedCache(4, 1, capacity=50, extra=32, device=target.device)
    monkeypatch.setattr("selfspec.arena.FixedCache", lambda *a, **k: cache)
    assert spec.generate(**prompt, max_new_tokens=90).equal(plain)
    assert cache.generation > 0
    assert cache.capacity < 400


def test_arenas_are_kept_while_they_fit(model: Any) -> None:
    spec = selfspec.wrap(model, cuda_graphs=True)
    arena = arena_of(spec)

    def steps_after(batch: int, tokens: int = 5) -> Any:
        spec.generate(**tiny.prompts(batch), max_new_tokens=tokens)
        return arena.steps

    first = steps_after(1, 900)
    assert steps_after(1) is first
    assert steps_after(1, 901 + 256) is not first
    first = arena.steps
    assert steps_after(2) is not first
    with arena.lend(2, 20, 40) as lent:
        assert lent is not None
        held = arena.steps
        spec.generate(**tiny.prompts(2), max_new_tokens=5)  # meanwhile: a cache of its own
        assert arena.steps is held


def test_what_a_graph_cannot_see_makes_a_new_one() -> None:
    model: Any = copy.deepcopy(tiny.build("llama_gqa3"))
    layer = model.model.layers[1]
    seen = [fingerprint(model)]

    def changes() -> bool:
        now = fingerprint(model)
        seen.append(now)
        return now != seen[-2]

    assert not changes()
    model.generate(**tiny.prompts(1), max_new_tokens=3)
    assert not changes()
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2)
    assert not changes()
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight * 2)
    assert changes()
    hook = layer.register_forward_hook(lambda *a: None)
    assert changes()
    hook.remove()
    layer.mlp.some_switch = True
    assert changes()
    layer.mlp.some_switch = False
    assert changes()
    layer.mlp.scaling = {"adapter": 1.0}
    assert changes()
    layer.mlp.scaling["adapter"] = 2.0
    assert changes()
    layer.mlp.scaling["nested"] = {"deeper": [1.0]}
    assert changes()
    layer.mlp.scaling["nested"]["deeper"][0] = 2.0
    assert changes()
    model.config.rms_norm_eps *= 2
    assert changes()
    for _ in range(5):  # each likely to get the address of the one before
        layer.forward = functools.partial(type(layer).forward, layer)
        assert changes()
        assert not changes()
    with torch.autocast("cpu", torch.bfloat16):
        assert changes()
    assert changes()


def test_a_request_in_another_thread_changes_nothing_for_good() -> None:
    model = tiny.build("llama_gqa3")
    before = fingerprint(model)
    seen = []

    class Looking(RandomTreeDrafter):
        def draft(self, state: Any, budget: int) -> TokenTree:
            seen.append(fingerprint(model))
            return super().draft(state, budget)

    both = [selfspec.EarlyExitDrafter(2, 2, 0.0), Looking()]  # the first puts dispatchers on
    selfspec.wrap(model, both).generate(**tiny.prompts(1), max_new_tokens=6)
    assert len(seen) > 2
    assert all(one == before for one in seen)


def test_an_arena_gives_its_memory_back_at_once(model: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        spec = selfspec.wrap(model, cuda_graphs=True)
        for batch in (1, 2, 1, 2):
            spec.generate(**tiny.prompts(batch), max_new_tokens=4)
        eager = selfspec.wrap(model, cuda_graphs=False)
        for _ in range(3):
            eager.generate(**tiny.prompts(1), max_new_tokens=4)
        alive = [o for o in gc.get_objects() if isinstance(o, TreeCache)]
    finally:
        gc.enable()
    assert [type(cache) for cache in alive] == [FixedCache]


def test_refusals() -> None:
    for wrong in (1, 2, "on", None, torch.tensor(True)):
        with pytest.raises(ValueError, match=r'cuda_graphs=.* must be "auto", True or False'):
            selfspec.SpecConfig(cuda_graphs=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cuda_graphs=True: steps of Bloom.*chains only"):
        selfspec.wrap(tiny.build("bloom"), cuda_graphs=True)
    assert selfspec.wrap(tiny.build("bloom"))._decoder._arena is None
    assert selfspec.wrap(tiny.build("llama"), cuda_graphs=False)._decoder._arena is None


@pytest.mark.parametrize("nodes", [3, 64, 65])
def test_padding_is_never_seen(nodes: int) -> None:
    tree = TokenTree.from_topology(torch.tensor([[5, 6, 7]]), [-1, 0, 1])
    padded = pad_tree(tree, nodes)
    assert padded.num_nodes.tolist() == [3]
    assert padded.tokens[0, :3].tolist() == [5, 6, 7]
    words = padded.ancestors[0].tolist()
    bits = [sum((w % (1 << 64)) << (64 * i) for i, w in enumerate(row)) for row in words]
    assert bits == [0b1, 0b11, 0b111, *(1 << n for n in range(3, nodes))]
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 33)] == [1, 2, 4, 4, 8, 64]


# ------------------------------------------------------------------ capture


class Recording:
    """Stands in for `torch.cuda.CUDAGraph`: replays by running the body again, in place."""

    made: list[Recording]

    def __init__(self) -> None:
        self.step: FixedStep | None = None
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        assert self.step is not None
        assert self.step.output is not None
        self.replays += 1
        old, new = self.step.output, self.step.body()
        old.logits.copy_(new.logits)
        for layer, states in new.hidden.items():
            old.hidden[layer].copy_(states)
        if new.acceptance is not None and old.acceptance is not None:
            old.acceptance.table.copy_(new.acceptance.table)  # type: ignore[union-attr, arg-type]


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recording]]:
    """`FixedStep.capture` as on a CUDA device, with `Recording` for the graph."""
    made: list[Recording] = []
    caches: list[FixedCache] = []
    monkeypatch.setattr(Recording, "made", made, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")

    @contextmanager
    def graph(recording: Recording, **options: Any) -> Iterator[None]:
        assert options == {"pool": "pool", "capture_error_mode": "thread_local"}
        # A capture executes nothing: what the body writes is taken back.
        layers = [layer for cache in caches for layer in cache.filled_layers]
        before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
        yield
        for layer, (keys, values) in zip(layers, before, strict=True):
            layer.keys.copy_(keys)
            layer.values.copy_(values)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    capture = FixedStep.capture

    def capture_and_tie(step: FixedStep, pool: Any) -> None:
        capture(step, pool)
        step.graph.step = step  # type: ignore[union-attr]

    monkeypatch.setattr(FixedStep, "capture", capture_and_tie)
    init = fixed_step.FixedSteps.__init__

    def on_a_gpu(self: Any, target: Target, cache: FixedCache) -> None:
        init(self, target, cache)
        self.captures = True
        caches.append(cache)

    monkeypatch.setattr(fixed_step.FixedSteps, "__init__", on_a_gpu)
    return made


def test_one_graph_a_shape_replayed_ever_after(model: Any, recordings: list[Recording]) -> None:
    prompt = tiny.prompts(2)
    plain = model.generate(**prompt, max_new_tokens=30)
    oracle = OracleDrafter(plain, 4, wrong_at=(0, 3), branches=1)
    spec = selfspec.wrap(model, drafter=oracle, cuda_graphs=True)
    for _ in range(3):
        assert spec.generate(**prompt, max_new_tokens=30).equal(plain)
    shapes = len(arena_of(spec).steps.steps)
    assert len(recordings) == shapes
    assert sum(r.replays for r in recordings) == spec.stats.forwards - shapes


def test_a_failed_capture_is_said_once_and_lived_without(
    model: Any,
    recordings: list[Recording],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    @contextmanager
    def refuses(*args: Any, **options: Any) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(torch.cuda, "graph", refuses)
    prompt = tiny.prompts(1)
    plain = model.generate(**prompt, max_new_tokens=30)
    spec = selfspec.wrap(model, drafter=OracleDrafter(plain, 4), cuda_graphs=True)
    with caplog.at_level(logging.WARNING, "selfspec"):
        for _ in range(2):
            assert spec.generate(**prompt, max_new_tokens=30).equal(plain)
    assert [r.getMessage() for r in caplog.records] == [
        "selfspec: no CUDA graphs: LlamaForCausalLM could not be captured "
        "(RuntimeError: operation not permitted when stream is capturing)."
    ]


# ------------------------------------------------------------------ nothing is read back


@pytest.fixture
def kernels_without_launch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sends every op down its CUDA path up to the launch, which does nothing."""
    triton_jit = pytest.importorskip("triton.runtime.jit")
    launched: list[str] = []

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)

    monkeypatch.setattr(triton_jit.JITFunction, "run", launch)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: 0, raising=False)
    for name, module in list(sys.modules.items()):
        if name.startswith("selfspec_kernels.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda op, backend, tensor: True)
    monkeypatch.setattr("selfspec.sampling.on_kernels", lambda logits: True)
    return launched


def fake_step(model: Any) -> Callable[[], Any]:
    """A function that runs one greedy step of 8 nodes on tensors without values."""
    target = Target(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        cache = FixedCache(
            target.architecture.num_layers, 2, capacity=64, extra=8, device=target.device
        )
        with target.ready():
            target.fill(torch.zeros(2, 9, dtype=torch.int64), cache)
        tokens = torch.zeros(2, 6, dtype=torch.int64)
        tree = TokenTree.from_topology(tokens, [-1, 0, 0, 1, 2, 2])
        step = FixedStep(target, cache, 8, frozenset({1}), 0, True)
        step.load(tree)

    def run() -> Any:
        with mode, torch.no_grad(), target.ready():
            return step.body()

    return run


@pytest.mark.parametrize("name", ["llama_gqa3", "gemma2", "gpt2"])
def test_a_step_reads_nothing_back(name: str, kernels_without_launch: list[str]) -> None:
    output = fake_step(tiny.build(name))()
    assert isinstance(output.logits, FakeTensor)
    assert output.acceptance.table.shape == (2, 4 + 2 * 8)
    launched = " ".join(kernels_without_launch)
    assert all(op in launched for op in ("attend", "partials", "tree_accept", "kv_commit"))


@pytest.mark.parametrize("rule", ["traversal", "multiround"])
def test_drawn_drafts_are_taken_without_reading(
    rule: Any, kernels_without_launch: list[str]
) -> None:
    processors = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.9)]
    sampler = Sampler(LogitsProcessorList(processors), True, rule=rule)
    state = SimpleNamespace(positions=lambda: [4, 7])
    with FakeTensorMode():
        tree = TokenTree.from_topology(
            torch.zeros(2, 4, dtype=torch.int64), [-1, 0, 0, 1], log_q=torch.zeros(2, 4, 300)
        )
        out = accept(tree, torch.zeros(2, 4, 300), sampler, state)  # type: ignore[arg-type]
    assert out.path.shape == (2, 3)
    assert any("emit" in name for name in kernels_without_launch)


def test_a_step_that_reads_would_be_caught(
    model: Any, kernels_without_launch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(scores: torch.Tensor) -> torch.Tensor:
        assert scores.max().item() < float("inf")
        return scores.max(-1).indices

    monkeypatch.setattr(fixed_step, "first_choice", reading)
    with pytest.raises(DataDependentOutputException):
        fake_step(model)()
