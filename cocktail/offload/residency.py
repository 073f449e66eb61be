"""Which layers stay on an accelerator and how the rest of its memory is used: a pure search over what fits.

A token costs (SubSpec, arXiv 2509.18344, with an acceptance length E and a draft of some depth)

    (depth * draft step + max(copy, verification)) / E

where copy is the time of the streamed layers over the link. Among everything that fits, the plan takes what answers a
question soonest: prefill, one pass over the streamed layers, and an answer of usual length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cocktail.offload.budget import ALLOCATION_STEP, SEGMENT_TOKENS, WORKSPACE_BYTES, Activations, MemoryEstimate
from cocktail.offload.speed import DeviceSpeed
from cocktail.offload.weight_stream import NUM_SLOTS

# Tokens of an answer of usual length.
ANSWER_TOKENS = 128
# Predictions that differ by less are the same.
ABOUT_AS_FAST = 1.1
# What a layer costs for each segment, whatever its rows: Python and the launches of a dozen kernels. An assumption.
LAUNCH_SECONDS = 0.0003


@dataclass(frozen=True)
class ModelSize:
    """Bytes of a decoder's weights in the run's dtype, and the dimensions that its speed depends on.

    Args:
        layers: of each decoder layer's matrices.
        slot: of a staging slot, which holds the largest of them.
        embedding: of the token embedding, 0 if the head shares it.
        head: of the output layer.
        rest: norms, biases and what else there is.
        hidden_size, itemsize: values of a hidden state, and bytes of a value.
        attention_size: values of a layer's query heads together.
    """

    layers: tuple[int, ...]
    slot: int
    embedding: int
    head: int
    rest: int
    hidden_size: int
    itemsize: int
    attention_size: int

    @property
    def nbytes(self) -> int:
        return sum(self.layers) + self.embedding + self.head + self.rest


@dataclass(frozen=True)
class DraftModelNeeds:
    """What a model of its own that drafts takes, in bytes.

    Args:
        held: weights and KV cache, all through the run.
        passing: what it takes beside them while it runs; the target does not run then.
    """

    held: int = 0
    passing: int = 0


@dataclass(frozen=True)
class KvChoice:
    """A policy of the KV cache, and the memory that the sealed cache and its tail take.

    `history_bits` are those of a chat's older turns.

    A model that drafts reads what the policy leaves unquantized: so what it needs goes with the policy.
    """

    policy: str
    nbytes: int
    draft_model: DraftModelNeeds = DraftModelNeeds()
    history_bits: int = 16


@dataclass(frozen=True)
class Draft:
    """What drafting with substitutes does to the cost of a token.

    Args:
        form: of the substitutes: "4", "3", "2" or "nf4"; None for no draft.
        depth: draft steps of a round.
        rows: tokens that a verification runs.
        acceptance_length: tokens that a round emits.
    """

    form: str | None = None
    depth: int = 0
    rows: int = 1
    acceptance_length: float = 1.0

    @property
    def bits(self) -> int | None:
        """Of a code."""
        return {"4": 4, "3": 3, "2": 2, "nf4": 4}[self.form] if self.form else None

    @property
    def weights(self) -> int | Literal["nf4"]:
        """The form of a substitute's weights, as `load_substitutes` takes it."""
        return "nf4" if self.form == "nf4" else int(self.form or 0)

    def substitute_bytes(self, layer_bytes: int, itemsize: int) -> int:
        """Bytes of a substitute layer: codes, and for every 64 of them 32 bits of scales."""
        return 0 if self.bits is None else int(layer_bytes / (8 * itemsize) * (self.bits + 0.5))


NO_DRAFT = Draft()
# What a plan expects of them before a run knows better. Four bits: about what document questions gave with SmolLM2
# (docs/benchmarks.md); the others are assumptions.
SELF_DRAFTS = {
    "4": Draft("4", depth=10, rows=32, acceptance_length=6.0),
    "nf4": Draft("nf4", depth=10, rows=32, acceptance_length=6.0),
    "3": Draft("3", depth=5, rows=32, acceptance_length=3.0),
    "2": Draft("2", depth=2, rows=32, acceptance_length=1.2),
}


@dataclass(frozen=True)
class Workload:
    """What is run.

    Args:
        context_tokens: template prefix and document.
        activations: what a prefill in segments of so many rows takes, with hidden states in host memory or not.
        kv: the policy that was asked for, then those to be tried if nothing else fits, best first.
        device_context_bytes: 0 where there is none.
        allocator_bytes: what a card's allocator takes beyond tensors; each resident layer then rounds up too.
        heap_gaps: whether tensors lie in the C library's heap: what comes and goes leaves gaps as large as itself.
        step_graph_bytes: what graphs of decode steps take; they are captured only if every layer is resident.
        stored_context_bytes: unquantized keys and values of all other layers that stay on the device.
        drafted_tokens: that a verification holds beside the last one, counted in all parts.
    """

    context_tokens: int
    activations: Callable[[int, bool], Activations]
    kv: Sequence[KvChoice]
    device_context_bytes: int = 0
    allocator_bytes: int = 0
    heap_gaps: bool = False
    step_graph_bytes: int = 0
    stored_context_bytes: int = 0
    drafted_tokens: int = 0


@dataclass(frozen=True)
class ResidencyPlan:
    """Where everything lives; `streamed` are layer numbers, ascending; seconds are predictions."""

    budget_bytes: int | None
    num_layers: int
    streamed: tuple[int, ...]
    streamed_bytes: int
    embedding_on_host: bool
    hidden_on_host: bool
    segment_tokens: int
    kv_policy: str
    draft: Draft
    estimate: MemoryEstimate
    prefill_seconds: float
    token_seconds: float
    copy_seconds: float
    drafted_tokens: int = 0
    kv_bytes: int = 0
    history_bits: int = 16

    @property
    def resident_layers(self) -> int:
        return self.num_layers - len(self.streamed)

    @property
    def why_these_layers(self) -> str:
        """Why the layers stay resident that do, as it is shown."""
        if not self.streamed:
            return "all of them fit"
        if not self.resident_layers:
            return "none fits beside the other parts"
        return "as many stay as fit, spread evenly: a layer is copied while the resident ones before it run"

    @property
    def answer_seconds(self) -> float:
        """Until an answer of usual length is there."""
        return self.prefill_seconds + ANSWER_TOKENS * self.token_seconds


def plan_residency(
    size: ModelSize,
    workload: Workload,
    budget_bytes: int | None,
    speed: DeviceSpeed,
    drafts: Sequence[Draft] = (NO_DRAFT,),
    *,
    streamed_layers: int | None = None,
) -> ResidencyPlan | None:
    """The fastest plan within the budget, or None if there is none.

    Everything stays resident where that fits. KV precision is lowered only where nothing fits at the one before.
    Without a budget everything is resident, and segments have the most rows whose workspace is small.

    Args:
        drafts: what may draft where layers are streamed.
        streamed_layers: exactly so many layers are streamed.
    """
    if budget_bytes is None:
        return _unbounded(size, workload, speed)
    for kv in workload.kv:
        plans = [
            plan
            for draft in drafts
            for plan in _fitting(size, workload, kv, budget_bytes, speed, draft, streamed_layers)
        ]
        if plans:
            fastest = min(plan.answer_seconds for plan in plans)
            # The first of those that are about as fast. Rates are measured anew from time to time, and 16-bit sums
            # depend on the rows of a segment: a plan that changes for nothing may change a word.
            return next(plan for plan in plans if plan.answer_seconds <= ABOUT_AS_FAST * fastest)
    return None


def smallest_estimate(size: ModelSize, workload: Workload, *, may_offload: bool = True) -> MemoryEstimate:
    """What the plan that takes the fewest bytes needs: `plan_residency` has one from so many on.

    Args:
        may_offload: False: everything stays on the device.
    """
    kv = min(workload.kv, key=lambda choice: choice.nbytes + choice.draft_model.held)
    num_layers = len(size.layers)
    # Shorter segments never take more.
    shortest = [placement for placement in _placements(size) if placement[0] == SEGMENT_TOKENS[-1]]
    estimates = (
        _estimate(size, workload, kv, NO_DRAFT, spread(num_layers, count), *placement)
        for placement in (shortest if may_offload else shortest[:1])
        for count in ((0, num_layers) if may_offload else (0,))
    )
    return min(estimates, key=lambda estimate: estimate.peak_bytes)


def spread(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` of the layers, evenly spaced: while the layers between them run, the link copies the next ones."""
    return tuple(int((2 * index + 1) * num_layers / (2 * count)) for index in range(count))


# Longest segments, everything on the device.
_FIRST_PLACEMENT = (SEGMENT_TOKENS[0], False, False)


def _placements(size: ModelSize) -> Iterator[tuple[int, bool, bool]]:
    """(segment tokens, embedding on the host, hidden states on the host), all that there are."""
    for hidden_on_host in (False, True):
        # Embeddings that begin on the host are looked up there.
        for embedding_on_host in (False, True) if size.embedding and not hidden_on_host else (hidden_on_host,):
            for segment_tokens in SEGMENT_TOKENS:
                yield segment_tokens, embedding_on_host, hidden_on_host


def _unbounded(size: ModelSize, workload: Workload, speed: DeviceSpeed) -> ResidencyPlan:
    small = (rows for rows in SEGMENT_TOKENS if workload.activations(rows, False).workspace <= WORKSPACE_BYTES)
    segment_tokens = next(small, SEGMENT_TOKENS[-1])
    return _plan(size, workload, workload.kv[0], None, speed, NO_DRAFT, (), (segment_tokens, False, False))


def _fitting(
    size: ModelSize,
    workload: Workload,
    kv: KvChoice,
    budget_bytes: int,
    speed: DeviceSpeed,
    draft: Draft,
    streamed_layers: int | None,
) -> Iterator[ResidencyPlan]:
    """For each placement the plan that streams the fewest layers, if any fits."""
    num_layers = len(size.layers)
    counts = range(num_layers + 1) if streamed_layers is None else (streamed_layers,)
    for placement in _placements(size):
        for count in counts:
            if streamed_layers is None and 0 < count <= NUM_SLOTS:
                continue  # their slots would hold them all
            streamed = spread(num_layers, count)
            if _estimate(size, workload, kv, draft, streamed, *placement).peak_bytes <= budget_bytes:
                yield _plan(size, workload, kv, budget_bytes, speed, draft, streamed, placement)
                if count == 0 and placement == _FIRST_PLACEMENT:
                    return  # nothing is moved and segments are longest; what comes later is no faster
                break


def _estimate(
    size: ModelSize,
    workload: Workload,
    kv: KvChoice,
    draft: Draft,
    streamed: Sequence[int],
    segment_tokens: int,
    embedding_on_host: bool,
    hidden_on_host: bool,
) -> MemoryEstimate:
    activations = workload.activations(segment_tokens, hidden_on_host)
    moved = [size.layers[index] for index in streamed]
    looked_up_on_device = not (embedding_on_host or hidden_on_host)
    blocks = (len(size.layers) - len(moved)) * ALLOCATION_STEP if workload.allocator_bytes else 0
    graphs = workload.step_graph_bytes if not streamed and looked_up_on_device else 0
    return MemoryEstimate(
        weights=size.nbytes - sum(moved) - (0 if looked_up_on_device else size.embedding),
        staging=NUM_SLOTS * size.slot if moved else 0,
        substitutes=sum(draft.substitute_bytes(layer, size.itemsize) for layer in moved),
        draft_model=kv.draft_model.held + max(0, kv.draft_model.passing - activations.nbytes),
        kv_cache=kv.nbytes,
        layer_context=activations.layer_context,
        stored_context=workload.stored_context_bytes,
        hidden_states=activations.hidden_states,
        rotary_tables=activations.rotary_tables,
        workspace=activations.workspace,
        device_context=workload.device_context_bytes,
        allocator=workload.allocator_bytes + blocks + activations.workspace * workload.heap_gaps,
        step_graphs=graphs,
    )


def _plan(
    size: ModelSize,
    workload: Workload,
    kv: KvChoice,
    budget_bytes: int | None,
    speed: DeviceSpeed,
    draft: Draft,
    streamed: tuple[int, ...],
    placement: tuple[int, bool, bool],
) -> ResidencyPlan:
    segment_tokens, embedding_on_host, hidden_on_host = placement
    moved = sum(size.layers[index] for index in streamed)
    decoder, tokens = sum(size.layers), workload.context_tokens
    draft = draft if streamed else NO_DRAFT
    copy = speed.copy_seconds(moved)
    verify = speed.pass_seconds(decoder + size.head, kv.nbytes, draft.rows, size.itemsize)
    kept = decoder - moved + sum(draft.substitute_bytes(size.layers[index], size.itemsize) for index in streamed)
    step = speed.pass_seconds(kept + size.head, kv.nbytes, 1, size.itemsize)
    # Every segment reads the layers anew; a token attends to half of the others, two operations for key and for value.
    segments = -(-tokens // segment_tokens)
    launching = segments * len(size.layers) * LAUNCH_SECONDS
    reading = segments * speed.pass_seconds(decoder, 0, 0, size.itemsize)
    attention = len(size.layers) * 2 * size.attention_size * tokens**2 / speed.operations
    compute = max(reading, speed.pass_seconds(decoder, 0, tokens, size.itemsize) + attention)
    rows_moved = 2 * len(size.layers) * tokens * size.hidden_size * size.itemsize if hidden_on_host else 0
    return ResidencyPlan(
        budget_bytes=budget_bytes,
        num_layers=len(size.layers),
        streamed=streamed,
        streamed_bytes=moved,
        embedding_on_host=embedding_on_host or hidden_on_host,
        hidden_on_host=hidden_on_host,
        segment_tokens=segment_tokens,
        kv_policy=kv.policy,
        kv_bytes=kv.nbytes,
        history_bits=kv.history_bits,
        draft=draft,
        estimate=_estimate(size, workload, kv, draft, streamed, *placement),
        prefill_seconds=max(copy, compute + launching) + speed.copy_seconds(rows_moved),
        token_seconds=(draft.depth * step + max(copy, verify)) / draft.acceptance_length,
        copy_seconds=copy,
        drafted_tokens=workload.drafted_tokens,
    )
