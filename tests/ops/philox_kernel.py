"""A kernel that stores the numbers that the package's kernels draw."""

import triton
import triton.language as tl
from selfspec_kernels.tree_accept.kernel_sampled import _exponential, _uniform


@triton.jit
def draw(u_ptr, e_ptr, seed_ptr, index_ptr, position_ptr, STREAM: tl.constexpr):  # noqa: N803
    lane = tl.program_id(0) * 16 + tl.arange(0, 16)
    position = tl.load(position_ptr + tl.program_id(0))
    u = _uniform(tl.load(seed_ptr), tl.load(index_ptr + lane), position, STREAM)
    tl.store(u_ptr + lane, u)
    tl.store(e_ptr + lane, _exponential(u))
