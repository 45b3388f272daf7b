"""The rules that a drafter is held to, and the exception that names one."""

from __future__ import annotations

RULES = {
    "members": (
        "a drafter has hidden_taps, draft, observe and reset",
        "Pass an instance with these members; see selfspec.Drafter.",
    ),
    "hidden_taps": (
        "hidden_taps are layers of the model, 0..L",
        "Use the inputs of layers 0..L-1, or L for the last one's output; () for none.",
    ),
    "tree": (
        "draft returns a valid TokenTree that starts at state.root",
        "Build it by TokenTree.chain, from_paths or from_topology, out of ids below the vocabulary "
        "size; TokenTree.root_only(state.root) is no draft.",
    ),
    "budget": (
        "a row drafts at most `budget` tokens, to depth `budget` at most",
        "Cut the draft: TokenTree.from_paths(state.root, paths, budget) does.",
    ),
    "state": (
        "draft and observe read the state and never write it",
        "Copy what is to be changed; state.tokens(b) is a view.",
    ),
    "cache": (
        "committed keys and values stay as they are",
        "Run layers by state.target.run, which writes behind them.",
    ),
    "generator": (
        "the generators of the request are the target's",
        "Draw from a torch.Generator of the drafter's own, or by state.sampler.seeds.",
    ),
    "settings": (
        "torch's settings for the thread, and its default dtype, are the caller's",
        "Use a context that puts them back, such as `with torch.enable_grad():`.",
    ),
    "observe": (
        "observe keeps no hand on what it is shown",
        "Clone logits and hidden states before changing them in place.",
    ),
    "model": (
        "the model is the user's: nothing of it is changed or left on it",
        "Run parts of it by state.target.run with a LayerPlan.",
    ),
    "alone": ("a single sequence can be drafted", "Return a tree for batch 1, too."),
    "batch": (
        "batches of rows with different lengths can be drafted",
        "Go through rows 0..state.batch-1; state.tokens(b) is row b without its padding.",
    ),
    "limit": (
        "drafts are asked for up to the last token",
        "Ask state.room(b); a draft that is too long for its row is legal.",
    ),
    "ended": (
        "rows that have ended stay in the batch",
        "Give a row with state.frozen[b] the root alone, or any draft.",
    ),
    "reset": (
        "after reset a request is drafted as it was the first time",
        "Put everything that depends on sequences back in reset, generators too.",
    ),
    "seed": (
        "the same seed gives the same text",
        "Draw by state.sampler.seeds, or from a generator that reset seeds.",
    ),
    "rows": (
        "what a row drafts does not depend on the rows beside it",
        "Keep state by row, and drawn drafts by state.sampler.seeds, one key a row.",
    ),
    "copy": (
        "copy.copy(drafter) drafts for a concurrent request",
        "Let reset make new containers instead of clearing shared ones, or write __copy__.",
    ),
    "inference_mode": (
        "it works inside torch.inference_mode, and after it",
        "Make tensors that outlive a request under torch.inference_mode(False).",
    ),
    "memory": ("memory is flat from request to request", "Forget in reset."),
    "log_q": (
        "log_q[b, n] is the normalised distribution that the children of node n were drawn from, "
        "without replacement in their order; a deterministic draft has none",
        "Give the logarithm after temperature and filters, in float32; do not drop a token after "
        "drawing it.",
    ),
    "law": (
        "sampled text follows the target's distribution",
        "Draw with noise that nothing else uses; torch's generator is the target's.",
    ),
    "text": (
        "the text is that of plain generate",
        "Look at TokenTree.resume and at layers that were run outside state.target.",
    ),
}


class DrafterError(AssertionError):
    """A drafter breaks a rule of its contract.

    Attributes:
        rule: Name of the rule.
        seen: What was seen.
        remedy: What to do.
    """

    def __init__(self, rule: str, name: str, seen: str) -> None:
        holds, remedy = RULES[rule]
        super().__init__(
            f"{name} breaks the rule {rule!r}: {holds}. Seen: {seen.rstrip('.')}. {remedy}"
        )
        self.rule, self.seen, self.remedy = rule, seen, remedy
