"""Where the nodes of a token tree sit in the cache, and which of them each query attends to."""

from dataclasses import dataclass, field

import torch
from einops import repeat
from torch import Tensor

WORD_BITS = 64
_FIELDS = (
    ("ancestors", torch.int64, 3),
    ("depth", torch.int32, 2),
    ("prefix_len", torch.int32, 1),
    ("start", torch.int32, 1),
    ("block_table", torch.int32, 2),
)


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """Position and visibility of tree nodes behind a cached prefix.

    Made once a step and shared by all layers; what `mask` and `bias` return is kept for the life
    of the layout and must not be written to.

    Row b holds its committed tokens in slots `start[b] .. prefix_len[b] - 1`, where slots count
    positions, and node n in slot `prefix_len[b] + n` at position `prefix_len[b] + depth[b, n]`. The
    M queries are the last M of the N nodes: M == N for a whole tree, M < N while one is extended.

    Slots are those of a cache view [B, K, S, D], or, with a `block_table`, of pages
    [pages, K, page_size, D]: slot s of row b is then at `s % page_size` in page
    `block_table[b, s // page_size]`, for nodes as for the prefix.

    Args:
        ancestors: int64 [B, M, ceil(N / 64)]; bit `n % 64` of word `n // 64` is set iff the query
            attends node n. A query's own bit is normally set.
        depth: int32 [B, N]; 0 at the root.
        prefix_len: int32 [B]; slots before the nodes: committed tokens, and padding on their left.
        max_prefix_len: Upper bound of `prefix_len`, known on the host; sizes grids and masks
            without reading from the device.
        start: int32 [B]; prefix slots before it are padding, which nobody sees. None is 0.
        block_table: int32 [B, P]; the pages of each row, of which those that hold no slot below
            `prefix_len + N` may be anything. None: the cache is not paged.

    Raises:
        TypeError: If a tensor has another dtype.
        ValueError: If shapes or devices disagree, or `max_prefix_len` is negative.
    """

    ancestors: Tensor
    depth: Tensor
    prefix_len: Tensor
    max_prefix_len: int
    start: Tensor | None = field(default=None, kw_only=True)
    block_table: Tensor | None = field(default=None, kw_only=True)
    _memo: dict[tuple[object, ...], Tensor | bool] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        for name, dtype, ndim in _FIELDS:
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.dtype is not dtype:
                raise TypeError(f"TreeLayout: {name} must be {dtype}, got {tensor.dtype}")
            if tensor.dim() != ndim:
                raise ValueError(
                    f"TreeLayout: {name} must have {ndim} dimensions, got {tuple(tensor.shape)}"
                )
            if tensor.device != self.prefix_len.device:
                raise ValueError(
                    f"TreeLayout: {name} is on {tensor.device}, prefix_len on "
                    f"{self.prefix_len.device}"
                )
            if tensor.shape[0] != self.ancestors.shape[0]:
                raise ValueError(
                    f"TreeLayout: batch sizes differ: ancestors {self.ancestors.shape[0]}, "
                    f"{name} {tensor.shape[0]}"
                )
            # Kernels index them without strides.
            object.__setattr__(self, name, tensor.contiguous())
        _, queries, words = self.ancestors.shape
        nodes = self.depth.shape[1]
        if not 1 <= queries <= nodes:
            raise ValueError(f"TreeLayout: ancestors has {queries} queries for {nodes} nodes")
        if words != (nodes + WORD_BITS - 1) // WORD_BITS:
            raise ValueError(
                f"TreeLayout: ancestors has {words} words a query; {nodes} nodes need "
                f"{(nodes + WORD_BITS - 1) // WORD_BITS}"
            )
        if self.max_prefix_len < 0:
            raise ValueError(f"TreeLayout: max_prefix_len={self.max_prefix_len} is negative")

    @property
    def batch(self) -> int:
        """B."""
        return self.ancestors.shape[0]

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.depth.shape[1]

    @property
    def num_queries(self) -> int:
        """M."""
        return self.ancestors.shape[1]

    def mask(self, key_len: int, window: int = 0) -> Tensor:
        """Visibility as a dense mask.

        Args:
            key_len: Slots of the key view, at least `max_prefix_len + N`; slots from
                `prefix_len + N` on are invisible.
            window: If positive, a query sees only positions less than `window` behind its own.

        Returns:
            bool [B, M, key_len], True where the query attends the slot.

        Raises:
            ValueError: If `key_len` is too small.
        """
        key = ("mask", key_len, window)
        if key not in self._memo:
            self._memo[key] = self._build_mask(key_len, window)
        return self._memo[key]  # type: ignore[return-value]

    def _build_mask(self, key_len: int, window: int) -> Tensor:
        if key_len < self.max_prefix_len + self.num_nodes:
            raise ValueError(
                f"TreeLayout: key_len={key_len} is too small for max_prefix_len="
                f"{self.max_prefix_len} and {self.num_nodes} nodes"
            )
        device = self.prefix_len.device
        shape = (self.batch, self.num_queries, key_len)
        slots = torch.arange(key_len, dtype=torch.int32, device=device)
        offset = torch.arange(self.num_nodes, dtype=torch.int64, device=device)
        shifts = torch.arange(WORD_BITS, dtype=torch.int64, device=device)

        prefix_len = self.prefix_len[:, None]
        prefix = slots < prefix_len
        if self.start is not None:
            prefix = prefix & (slots >= self.start[:, None])
        prefix = prefix[:, None, :]
        nodes = ((self.ancestors[..., None] >> shifts) & 1).bool().flatten(2)
        nodes = nodes[..., : self.num_nodes]
        if window > 0:
            depth = self.depth[:, -self.num_queries :, None]
            prefix = prefix & (prefix_len[:, :, None] + depth - slots < window)
            nodes = nodes & (depth - self.depth[:, None, :] < window)
        columns = (prefix_len + offset)[:, None, :].expand_as(nodes)
        return prefix.expand(shape).clone().scatter_(2, columns, nodes)

    def bias(self, key_len: int, window: int, dtype: torch.dtype, groups: int) -> Tensor:
        """Visibility as an additive mask for queries packed by key/value head.

        Args:
            key_len: As for `mask`.
            window: As for `mask`.
            dtype: Floating dtype of the result.
            groups: G; query head g of a group and query m share row `g * M + m`.

        Returns:
            [B, 1, G * M, key_len]; 0 where visible, -inf elsewhere.
        """
        key = ("bias", key_len, window, dtype, groups)
        if key not in self._memo:
            hidden = self.mask(key_len, window).logical_not()
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            bias.masked_fill_(hidden, float("-inf"))
            self._memo[key] = repeat(bias, "b m s -> b 1 (g m) s", g=groups)
        return self._memo[key]  # type: ignore[return-value]

    def sees_all(self, key_len: int, window: int = 0) -> bool:
        """Whether it is known for free that every query attends every slot of the key view.

        Only asked of CPU tensors, where reading a value costs nothing, and of single queries, since
        no two nodes of a tree see the same slots; False means "not known".
        """
        # Subclasses (fake tensors, for one) have no values to read.
        if (
            self.num_queries != 1
            or type(self.prefix_len) is not Tensor
            or not (self.prefix_len.is_cpu)
        ):
            return False
        key = ("sees_all", key_len, window)
        if key not in self._memo:
            self._memo[key] = bool(self.mask(key_len, window).all())
        return self._memo[key]  # type: ignore[return-value]
