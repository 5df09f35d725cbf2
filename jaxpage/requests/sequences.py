"""From a message to the requests that the scheduler runs: one per sequence of `n`, or one per beam of a search."""

from collections.abc import Sequence

from jaxpage.kv_cache.hashing import ExtraKeys
from jaxpage.requests.beam_group import BeamGroup
from jaxpage.requests.beam_search import BeamSearch
from jaxpage.requests.request import Request
from jaxpage.sampling_params import nth_seed
from jaxpage.wire import AddRequest, sequence_id


def sequences_of(
    message: AddRequest,
    *,
    arrival: int,
    eos_token_ids: Sequence[int],
    max_drafts: int,
    processors: Sequence[str],
    weights: int = 0,
) -> list[Request]:
    """The requests that a message asks for, the one to queue first: the others fork from it or are in its group.

    `arrival` counts messages, `max_drafts` is the engine's own limit, and `processors` names its logits processors;
    `weights` counts how often the engine's weights have been replaced.
    """
    params, beam = message.params, message.beam
    eos = () if params.ignore_eos else eos_token_ids
    stop_token_ids = frozenset((*params.stop_token_ids, *eos))
    search = None if beam is None else BeamSearch(beam, stop_token_ids)
    num_logprobs = -1 if params.logprobs is None else max(params.logprobs, 0)
    # The host has a say in each token, or looks at all of the vocabulary behind it.
    is_speculated = beam is None and params.structured_outputs is None and params.logprobs != -1
    sequences = [
        Request(
            request_id=sequence_id(message.request_id, index),
            prompt_token_ids=message.prompt_token_ids,
            params=params,
            seed=nth_seed(message.seed, index),
            max_tokens=message.max_tokens,
            max_drafts=max_drafts if is_speculated else 0,
            stop_token_ids=stop_token_ids,
            arrival=arrival,
            index=index,
            priority=message.priority,
            num_logprobs=num_logprobs if search is None else search.num_candidates,
            num_prompt_logprobs=None if index else params.prompt_logprobs,
            bad_words=message.bad_words,
            pooling=message.pooling,
            own_processors=sum(1 << processors.index(name) for name in set(params.logits_processors)),
            extra_keys=ExtraKeys(message.cache_salt, weights=weights) if message.cache_salt or weights else None,
        )
        for index in range(params.n if beam is None else beam.beam_width)
    ]
    if search is not None:
        BeamGroup(search, sequences)
        return sequences
    first, *others = sequences
    for other in others:
        other.prefix = first
    first.forks = others
    return sequences
