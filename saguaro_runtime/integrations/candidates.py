"""A drafter for transformers' own assisted loop: chains, and branches while the target verifies.

    drafter = SaguaroCandidateGenerator(draft, model)
    with drafter.attached():
        model.generate(**inputs, assistant_model=draft)

Their loop verifies, ours drafts ahead meanwhile, in a second process where there is a core for it.
It decodes one sequence at a time; for batches use `Saguaro` as `custom_generate`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers.generation import CandidateGenerator

from saguaro_kernels.distribution import is_within_reference
from saguaro_kernels.errors import ConfigError

from ..build import Built, build_lane
from ..config import EngineConfig
from ..lanes import Lane
from ..models import Model
from ..params import SamplingParams
from ..policy import retry_length
from ..round import Admission, Turn
from .processors import split_processors


class SaguaroCandidateGenerator(CandidateGenerator):
    """Proposes candidates as transformers' assisted loop asks for them; keeps one sequence's keys.

    Args:
        draft: a loaded transformers model or a folder.
        target: the model whose loop it is.
        config: see EngineConfig; `method`, `k`, `branches`, `lane` and what concerns the draft.
        seed: of the drafts; None takes one from torch's generator at each sequence. The loop
            verifies with torch's generator, whatever the seed.
    """

    def __init__(
        self,
        draft: Any,
        target: Any,
        *,
        config: EngineConfig = EngineConfig(),  # noqa: B008
        seed: int | None = None,
    ) -> None:
        if config.method == "ar":
            raise ConfigError("method: got 'ar', want 'sd' or 'ssd': a candidate generator drafts")
        # The loop's own dice decide the extra token: noise-aware predictions would predict nothing.
        self.config = dataclasses.replace(config, rule="token", ranking="probability", max_batch=1)
        self.draft, self.target, self.seed = draft, target, seed
        self.vocab_size: int = target.get_output_embeddings().weight.shape[0]
        self._lane: Lane | None = None
        self._room = 0
        self._held = False
        self._uid = self._number = 0
        self.start(SamplingParams(), self.config.max_tokens - self.config.k - 1)

    def start(self, params: SamplingParams, max_length: int) -> None:
        """The next sequence: how its drafts are sampled, and how long it may become."""
        self.params, self.max_length = params, max_length
        self._text: list[int] = []

    @torch.no_grad()
    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates [1, n + c] for `input_ids` [1, n], and where sampled their logits [1, c, V].

        A sequence's first call has none: the draft prefills while the target does.
        """
        text = input_ids[0].tolist()
        added = len(text) - len(self._text)
        if not self._text or added < 1 or text[: -added or None] != self._text:
            self._admit(text)
            added = 0
        reply = self._chain_after(text, added - 1)
        self._text = text
        count = int(reply.chain.num_draft[0]) if reply else 0
        if reply is None or not count:
            return input_ids, None
        chain = reply.chain
        candidates = torch.cat((input_ids, chain.tokens[:1, :count].to(input_ids)), dim=1)
        if self.params.temperature == 0:
            return candidates, None
        logits = chain.logits[0, :count].float()
        ids = torch.arange(logits.shape[-1])
        kept = is_within_reference(logits, ids, chain.cutoff[0, :count], chain.cutoff_id[0, :count])
        law = (logits / self.params.temperature).masked_fill(~kept, -torch.inf)
        beyond = self.vocab_size - law.shape[-1]
        return candidates, torch.nn.functional.pad(law, (0, beyond), value=-torch.inf)[None]

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Nothing: what was accepted is seen from the next call's ids."""

    @contextlib.contextmanager
    def attached(self) -> Iterator[SaguaroCandidateGenerator]:
        """Inside, assisted generation of the target asks this object, with the call's sampling."""

        def candidate_generator(
            generation_config: Any, logits_processor: Any, **_: Any
        ) -> SaguaroCandidateGenerator:
            # Other processors are the target's alone: without them fewer drafts are accepted.
            sampled = split_processors(logits_processor, generation_config.do_sample)
            seed = int(torch.randint(2**62, (1,))) if self.seed is None else self.seed
            self.start(SamplingParams(seed=seed, **sampled.options), generation_config.max_length)
            return self

        self.target._get_candidate_generator = candidate_generator
        try:
            yield self
        finally:
            del self.target._get_candidate_generator

    def close(self) -> None:
        """End the draft's process. Safe to call twice; a later call starts a new one."""
        lane, self._lane, self._held = self._lane, None, False
        if lane is not None:
            lane.close()

    def _admit(self, text: list[int]) -> None:
        slots = max(self.max_length, len(text)) + self.config.k + 1
        if self._lane is None or slots > self._room:
            self.close()
            self._room = max(slots, self.config.max_tokens)
            config = dataclasses.replace(self.config, max_tokens=self._room)
            model = cast(Model, SimpleNamespace(vocab_size=self.vocab_size))
            built = Built(model, self.target, None, frozenset(), self.max_length)
            self._lane = build_lane(self.draft, built, config)
        assert self._lane is not None
        if self._held:
            self._lane.release([0])
        self._uid, self._held = self._uid + 1, True
        self._lane.admit([Admission(0, text, self.params, slots)])

    def _chain_after(self, text: list[int], accepted: int) -> Lane | None:
        """The lane, whose chain follows `text` now; None where the draft is late or off."""
        assert self._lane is not None
        self._number += 1
        budget = max(0, min(self.config.k, self.max_length - len(text) - 1))
        turn = Turn(
            number=self._number,
            rows=torch.tensor([0]),
            uid=torch.tensor([self._uid]),
            base=torch.tensor([len(text)]),
            last=torch.tensor(text[-1:]),
            accepted=torch.tensor([accepted], dtype=torch.int32),
            budget=torch.tensor([budget], dtype=torch.int32),
            retry=torch.tensor([retry_length(self.config, 1)], dtype=torch.int32),
        )
        return self._lane if self._lane.next_chain(turn) else None
