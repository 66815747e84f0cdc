"""A decode loop of your own with speculative speculative decoding; saguaro_kernels and torch alone.

    python examples/embed_in_your_engine.py

The models are tables of logits, [V, V]: what comes after each token. Where `target(...)` and
`draft(...)` stand, your engine has its forwards; in it, the lines under "ahead" run on another
stream or device while the target verifies. No call waits for the device until the text is read.
"""

import torch

from saguaro_kernels import (
    Draft,
    Keys,
    Sampling,
    SpeculationCache,
    predict_outcomes,
    saguaro_sample,
    verify,
)

B, V, K, M = 3, 97, 3, 8  # requests, vocabulary, drafts per round, branches per request
ROUNDS = 40


def models(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tables that mostly agree."""
    generator = torch.Generator().manual_seed(0)
    target = 2.5 * torch.randn(V, V, generator=generator)
    draft = target + 0.8 * torch.randn(V, V, generator=generator)
    return target.to(device), draft.to(device)


def draft_chains(
    draft: torch.Tensor, last: torch.Tensor, sampling: Sampling, keys: Keys
) -> dict[str, torch.Tensor]:
    """A chain of K tokens after each of `last` [R], and what `verify` must know of it."""
    tokens, logq, rows = [], [], []
    for step in range(K):
        logits = draft[last]  # your draft's forward
        sample = saguaro_sample(logits, sampling, keys, offset=step)
        last = sample.tokens
        tokens.append(last)
        logq.append(sample.logq)
        rows.append(logits)
    rows.append(draft[last])  # what the draft predicts after the whole chain
    return {
        "tokens": torch.stack(tokens, 1),
        "logq": torch.stack(logq, 1),
        "logits": torch.stack(rows, 1),
    }


def decode(temperature: torch.Tensor, seed: torch.Tensor) -> dict[str, torch.Tensor]:
    """New tokens of B requests, PAD where a round had fewer: [B, ROUNDS * (K + 1)]; and hits."""
    device = temperature.device
    target, draft = models(device)
    sampling = Sampling(temperature)
    branch_sampling = Sampling(temperature.repeat_interleave(M))
    request = torch.arange(B, device=device)
    num_draft = torch.full((B,), K, dtype=torch.int32, device=device)
    slots = torch.arange(B * M, dtype=torch.int32, device=device)
    cache = SpeculationCache(2 * B * M, B * M, device)
    # Committed so far: one token, at position 0. The base is their number.
    last, base = request + 1, torch.ones(B, dtype=torch.int64, device=device)
    accepted = torch.full((B,), -1, dtype=torch.int32, device=device)
    prepared: dict[str, torch.Tensor] = {}
    before, text, hits = base, [], []
    for number in range(ROUNDS):
        # The outcome of the last round is (accepted, last): was its chain prepared?
        chain = draft_chains(draft, last, sampling, Keys(seed, base))
        if prepared:
            found = cache.lookup(request, number - 1, before, accepted, last)
            slot = found.slot.clamp(min=0).to(torch.int64)
            hits.append(found.hit)
            for name, fresh in chain.items():  # your engine drafts again only the rows that missed
                hit = found.hit.view(-1, *[1] * (fresh.dim() - 1))
                chain[name] = torch.where(hit, prepared[name][slot], fresh)

        # Ahead: which outcomes will this round have, and a chain for each of them.
        outcomes = predict_outcomes(
            chain["logits"], chain["tokens"], num_draft, sampling, Keys(seed, base), branches=M
        )
        branch_base = (base[:, None] + outcomes.depth + 1).flatten()
        prepared = draft_chains(
            draft,
            outcomes.tokens.clamp(min=0).flatten(),
            branch_sampling,
            Keys(seed.repeat_interleave(M), branch_base),
        )
        cache.insert(
            request.repeat_interleave(M),
            number,
            base.repeat_interleave(M),
            outcomes.depth.flatten(),
            outcomes.tokens.flatten(),
            slots,
        )

        # Meanwhile: the target's forward over [last, d_1 .. d_K], and the verdict.
        logits = target[torch.cat((last[:, None], chain["tokens"]), 1)]
        proposed = Draft(
            chain["tokens"], num_draft, chain["logits"][:, :K], chain["logq"], sampling=sampling
        )
        verdict = verify(logits, proposed, sampling, Keys(seed, base), rule="block")

        text.append(verdict.tokens)
        accepted, before = verdict.num_accepted, base
        last = verdict.tokens.gather(1, accepted[:, None].to(torch.int64))[:, 0]
        base = base + accepted + 1
    return {"tokens": torch.cat(text, 1), "hits": torch.stack(hits)}


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    temperature = torch.tensor([0.0, 0.7, 1.0], device=device)  # greedy and sampled, in one batch
    result = decode(temperature, torch.tensor([1, 2, 3], device=device))
    count = (result["tokens"] >= 0).sum(1)
    for row in range(B):
        print(
            f"T = {temperature[row]:.1f}: {count[row] / ROUNDS:.2f} tokens per round, "
            f"hit rate {result['hits'][:, row].float().mean():.2f}"
        )
    # A greedy request has the target's own greedy text, whatever was drafted.
    target, last = models(device)[0], 1
    for token in result["tokens"][0][result["tokens"][0] >= 0].tolist():
        last = int(target[last].argmax())
        assert token == last
    print("the greedy text is the target's own")


if __name__ == "__main__":
    main()
