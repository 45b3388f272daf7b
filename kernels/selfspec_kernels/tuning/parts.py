"""The parts that the tables have rows for, and what a program may use on each."""

from typing import NamedTuple


class Part(NamedTuple):
    """One GPU architecture.

    Attributes:
        backend: "cuda" or "hip", as Triton names them.
        arch: What Triton's target wants: 10 * major + minor, or a gfx name.
        warp_size: Lanes a warp.
        shared_memory: Bytes that one program may use.
    """

    backend: str
    arch: int | str
    warp_size: int
    shared_memory: int


PARTS: dict[str, Part] = {
    "sm_80": Part("cuda", 80, 32, 166_912),
    "sm_86": Part("cuda", 86, 32, 101_376),
    "sm_89": Part("cuda", 89, 32, 101_376),
    "sm_90": Part("cuda", 90, 32, 232_448),
    "sm_100": Part("cuda", 100, 32, 232_448),
    "sm_120": Part("cuda", 120, 32, 101_376),
    "gfx942": Part("hip", "gfx942", 64, 65_536),
}


def nearest_part(capability: int) -> str:
    """The newest part that is not newer than an NVIDIA `capability`, such as 90 for 9.0.

    8.7 thus gets the rows of 8.6, 10.3 those of 10.0, and each has the shared memory they need.
    """
    known = sorted(part.arch for part in PARTS.values() if isinstance(part.arch, int))
    older = [arch for arch in known if arch <= capability]
    return f"sm_{older[-1] if older else known[0]}"
