"""A device made of plain lists that does what the compiled programs do, and a model to run on it.

The model has a state per spec. What it keeps of a token is a digest of everything that this token has seen in the
states before, as in a real model, so that any wrong, stale, freed or shared block gives wrong tokens. A recurrent state
is a digest of itself behind the token before, and of the token: it must be of exactly that position and prefix.
"""

import dataclasses
import functools
import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from jaxpage.ops.state_spec import KVLayout, PagedPlace, RecurrentPlace, RecurrentSpec, StateSpec
from jaxpage.requests.beam_search import BeamSearch, FinishedBeam
from jaxpage.requests.request import Request
from jaxpage.sampling_params import BeamSearchParams
from jaxpage.scheduler.step_plan import SchedulerOutput, StateLoad, StateSave
from jaxpage.wire import TokenLogprobs

VOCAB_SIZE = 7
STALE = 10**6
"""What entries of the device's tables hold that were never written."""
MAX_BLOCKS = 64
"""Length of the device's block tables."""
ZERO = 0
"""A recurrent state before the first token."""


def layers_of(specs: tuple[StateSpec, ...]) -> list[tuple[StateSpec, ...]]:
    """Layers with these states: a recurrent one stands in the layer of the state before it."""
    layers: list[tuple[StateSpec, ...]] = [()]
    for spec in specs:
        if isinstance(spec, RecurrentSpec):
            layers[-1] = (*layers[-1], spec)
        else:
            layers.append((spec,))
    return layers


def advance(state: int, hidden: int) -> int:
    """A recurrent state behind one more token."""
    return hash((state, hidden))


def embed(position: int, token_id: int, salt: str | None) -> int:
    """What the first layer keeps. A real model knows no salts; here it does, so that sharing across them is noticed."""
    return hash((position, token_id, len(salt or "")))


def candidates(hidden: int, count: int) -> list[tuple[int, float]]:
    """The most probable next tokens with something like their log-probabilities, best first."""
    logprobs = [(token_id, -(hash((hidden, token_id)) % 997) / 100 - 0.01) for token_id in range(VOCAB_SIZE)]
    return sorted(logprobs, key=lambda pair: -pair[1])[:count]


def draw(hidden: int, request: Request, allowed: Collection[int] = range(VOCAB_SIZE)) -> int:
    """The next token of those allowed: the most probable one, or what the request's seed makes of it."""
    if request.params.greedy:
        return next(token_id for token_id, _ in candidates(hidden, VOCAB_SIZE) if token_id in allowed)
    return sorted(allowed)[hash((hidden, request.seed)) % len(allowed)]


class Rule:
    """Stands in for a grammar: every text has some length, and the tokens that may follow differ from place to place.

    Masks come at once or, if it is late, out of a thread some time later.
    """

    def __init__(self, salt: int, length: int, late: bool) -> None:
        self._salt, self._length, self._late = salt, length, late
        self._num_tokens = 0
        self.mask = self._make()

    @property
    def is_ready(self) -> bool:
        return self.mask.done()

    def accept(self, token_id: int) -> bool:
        assert token_id in self.allowed(self._num_tokens), "drawn against the mask"
        self._num_tokens += 1
        if self._num_tokens == self._length:
            return False
        self.mask = self._make()
        return True

    def allowed(self, num_tokens: int) -> set[int]:
        """What may follow so many tokens."""
        return {token_id for token_id in range(VOCAB_SIZE) if (token_id + num_tokens + self._salt) % 3}

    def goes_on(self, num_tokens: int) -> bool:
        return num_tokens < self._length

    def _make(self) -> "Future[np.ndarray]":
        mask: Future[np.ndarray] = Future()
        bits = np.array([sum(1 << token_id for token_id in self.allowed(self._num_tokens))], np.int32)
        if self._late:
            threading.Timer(0.002, mask.set_result, (bits,)).start()
        else:
            mask.set_result(bits)
        return mask


@functools.cache
def kept(specs: tuple[StateSpec, ...], token_ids: tuple[int, ...], salt: str | None) -> tuple[list[int], ...]:
    """The model without a cache: what each layer keeps of each token, and as the last entry what comes out of all."""
    if not token_ids:
        return tuple([] for _ in range(len(specs) + 1))
    layers = [list(values) for values in kept(specs, token_ids[:-1], salt)]
    position = len(token_ids) - 1
    hidden = embed(position, token_ids[-1], salt)
    for spec, values in zip(specs, layers, strict=False):
        if isinstance(spec, RecurrentSpec):
            values.append(advance(values[-1] if values else ZERO, hidden))
            hidden = hash((values[-1], hidden))
        else:
            values.append(hidden)
            hidden = hash(tuple(values[spec.first_visible(position) :]))
    layers[-1].append(hidden)
    return tuple(layers)


def salt_of(request: Request) -> str | None:
    return request.extra_keys.cache_salt if request.extra_keys is not None else None


def expected_tokens(specs: tuple[StateSpec, ...], request: Request) -> tuple[list[int], str]:
    """The tokens that the request must get, and why it ends, from its prompt and options alone."""
    tokens = list(request.prompt_token_ids)
    rule = request.constraint
    assert rule is None or isinstance(rule, Rule)
    for count in range(1, request.max_tokens + 1):
        allowed = range(VOCAB_SIZE) if rule is None else rule.allowed(count - 1)
        tokens.append(draw(kept(specs, tuple(tokens), salt_of(request))[-1][-1], request, allowed))
        stops = tokens[-1] in request.stop_token_ids and count > request.params.min_tokens
        if stops or (rule is not None and not rule.goes_on(count)):
            return tokens[request.num_prompt_tokens :], "stop"
    return tokens[request.num_prompt_tokens :], "length"


_told = functools.lru_cache(1000)(expected_tokens)


def guesses(specs: tuple[StateSpec, ...], request: Request, num_tokens: int) -> list[int]:
    """Drafts behind its first `num_tokens`: what will follow, with some of them wrong; at times fewer or none."""
    following = [*_told(specs, request)[0], *[0] * request.max_drafts][num_tokens - request.num_prompt_tokens :]
    dice = hash((request.seed, num_tokens, *following))
    drafts = following[: min(request.max_drafts, dice % 7, request.max_computed_tokens - num_tokens)]
    return [(draft + 1) % VOCAB_SIZE if hash((dice, place)) % 4 == 0 else draft for place, draft in enumerate(drafts)]


def expected_beams(
    specs: tuple[StateSpec, ...], request: Request, params: BeamSearchParams, eos: frozenset[int]
) -> list[FinishedBeam]:
    """What a search must find: the algorithm run on the model itself."""
    search = BeamSearch(params, eos)
    live = [tuple(request.prompt_token_ids)]
    while live:
        found = [candidates(kept(specs, tokens, salt_of(request))[-1][-1], search.num_candidates) for tokens in live]
        live = [(*live[beam.source], beam.token_id) for beam in search.advance(found)]
    return search.results()


@dataclass
class DeviceRow:
    """A row of the batch. Left-overs of the last request stay until they are overwritten, as on a real device."""

    tables: list[list[int]]
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    request: Request | None = None
    """For its options: seed, temperature, salt, candidates."""
    drafts: list[int] = field(default_factory=list)
    """Guesses at what follows `token_ids`."""
    hidden: int = 0
    """What the last token was drawn from."""
    rings: list[dict[int, tuple[int, int]]] = field(default_factory=list)
    """Per recurrent array: entry -> (tokens before, state), of the newest tokens."""

    def copy(self) -> "DeviceRow":
        return dataclasses.replace(
            self,
            tables=[list(table) for table in self.tables],
            token_ids=list(self.token_ids),
            rings=[dict(ring) for ring in self.rings],
        )


Results = tuple[list[list[int]], list[list[TokenLogprobs] | None], None, list[int]]


class Device:
    """What a device knows: rows and pages of KV, changed by nothing but the scheduler's outputs."""

    def __init__(self, num_rows: int, layout: KVLayout, max_drafts: int = 0) -> None:
        self.rows = [
            DeviceRow([[STALE] * MAX_BLOCKS for _ in layout.groups], rings=[{} for _ in layout.recurrent])
            for _ in range(num_rows)
        ]
        self._layout = layout
        self._places = [place for layer in layout.layers for place in layer]
        self._specs = tuple(
            layout.groups[place.group].spec if isinstance(place, PagedPlace) else layout.recurrent[place.array]
            for place in self._places
        )
        self._ring = 2 + max_drafts
        self._pages: dict[tuple[int, int], dict[int, int]] = {}
        """(array, block id) -> offset -> what is kept there."""
        self._checkpoints: dict[int, tuple[int, int, list[int]]] = {}
        """Block id -> (which block of its checkpoint it is, tokens before, states), unless other things lie there."""
        self.num_saves = self.num_loads = 0

    def run(self, output: SchedulerOutput) -> Results:
        """One step. Returns what each scheduled row draws, nothing where the known tokens are not all computed."""
        self._prepare(output)
        scheduled = [self.rows[row_index] for row_index in output.rows]
        hidden: list[list[int]] = []
        for row, most in zip(scheduled, output.query_lens, strict=True):
            request, known = row.request, row.token_ids + row.drafts
            assert request is not None
            end = min(len(known), request.max_computed_tokens) if request.max_drafts else len(known)
            query_len = max(0, min(most, end - row.num_computed_tokens))
            assert query_len == most or request.max_drafts
            positions = range(row.num_computed_tokens, row.num_computed_tokens + query_len)
            hidden.append([embed(position, known[position], salt_of(request)) for position in positions])
        for place in self._places:
            if isinstance(place, RecurrentPlace):
                hidden = [self._recur(place, row, values) for row, values in zip(scheduled, hidden, strict=True)]
                continue
            for row, values in zip(scheduled, hidden, strict=True):
                self._write(place, row, values)
            hidden = [self._attend(place, row, len(values)) for row, values in zip(scheduled, hidden, strict=True)]
        results = [self._sample(row, values) for row, values in zip(scheduled, hidden, strict=True)]
        tokens, logprobs = [tokens for tokens, _ in results], [logprobs for _, logprobs in results]
        return tokens, logprobs, None, [len(row.drafts) for row in scheduled]

    def draw_again(self, output: SchedulerOutput, masks: dict[int, np.ndarray | None]) -> dict[int, list[int]]:
        """Draw again or, without a mask, undo; by index in the step. Returns what was drawn."""
        drawn: dict[int, list[int]] = {}
        for index, mask in masks.items():
            row = self.rows[output.rows[index]]
            assert row.request is not None
            row.token_ids.pop()
            if mask is None:
                row.num_computed_tokens -= 1
                drawn[index] = []
                continue
            allowed = [token_id for token_id in range(VOCAB_SIZE) if mask[0] >> token_id & 1]
            drawn[index] = [draw(row.hidden, row.request, allowed)]
            row.token_ids += drawn[index]
        return drawn

    def _prepare(self, output: SchedulerOutput) -> None:
        for save in output.saves:
            self._save(save)
        for load in output.loads:
            self._load(load)
        forked = [self.rows[fork.source].copy() for fork in output.row_forks]
        for fork, row in zip(output.row_forks, forked, strict=True):
            row.token_ids[-1] = fork.token_id
            self.rows[fork.target] = row
        for source, target in output.block_copies:
            for buffer in range(self._layout.num_buffers):
                self._pages[buffer, target] = dict(self._pages.get((buffer, source), {}))
            self._checkpoints.pop(target, None)
        for admitted in output.admitted:
            row = self.rows[admitted.row]
            row.request = admitted.request
            row.token_ids, row.num_computed_tokens = list(admitted.token_ids), admitted.num_computed_tokens
            row.drafts = []
            for table, block_ids in zip(row.tables, admitted.block_tables, strict=True):
                table[: len(block_ids)] = block_ids
        for row_index, group, index, block_id in output.new_blocks:
            self.rows[row_index].tables[group][index] = block_id

    def _save(self, save: StateSave) -> None:
        row = self.rows[save.row]
        states = []
        for ring in row.rings:
            position, state = ring[(save.position - 1) % self._ring]
            assert position == save.position, "the row no longer holds what is to be saved"
            states.append(state)
        self._check_states(save.row, save.position, states)
        assert self._layout.checkpoint is not None
        assert len(save.block_ids) == self._layout.checkpoint.num_blocks
        for index, block_id in enumerate(save.block_ids):
            self._checkpoints[block_id] = (index, save.position, states)
            for buffer in range(self._layout.num_buffers):
                self._pages[buffer, block_id] = {}
        self.num_saves += 1

    def _load(self, load: StateLoad) -> None:
        parts = [self._checkpoints[block_id] for block_id in load.block_ids]  # a KeyError: it is overwritten
        assert self._layout.checkpoint is not None
        assert [index for index, _, _ in parts] == list(range(self._layout.checkpoint.num_blocks))
        for _, position, states in parts:
            assert (position, states) == (load.position, parts[0][2]), "a checkpoint is of several states"
        entry = (load.position - 1) % self._ring
        self.rows[load.row].rings = [{entry: (load.position, state)} for state in parts[0][2]]
        self.num_loads += 1

    def _check_states(self, row_index: int, position: int, states: list[int]) -> None:
        """Whether recurrent states are those of exactly the row's first tokens."""
        row = self.rows[row_index]
        assert row.request is not None
        layers = kept(self._specs, tuple(row.token_ids[:position]), salt_of(row.request))
        expected = [
            values[-1] for spec, values in zip(self._specs, layers, strict=False) if isinstance(spec, RecurrentSpec)
        ]
        assert states == expected, "states of other tokens are kept"

    def _recur(self, place: RecurrentPlace, row: DeviceRow, values: Sequence[int]) -> list[int]:
        ring, start = row.rings[place.array], row.num_computed_tokens
        state = ZERO
        if start:
            position, state = ring[(start - 1) % self._ring]
            assert position == start, "a row goes on from the state of another position"
        found = []
        for position, value in enumerate(values, start + 1):
            state = advance(state, value)
            ring[(position - 1) % self._ring] = (position, state)
            found.append(hash((state, value)))
        return found

    def _write(self, place: PagedPlace, row: DeviceRow, values: Sequence[int]) -> None:
        for position, value in enumerate(values, row.num_computed_tokens):
            page, offset = self._slot(place, row, position)
            self._pages.setdefault(page, {})[offset] = value
            self._checkpoints.pop(page[1], None)

    def _attend(self, place: PagedPlace, row: DeviceRow, query_len: int) -> list[int]:
        start, end = row.num_computed_tokens, row.num_computed_tokens + query_len
        spec = self._layout.groups[place.group].spec
        first = spec.first_visible(start)
        seen = list(self._read(place, row, range(first, end)))
        return [
            hash(tuple(seen[spec.first_visible(position) - first : position + 1 - first]))
            for position in range(start, end)
        ]

    def _read(self, place: PagedPlace, row: DeviceRow, positions: range) -> Iterable[int]:
        for position in positions:
            page, offset = self._slot(place, row, position)
            yield self._pages[page][offset]  # a KeyError: KV that was never written

    def _slot(self, place: PagedPlace, row: DeviceRow, position: int) -> tuple[tuple[int, int], int]:
        group, buffer = place
        index, offset = divmod(position, self._layout.groups[group].block_size)
        block_id = row.tables[group][index]
        assert 0 < block_id < STALE, "KV of the null block, or of none, is used"
        return (buffer, block_id), offset

    def _sample(self, row: DeviceRow, hidden: Sequence[int]) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Draw behind the last known token and, as long as draws are what was guessed, behind the drafts."""
        request, num_known = row.request, len(row.token_ids)
        assert request is not None
        drawing = hidden[max(num_known - 1 - row.num_computed_tokens, 0) :]
        if not drawing:
            row.num_computed_tokens += len(hidden)
            return [], None
        row.hidden = drawing[0]
        checked = row.drafts[: len(drawing) - 1]
        for value in drawing:
            row.token_ids.append(draw(value, request))
            if row.token_ids[num_known:] != checked[: len(row.token_ids) - num_known]:
                break
        row.num_computed_tokens = len(row.token_ids) - 1
        row.drafts = guesses(self._specs, request, len(row.token_ids)) if request.max_drafts else []
        tokens = row.token_ids[num_known:]
        if request.num_logprobs < 0:
            return tokens, None
        kept = zip(drawing, tokens, strict=False)
        return tokens, [TokenLogprobs(0.0, 1, candidates(value, request.num_logprobs)) for value, _ in kept]
