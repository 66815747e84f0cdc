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
from typing import Any

import torch
from transformers.generation import CandidateGenerator

from saguaro_kernels.distribution import is_within_reference

from ..config import EngineConfig
from ..params import SamplingParams
from .processors import split_processors
from .texts import TextDrafter


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
        self.config, self.target, self.seed = dataclasses.replace(config, max_batch=1), target, seed
        self.vocab_size: int = target.get_output_embeddings().weight.shape[0]
        self._draft = draft
        self._drafter: TextDrafter | None = None
        self.start(SamplingParams(), self.config.max_tokens - self.config.k - 1)

    def start(self, params: SamplingParams, max_length: int) -> None:
        """Sequences that begin from now on: how drafts are sampled, how long they may become."""
        tokens = max(self.config.max_tokens, max_length + self.config.k + 1)
        if self._drafter is None or tokens > self._drafter.config.max_tokens:
            self.close()
            self._drafter = TextDrafter(
                self._draft,
                vocab_size=self.vocab_size,
                config=dataclasses.replace(self.config, max_tokens=tokens),
                max_length=max_length,
                target=self.target,
            )
        self._drafter.begin(params, max_length)

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates [1, n + c] for `input_ids` [1, n], and where sampled their logits [1, c, V].

        A sequence's first call has none: the draft prefills while the target does.
        """
        assert self._drafter is not None
        [row] = self._drafter.chains([input_ids[0].tolist()])
        if row is None:
            return input_ids, None
        chain = self._drafter.lane.chain
        count = int(chain.num_draft[row])
        candidates = torch.cat((input_ids, chain.tokens[row, None, :count].to(input_ids)), dim=1)
        temperature = self._drafter.params.temperature
        if temperature == 0:
            return candidates, None
        logits = chain.logits[row, :count].float()
        cutoffs = chain.cutoff[row, :count], chain.cutoff_id[row, :count]
        kept = is_within_reference(logits, torch.arange(logits.shape[-1]), *cutoffs)
        law = (logits / temperature).masked_fill(~kept, -torch.inf)
        if chain.vocab_map is not None:
            column = chain.vocab_map.long()
            law = law[:, column.clamp(min=0)].masked_fill(column < 0, -torch.inf)
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
        """End the draft's process. Safe to call twice."""
        drafter, self._drafter = self._drafter, None
        if drafter is not None:
            drafter.close()
