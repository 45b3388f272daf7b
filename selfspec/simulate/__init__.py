"""What speculation is expected to gain: by formula, by an oracle, and by the controller itself.

`expected_speedup`, `chain_speedup` and `acceptance_needed` go by how often drafts are right and
what they take. `read` reads a trace that `SpeculativeModel.trace` wrote; `oracle` says what could
have been gained on it by whoever knew which drafts are right, `replay` what the controller gains,
who does not. Both answer for other batch sizes, trees, and sizes of the target (`WhatIf`).
"""

from selfspec.simulate.oracle import oracle
from selfspec.simulate.replay import Replayed, replay
from selfspec.simulate.times import Times, WhatIf
from selfspec.simulate.traces import Draft, Request, Trace, read
from selfspec.speedup import acceptance_needed, chain_speedup, expected_speedup

__all__ = [
    "Draft",
    "Replayed",
    "Request",
    "Times",
    "Trace",
    "WhatIf",
    "acceptance_needed",
    "chain_speedup",
    "expected_speedup",
    "oracle",
    "read",
    "replay",
]
