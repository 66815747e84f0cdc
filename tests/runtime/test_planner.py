"""The planner's closed forms against exact values, the simulation and the published rates."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace

import pytest
import scripts
import virtual

from saguaro_kernels.errors import ConfigError
from saguaro_runtime.planner import (
    Deployment,
    MissLaw,
    accept_lengths,
    acceptance_for,
    cli,
    crossover_batch,
    expected_tokens,
    fan_out,
    fast_rate,
    hit_rate,
    measured,
    plan,
    published,
    roofline,
    sd_speed,
    simulate,
    ssd_bound,
    ssd_vs_sd,
    theorem7,
)
from saguaro_runtime.planner.search import best_sd, evaluate, interpolate
from saguaro_runtime.scheduler import Scheduler


def test_tokens_per_round() -> None:
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.5, 2) == 1.75
    lengths = accept_lengths(0.7, 4)
    assert sum(lengths) == pytest.approx(1.0)
    assert sum((j + 1) * p for j, p in enumerate(lengths)) == pytest.approx(expected_tokens(0.7, 4))
    assert acceptance_for(expected_tokens(0.83, 6), 6) == pytest.approx(0.83)


def test_theorem7_at_its_corners() -> None:
    # Every round hits and drafting is hidden: the tokens per round, nothing else.
    assert theorem7(1.0, 4.5, 1.0, 0.9, 2.0) == 4.5
    assert theorem7(1.0, 4.5, 1.0, 1.5, 2.0) == 3.0
    # Every round misses and redrafts: that is standard SD.
    assert theorem7(0.0, 9.0, 4.5, 0.9, 0.8) == pytest.approx(sd_speed(4.5, 0.8))
    # Every round misses and nobody drafts: that is AR.
    assert theorem7(0.0, 9.0, 1.0, 0.9, 0.0) == 1.0
    assert theorem7(0.5, 4.0, 2.0, 1.2, 0.3) == pytest.approx(3.0 / 1.25)


def test_ssd_over_sd_from_measured_times() -> None:
    times = dict(verify_seconds=0.02, draft_seconds=0.01, redraft_seconds=0.01)
    tokens = dict(tokens_sd=4.0, tokens_hit=4.0, tokens_miss=4.0)
    assert ssd_vs_sd(**times, tree_round_seconds=0.015, hit_rate=1.0, **tokens) == pytest.approx(
        ssd_bound(0.5)
    )
    assert ssd_vs_sd(**times, tree_round_seconds=0.015, hit_rate=0.0, **tokens) == pytest.approx(1)
    # A hit round of 25 ms, a miss round of 30 ms, against SD's 30 ms.
    assert ssd_vs_sd(**times, tree_round_seconds=0.025, hit_rate=0.5, **tokens) == pytest.approx(
        30 / 27.5
    )


@pytest.mark.parametrize(
    ("fallback", "retry", "tree_s"), [("batched_retry", 4, 0.01), ("partial_accept", 0, 0.03)]
)
def test_theorem7_with_all_that_a_round_pays_is_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, fallback: str, retry: int, tree_s: float
) -> None:
    """On a clock where a prompt, a commit and drafting ahead too long take their time: as published
    the theorem is wrong by more than 5 %."""
    clock, law = virtual.Clock(monkeypatch), scripts.random_law(8, seed=1)
    near, commit = scripts.random_law(8, seed=2, near=law), Scheduler.commit

    def slowly(self, *rest):
        clock.advance(0.02)
        return commit(self, *rest)

    monkeypatch.setattr(Scheduler, "commit", slowly)
    stats, seconds = {}, {}
    for method in ("sd", "ssd"):
        clock.now = 0.0
        target = scripts.model(law, 1, extend_s=0.1, prefill_s=0.05)
        draft = scripts.model(near, 1, extend_s=0.02, tree_s=tree_s)
        config = {"k": 4, "branches": 10, "fallback": fallback, "policy": "fixed"}
        config |= {"method": method, "proposal": "none", "max_batch": 1}
        with virtual.engine(clock, target, draft, **config) as engine:
            engine.generate([[1, 2] * 4] * 2, [scripts.sampled(s, 60) for s in range(2)])
            stats[method], seconds[method] = engine.stats(), clock.now
    sd, ssd = stats["sd"], stats["ssd"]
    assert (sd["tokens"], sd["t_host_ms"]) == (120, pytest.approx(20))
    assert ssd["t_overrun_ms"] == pytest.approx(1e3 * max(0.02 + 4 * tree_s - 0.1, 0))
    taken, options = seconds["sd"] / seconds["ssd"], {"k": 4, "batch": 1, "retry": retry}
    assert measured.in_full(sd, ssd, **options) == pytest.approx(taken, rel=0.02)
    assert abs(measured.raw(sd, ssd, **options) / taken - 1) > 0.05


def test_fan_out_follows_theorem_12() -> None:
    lengths = accept_lengths(0.8, 4)
    counts = fan_out(lengths, 0.5, 24)
    assert sum(counts) == 24
    # Optimal for the hit rate: no branch moved from one length to another improves it.
    miss = MissLaw(0.4, 0.5)
    best = hit_rate(lengths, counts, miss)
    for source in range(5):
        for target in range(5):
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            if min(moved) >= 0:
                assert hit_rate(lengths, moved, miss) <= best + 2e-3
    uniform = hit_rate(lengths, [5, 5, 5, 5, 4], miss)
    assert best > uniform
    assert fan_out([1.0], 0.5, 7) == [7]
    assert fan_out(lengths, 1.0, 1).count(1) == 1


def test_miss_law_is_fitted_back() -> None:
    law = MissLaw(0.3, 0.7)
    fans = [1, 2, 4, 8, 16]
    fitted = MissLaw.fit(fans, [law(f) for f in fans])
    assert fitted.scale == pytest.approx(0.3)
    assert fitted.exponent == pytest.approx(0.7)
    assert law(0) == 1.0
    with pytest.raises(ConfigError, match="fan_outs"):
        MissLaw.fit([2, 2], [0.1, 0.2])


@pytest.mark.parametrize("p", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("draft_round", [0.4, 1.3])
@pytest.mark.parametrize(("k_miss", "redraft"), [(6, 0.8), (2, 0.3)])
def test_simulation_agrees_with_theorem7(p, draft_round, k_miss, redraft) -> None:
    simulated = simulate(
        15000,
        acceptance=0.8,
        k=6,
        hit_rate=p,
        draft_round=draft_round,
        redraft=redraft,
        k_miss=k_miss,
        seed=3,
    )
    predicted = theorem7(
        p, expected_tokens(0.8, 6), expected_tokens(0.8, k_miss), draft_round, redraft
    )
    assert simulated.speed_vs_ar == pytest.approx(predicted, rel=0.02)
    assert simulated.hit_rate == pytest.approx(p, abs=0.015)


def test_simulation_agrees_with_the_search_in_a_batch() -> None:
    deployment = Deployment(
        acceptance=0.8, miss=MissLaw(0.2, 0.5), verify_seconds=1.0,
        step_seconds=lambda rows: 0.1, batch=4, handoff_seconds=0.02,
    )  # fmt: skip
    for redraft_tokens in (0, 3):
        speed, p, draft_round, _ = evaluate(deployment, 5, 12, redraft_tokens)
        simulated = simulate(
            8000,
            acceptance=0.8,
            k=5,
            hit_rate=p,
            draft_round=draft_round,
            redraft=redraft_tokens * 0.1,
            k_miss=redraft_tokens,
            hit_rate_after_fast=1.0 - deployment.miss(12),
            batch=4,
            fallback="wait" if redraft_tokens else "fast",
            handoff=0.02,
        )
        assert simulated.speed_vs_ar == pytest.approx(speed, rel=0.02)


def test_devices_are_never_busier_than_time() -> None:
    for fallback in ("wait", "fast"):
        run = simulate(
            500, acceptance=0.7, k=4, hit_rate=0.6, draft_round=1.4, redraft=0.5,
            batch=3, fallback=fallback, handoff=0.1,
        )  # fmt: skip
        assert 0.0 < run.target_busy <= 1.0
        assert 0.0 < run.draft_busy <= 1.0


def test_crossover_is_where_the_simulated_policies_cross() -> None:
    p, p_fast, x, k, a = 0.8, 0.97, 0.5, 5, 0.8
    tokens = expected_tokens(a, k)
    crossing = crossover_batch(p, p_fast, x, tokens, tokens)
    assert 1.0 < crossing < 8.0
    below, above = math.floor(crossing), math.ceil(crossing)

    def speed(batch: int, fallback: str) -> float:
        return simulate(
            12000, acceptance=a, k=k, hit_rate=p, draft_round=0.9, redraft=x,
            hit_rate_after_fast=p_fast, batch=batch, fallback=fallback,
        ).speed_vs_ar  # fmt: skip

    assert speed(max(1, below - 1), "wait") > speed(max(1, below - 1), "fast")
    assert speed(above + 1, "fast") > speed(above + 1, "wait")


def test_crossover_at_its_corners() -> None:
    # A redraft that takes no time is always worth it; one that gains nothing never is.
    assert crossover_batch(0.8, 1.0, 0.0, 4.0, 4.0) == math.inf
    assert crossover_batch(0.8, 1.0, 0.5, 4.0, 1.0) == 0.0
    assert crossover_batch(0.2, 0.3, 0.01, 4.0, 4.0) == math.inf
    # p_F = 1, E_f = 1: K = 0 wins at batch 1 from K*T_D > (E - 1) / (E + 1 - p) on.
    threshold = (4.0 - 1.0) / (4.0 + 1.0 - 0.8)
    assert crossover_batch(0.8, 1.0, threshold * 1.02, 4.0, 4.0) < 1.0
    assert crossover_batch(0.8, 1.0, threshold * 0.98, 4.0, 4.0) > 1.0
    assert fast_rate(1.0, 0.0, 4.0, 1.0) == 4.0
    assert fast_rate(0.0, 0.0, 4.0, 1.0) == 1.0


def test_the_published_rates_are_reproduced() -> None:
    rows = published.reproduce()
    assert [(row.method, row.published) for row in rows] == [
        *(("AR", 54.7), ("SD", 161.8), ("SSD", 255.8)),
        *(("AR", 88.8), ("SD", 136.8), ("SSD", 203.8)),
    ]
    for row in rows:
        assert abs(row.error) < 0.10, row
    gains = list(published.batch_trend().values())
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 0
    assert "assumed" in published.render()


def test_the_plan_is_the_best_of_its_neighbours_and_falls_back() -> None:
    deployment = Deployment(0.8, MissLaw(0.2, 0.5), 0.02, interpolate({20: 0.003, 80: 0.006}))
    best = plan(deployment)
    for k in (best.k - 1, best.k + 1):
        assert evaluate(deployment, k, best.branches, best.redraft_tokens)[0] <= best.speed_vs_ar
    assert best.speed_vs_sd > 1.0
    assert sum(best.fan_out) == best.branches
    more = plan(Deployment(0.8, MissLaw(0.2, 0.5), 0.02, deployment.step_seconds, drafters=4))
    assert more.speed_vs_ar >= best.speed_vs_ar
    assert more.per_device_vs_sd < best.per_device_vs_sd
    # A drafter as slow as the target and never right: plain decoding.
    hopeless = plan(Deployment(0.05, MissLaw(1.0, 0.0), 0.02, lambda rows: 0.02))
    assert hopeless.speed_vs_ar <= 1.0
    assert hopeless.sd_k == 0


def test_what_every_round_costs_favours_those_that_give_more() -> None:
    free = Deployment(0.6, MissLaw(0.2, 0.5), 0.02, interpolate({20: 0.003, 80: 0.006}))
    dear = replace(free, round_seconds=0.02)
    # k = 3, redraft 0: all rounds take a verification (0.0123 of drafting ahead fits) and 0.02.
    tokens = evaluate(free, 3, 8, 0)[0]
    assert evaluate(dear, 3, 8, 0)[0] == pytest.approx(tokens)
    # A redraft, and SD's drafting, weigh less in longer rounds.
    assert evaluate(dear, 3, 8, 3)[0] > evaluate(free, 3, 8, 3)[0]
    step = free.step_seconds(1)
    assert best_sd(dear, [4])[0] == pytest.approx(
        expected_tokens(0.6, 4) * 0.04 / (0.04 + 4 * step)
    )
    assert plan(dear).tokens_per_second < plan(free).tokens_per_second


def test_below_the_fewest_rows_times_follow_their_slope() -> None:
    affine = interpolate({12: 0.05 + 0.012, 8: 0.05 + 0.008, 20: 0.05 + 0.020})
    assert [affine(rows) for rows in (1, 4)] == pytest.approx([0.051, 0.054])
    # n rows never take less than n/m of what m take, and never more.
    assert interpolate({8: 0.05, 12: 0.10})(4) == pytest.approx(0.025)
    assert interpolate({8: 0.05, 12: 0.02})(1) == 0.05
    assert interpolate({8: 0.05})(1) == pytest.approx(0.05)
    assert all(0 < interpolate({8: 0.05, 12: 0.10})(n) <= 0.05 for n in range(1, 8))


def test_roofline_is_bound_by_bytes_then_by_flops() -> None:
    model, machine = roofline.MODELS["llama-3.1-70b"], roofline.MACHINES["h100"]
    one = roofline.forward_seconds(model, machine, 1)
    assert roofline.forward_seconds(model, machine, 8) == one
    assert roofline.forward_seconds(model, machine, 4096) > 5 * one
    assert roofline.forward_seconds(model, machine, 1, tp=4) < one / 2
    assert roofline.forward_seconds(model, machine, 1, context=100_000) > one


def _plan_command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_command_prints_plans_and_plots(tmp_path, capsys) -> None:
    measured = ("--verify-ms", "18.3", "--step-ms", "21=3.0,84=4.1", "--max-k", "6")
    image = tmp_path / "plan.png"
    assert cli.run(_plan_command(*measured, "--batch", "4", "--plot", str(image))) == 0
    assert "against SD" in capsys.readouterr().out
    assert image.read_bytes().startswith(b"\x89PNG")
    assert cli.run(_plan_command(*measured, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["k"] <= 6
    assert cli.run(_plan_command("--published")) == 0
    assert "203.8" in capsys.readouterr().out
    sizes = ("--target", "llama-3.1-70b", "--draft", "1.2e9:16:8:64", "--max-k", "4")
    assert cli.run(_plan_command(*sizes)) == 0


def test_the_roofline_takes_a_machine_of_ones_own(capsys) -> None:
    sizes = ("--target", "70e9:80:8:128", "--draft", "1.2e9:16:8:64", "--tp", "4")

    def planned(*arguments: str) -> dict:
        assert cli.run(_plan_command(*sizes, *arguments, "--max-k", "4", "--json")) == 0
        return json.loads(capsys.readouterr().out)

    h100 = planned()
    assert planned("--bandwidth", "3350", "--tflops", "989", "--link-us", "10") == h100
    # Slower memory, fewer bytes, a slow link: each moves the prediction its own way.
    assert planned("--bandwidth", "2000")["tokens_per_second"] < h100["tokens_per_second"]
    assert planned("--dtype", "fp8")["tokens_per_second"] > h100["tokens_per_second"]
    assert planned("--link-us", "4000")["tokens_per_second"] < h100["tokens_per_second"]
    # So few FLOP/s that every drafted token costs a verification its time.
    assert planned("--tflops", "2", "--batch", "32")["k"] < h100["k"]
    assert cli.run(_plan_command(*sizes, "--drafters", "2")) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("T_V", "T_tree", "hand-off 0.01 ms", "2 drafter"))


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--target", "llama-3.1-70b", "--draft", "llama-3.2-1b", "--bandwidth", "-1"),
        ("--target", "llama-3.1-70b", "--draft", "llama-3.2-1b", "--link-us", "-1"),
        ("--verify-ms", "3"),
        ("--verify-ms", "3", "--step-ms", "fast"),
        ("--verify-ms", "3", "--step-ms", "1", "--miss", "0.2"),
        ("--verify-ms", "0", "--step-ms", "1"),
        ("--target", "gpt", "--draft", "llama-3.2-1b"),
        ("--verify-ms", "3", "--step-ms", "1", "--acceptance", "1.2"),
    ],
)
def test_wrong_options_are_named(arguments) -> None:
    with pytest.raises(ConfigError):
        cli.run(_plan_command(*arguments))


def test_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError, match="hit_rate"):
        theorem7(1.1, 4, 4, 1, 1)
    with pytest.raises(ConfigError, match="draft_round"):
        theorem7(0.5, 4, 4, -1, 1)
    with pytest.raises(ConfigError, match="branches"):
        fan_out([0.5, 0.5], 0.5, 0)
    with pytest.raises(ConfigError, match="verify_seconds"):
        ssd_vs_sd(
            verify_seconds=0, draft_seconds=1, tree_round_seconds=1, redraft_seconds=1,
            hit_rate=0.5, tokens_sd=2, tokens_hit=2, tokens_miss=2,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="fallback"):
        simulate(1, acceptance=0.5, k=1, hit_rate=0.5, draft_round=1, fallback="none")
