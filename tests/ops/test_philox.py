"""Random numbers of the ops against Philox as its paper states it, one word at a time."""

import pytest
import torch
from selfspec_kernels import philox

WORD = 2**32 - 1


def spelt_out(counter: list[int], key: list[int]) -> list[int]:
    a, b, c, d = counter
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            second >> 32 ^ b ^ key[0],
            second & WORD,
            first >> 32 ^ d ^ key[1],
            first & WORD,
        )
        key = [key[0] + 0x9E3779B9 & WORD, key[1] + 0xBB67AE85 & WORD]
    return [a, b, c, d]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_oracle_has_the_published_answers(counter, key, expected):
    words = [[int(word, 16) for word in text.split()] for text in (counter, key, expected)]
    assert spelt_out(words[0], words[1]) == words[2]


SEEDS = [0, 1, -1, -(2**63), 2**63 - 1, 0x299F31D0A4093822]
INDICES = [0, 1, 2, 3, 4, 7, 151_935, 2**31 - 1, 2**32 - 1]
POSITIONS = [0, 1, 5, 2**31 - 1, 2**31 + 5]
STREAMS = [philox.DRAFT, philox.ACCEPT, philox.RESIDUAL]


def expected(seed: int, index: int, position: int, stream: int) -> float:
    word = spelt_out([index >> 2, position, stream, 0], [seed & WORD, seed >> 32 & WORD])[index & 3]
    u = (torch.tensor(float(word), dtype=torch.float64).float() + 0.5) * 2.0**-32
    return min(float(u), 1 - 2.0**-24)


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform(stream):
    grid = torch.meshgrid(*map(torch.tensor, (SEEDS, INDICES, POSITIONS)), indexing="ij")
    got = philox.uniform(*grid, stream)
    want = [expected(s, i, p, stream) for s in SEEDS for i in INDICES for p in POSITIONS]
    assert got.dtype == torch.float32
    assert got.flatten().tolist() == want
    row = [tensor[:, :1, :1] for tensor in grid]
    assert torch.equal(philox.uniform(row[0], grid[1][:1], grid[2][:1], stream), got)


def test_ends_are_excluded():
    largest, least = torch.tensor([WORD]), torch.tensor([0])
    assert philox._between(largest).tolist() == [1 - 2.0**-24]
    assert philox._between(least).tolist() == [2.0**-33]


@pytest.mark.parametrize("count", [1, 4, 31, 1002])
def test_exponential(count):
    seed, position = torch.tensor([[3], [-9]]), torch.tensor([[5], [7]])
    u = philox.uniform(seed, torch.arange(count), position, philox.DRAFT).double()
    got = philox.exponential(seed[:, 0], count, position[:, 0], philox.DRAFT)
    torch.testing.assert_close(got.double(), -torch.log1p(-u), rtol=1e-6, atol=0)


def test_nodes_draw_apart():
    seed, position = torch.tensor([3, -9]), torch.tensor([5, 7])
    got = [philox.exponential(seed, 40, position, philox.DRAFT, node) for node in (0, 1, 2**20)]
    assert torch.equal(got[0], philox.exponential(seed, 40, position, philox.DRAFT))
    for b in range(2):
        counter = [1, int(position[b]), philox.DRAFT, 2**20]
        word = spelt_out(counter, [int(seed[b]) & WORD, int(seed[b]) >> 32 & WORD])[2]
        u = torch.tensor((word + 0.5) * 2.0**-32, dtype=torch.float64)
        torch.testing.assert_close(got[2][b, 6].double(), -torch.log1p(-u), rtol=1e-6, atol=0)
    assert len({float(e[0, 0]) for e in got}) == 3
    nodes = torch.tensor([0, 1, 2**20])
    at_once = philox.exponential(seed[:, None], 40, position[:, None], philox.DRAFT, nodes)
    assert torch.equal(at_once, torch.stack(got, dim=1))


def test_streams_do_not_depend_on_each_other():
    index = torch.arange(50_000)
    u = torch.stack([philox.uniform(torch.tensor(1), index, torch.tensor(0), s) for s in STREAMS])
    correlation = torch.corrcoef(torch.cat([u, u[:1].roll(1, 1)]).double())
    assert (correlation - torch.eye(4)).abs().max() < 5 / 50_000**0.5
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / 150_000) ** 0.5


@pytest.mark.interpret
def test_kernels_draw_the_same_numbers():
    from .philox_kernel import draw

    index = torch.cat([torch.arange(16), torch.arange(151_920, 151_936)]).int()
    positions = torch.tensor([3, 2**31 - 1], dtype=torch.int32)
    for seed in SEEDS:
        u, e = torch.empty(2, 32).unbind()
        draw[(2,)](u, e, torch.tensor([seed]), index, positions, philox.RESIDUAL)
        at = positions.repeat_interleave(16)
        want = philox.uniform(torch.tensor(seed), index, at, philox.RESIDUAL)
        assert torch.equal(u, want)
        torch.testing.assert_close(e.double(), -torch.log1p(-want.double()), rtol=1e-6, atol=0)
