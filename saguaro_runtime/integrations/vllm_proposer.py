"""vLLM's custom proposer over our drafter; see the module `vllm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saguaro_kernels.errors import ConfigError

from ..config import EngineConfig
from .texts import TextDrafter


class SaguaroProposer:
    """vLLM's `custom_class` proposer: a draft model that drafts ahead while vLLM verifies.

    The draft runs in a process of its own on this machine's CPUs. vLLM judges such drafts as
    certain proposals, so they are the draft's greedy ones. `additional_config["saguaro"]` has
    `draft`, the path of the model, and options of EngineConfig.
    """

    def __init__(self, vllm_config: Any) -> None:
        options = dict((vllm_config.additional_config or {}).get("saguaro", {}))
        self._path = options.pop("draft", None)
        if self._path is None:
            raise ConfigError('additional_config: want {"saguaro": {"draft": PATH}}')
        model = vllm_config.model_config
        self.config = EngineConfig(
            k=vllm_config.speculative_config.num_speculative_tokens,
            max_batch=options.pop("max_batch", vllm_config.scheduler_config.max_num_seqs),
            **options,
        )
        self._max_length, self._vocab_size = model.max_model_len, model.get_vocab_size()
        self._drafter: TextDrafter | None = None

    def load_model(self, *_: Any) -> None:
        """Start the draft; vLLM calls it once with its own model, which is not needed."""
        if self._drafter is None:
            self._drafter = TextDrafter(
                self._path,
                vocab_size=self._vocab_size,
                config=self.config,
                max_length=self._max_length,
            )

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts per request of the batch; none where nothing was sampled or its text is new.

        Args:
            sampled_token_ids: what the last step sampled per request; empty inside a prefill.
            num_tokens_no_spec, token_ids_cpu: arrays by batch row: a text's length, its ids.
            slot_mappings: not needed.
        """
        self.load_model()
        assert self._drafter is not None
        asked = [
            row
            for row, sampled in enumerate(sampled_token_ids)
            if len(sampled) and int(num_tokens_no_spec[row]) < self._max_length
        ]
        texts = [token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist() for row in asked]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        found = self._drafter.chains(texts)
        chain = self._drafter.lane.chain
        for row, draft_row in zip(asked, found, strict=True):
            if draft_row is not None:
                drafts[row] = chain.tokens[draft_row, : int(chain.num_draft[draft_row])].tolist()
        return drafts

    def close(self) -> None:
        """End the draft's process. Safe to call twice."""
        if self._drafter is not None:
            self._drafter.close()
            self._drafter = None
