"""An answer in plain words, and as JSON."""

from __future__ import annotations

from common.measured_profile import MEASURED
from pdserve.planning.answer import Candidate, PlannedNodes
from pdserve.planning.search import MOST_LOAD
from pdserve.planning.trial import cause_of_miss
from simulator.served import ServedRequest

STAGES = {
    "place": "places on decode nodes: seats or KV memory are taken (--max-num-seqs, more decode)",
    "prefill queue": "the queue of prompts: nodes that prefill are busy",
    "prefill": "computing prompts: each takes too long by itself, or in steps with others",
    "transfer": "KV on its way: the network between prefill and decode",
    "pause": "pauses in answers: preemption, or long steps of prompts between tokens",
    "decode": "decode steps: too many sequences in one step, or prompts among them",
    "refused": "refused: queues are full",
}
_UNEVEN = 0.3
_SHORT_S = 20.0


def as_text(answer: PlannedNodes) -> str:
    """Return the answer for people."""
    parts = [_load(answer), _verdict(answer), _table(answer), _kind(answer), _limit(answer)]
    parts += [_advice(answer), _notes(answer)]
    return "\n".join(part for part in parts if part) + "\n"


def _load(answer: PlannedNodes) -> str:
    wanted, workload = answer.wanted, answer.wanted.workload
    requests = workload.requests
    prompt = sum(one.num_prompt for one in requests) / len(requests)
    output = sum(one.num_output for one in requests) / len(requests)
    targets = wanted.targets
    return (
        f"Load     {workload.source}: {workload.rate_rps:.3g} requests a second, in the mean "
        f"{prompt:.0f} tokens of prompt and {output:.0f} of answer\n"
        f"Targets  {100 * wanted.attain:g} % of the requests with a TTFT of at most "
        f"{targets.ttft_s * 1e3:g} ms and a TPOT of at most {targets.tpot_s * 1e3:g} ms\n"
        f"Node     {wanted.profile.model} on {wanted.profile.device}\n"
    )


def _verdict(answer: PlannedNodes) -> str:
    best, wanted = answer.best, answer.wanted
    low, high = best.interval
    share = f"{100 * best.attained:.0f} % of the requests are within both targets"
    if wanted.seeds > 1:
        share += (
            f" (90 % interval over {wanted.seeds} seeds: {100 * low:.0f} to {100 * high:.0f} %)"
        )
    if not answer.is_met:
        more = "" if answer.needed is None else f"; {_shown_nodes(answer.needed)} would"
        nodes = _shown_nodes(best.shape.total)
        return f"{nodes} cannot meet the targets: {share} with {best.shape}{more}."
    text = f"{best.shape} meets the targets: {share}."
    if wanted.seeds > 1 and low < wanted.attain:
        text += " The interval reaches below the target: one node more is the safe choice."
    if wanted.num_nodes and answer.needed is not None and answer.needed < best.shape.total:
        text += f" {_shown_nodes(answer.needed).capitalize()} would do."
    return text


def _shown_nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _table(answer: PlannedNodes) -> str:
    lines = [
        "",
        f"{'':12} {'within':>7} {'carries':>8} {'TTFT p50':>9} {'p99':>9} {'TPOT p50':>9} "
        f"{'p99':>8}  busy",
    ]
    lines += [_row(one) for one in (answer.split, answer.mixed) if one is not None]
    return "\n".join([*lines, ""])


def _row(one: Candidate) -> str:
    trial = one.trials[0]
    busy = ", ".join(f"{role.value} {100 * share:.0f} %" for role, share in trial.busy.items())
    carries = _times(one)
    return (
        f"{one.shape!s:12} {100 * one.attained:5.0f} % {carries:>8} "
        f"{trial.ttft_s(50) * 1e3:6.0f} ms {trial.ttft_s(99) * 1e3:6.0f} ms "
        f"{trial.tpot_s(50) * 1e3:6.1f} ms {trial.tpot_s(99) * 1e3:5.1f} ms  {busy}"
    )


def _times(one: Candidate) -> str:
    more = "over " if one.carries * 1.5 > MOST_LOAD else ""
    return f"{more}{one.carries:.2f}x" if one.carries else "none"


def _kind(answer: PlannedNodes) -> str:
    best, split = answer.best, answer.split
    if split is None:
        return "Mixed: a single node has to prefill and decode."
    names = ("Disaggregated", "mixed") if best is split else ("Mixed", "disaggregated")
    if not best.carries:
        return f"Neither carries this load; {names[0].lower()} comes nearer."
    if answer.is_alike:
        return (
            f"Disaggregated or mixed makes no difference here: both carry about "
            f"{_times(best)} this load within the targets. Mixed is the simpler one."
        )
    if not answer.margin:
        return (
            f"{names[0]}: it carries {_times(best)} this load within the targets, and as many "
            f"{names[1]} nodes do not meet the targets at any load that was tried."
        )
    return (
        f"{names[0]}: it carries {_times(best)} this load within the targets, {answer.margin:.2f} "
        f"times what as many {names[1]} nodes carry."
    )


def _limit(answer: PlannedNodes) -> str:
    if not answer.gives_way:
        return "Nothing gives way at a quarter more than that."
    total = sum(count for _, count in answer.gives_way)
    stage, count = answer.gives_way[0]
    return (
        f"As load grows, this gives way first: {STAGES[stage]}. "
        f"({100 * count / total:.0f} % of the misses at a quarter more load.)"
    )


def _advice(answer: PlannedNodes) -> str:
    advised = answer.advised
    if not advised.gains:
        return "No setting that was tried helps under more load."
    gains = ", ".join(f"{flag} (+{100 * gain:.0f} % within)" for flag, gain in advised.gains)
    carries = f"{advised.carries:.2f}x" if advised.carries else "not even"
    text = f"Worth changing: {gains}; together they carry {carries} this load"
    if advised.num_nodes and advised.num_nodes < answer.best.shape.total:
        text += f", and {_shown_nodes(advised.num_nodes)} would do"
    return text + "."


def notes_of(answer: PlannedNodes) -> list[str]:
    """Return what a reader has to know to believe the figures."""
    wanted, notes = answer.wanted, list[str]()
    workload, profile = wanted.workload, wanted.profile
    if profile.source != MEASURED:
        notes.append(f"The profile is no measurement. {profile.source}")
    uneven = getattr(profile.step, "unevenness", 0.0)
    if uneven > _UNEVEN:
        notes.append(
            f"The profile was measured beside other work: a step took {100 * uneven:.0f} % longer "
            "than one with more to do. Measure again on a machine that does nothing else."
        )
    if wanted.at_once:
        notes.append(
            f"All nodes share one machine: steps of more than {wanted.at_once} at once take longer."
        )
    if workload.is_sampled and workload.lengths is None:
        notes.append(
            f"Sampled: each trial serves {workload.num_in_window} of {len(workload.requests)} "
            "requests in a row, the busiest part first; caches are empty at its beginning."
        )
    span_s = workload.num_in_window / workload.rate_rps
    if span_s < _SHORT_S:
        notes.append(
            f"A trial has {span_s:.1f} s of arrivals: queues that grow for longer are not seen. "
            "More --requests make it longer."
        )
    if workload.num_too_long:
        notes.append(
            f"{workload.num_too_long} requests are left out: they do not fit a node "
            f"(prompt and answer together)."
        )
    if not any(one.hash_ids for one in workload.requests):
        notes.append("Prompts have nothing in common: no prefix is found in a cache.")
    return notes


def _notes(answer: PlannedNodes) -> str:
    return "".join(f"\nNote: {note}" for note in notes_of(answer))


def story_of(served: ServedRequest, number: int, answer: PlannedNodes) -> str:
    """Return what happened to one request on the cluster that was found."""
    trace = served.client.trace
    lines = [
        "",
        f"Request {number} on {answer.best.shape}: {trace.num_prompt} tokens of prompt, "
        f"{trace.num_output} of answer",
    ]
    began_s = served.arrived_at_s
    lines += [f"  {(at_s - began_s) * 1e3:9.1f} ms  {what}" for at_s, what in served.story or ()]
    tpot_s = served.tpot_s
    tpot = "" if tpot_s is None else f", TPOT {tpot_s * 1e3:.1f} ms"
    cause = cause_of_miss(served, answer.wanted.targets, served.last_at_s)
    met = "within both targets" if cause is None else f"missed: {STAGES[cause]}"
    lines.append(f"  TTFT {served.ttft_s * 1e3:.1f} ms{tpot}: {met}")
    return "\n".join(lines) + "\n"


def as_json(answer: PlannedNodes) -> dict[str, object]:
    """Return the answer for programs. Times in seconds."""
    wanted, workload = answer.wanted, answer.wanted.workload
    best = answer.best
    return {
        "meets": answer.is_met,
        "nodes": _shape(best),
        "kind": "disaggregated" if best is answer.split else "mixed",
        "margin": round(answer.margin, 3),
        "needed_nodes": answer.needed,
        "attain": wanted.attain,
        "ttft_target_s": wanted.targets.ttft_s,
        "tpot_target_s": wanted.targets.tpot_s,
        "rate_rps": round(workload.rate_rps, 4),
        "requests_in_trial": workload.num_in_window,
        "requests": len(workload.requests),
        "too_long": workload.num_too_long,
        "model": wanted.profile.model,
        "device": wanted.profile.device,
        "split": None if answer.split is None else _candidate(answer.split),
        "mixed": _candidate(answer.mixed),
        "gives_way": dict(answer.gives_way),
        "advice": {flag: round(gain, 4) for flag, gain in answer.advised.gains},
        "advised_carries": round(answer.advised.carries, 3),
        "advised_nodes": answer.advised.num_nodes or None,
        "trials": answer.num_trials,
        "notes": notes_of(answer),
    }


def _shape(one: Candidate) -> dict[str, int]:
    shape = one.shape
    return {"prefill": shape.prefill, "decode": shape.decode, "mixed": shape.mixed}


def _candidate(one: Candidate) -> dict[str, object]:
    trial = one.trials[0]
    return {
        "nodes": _shape(one),
        "attained": round(one.attained, 4),
        "interval": [round(end, 4) for end in one.interval],
        "carries": round(one.carries, 3),
        "ttft_s": {"p50": round(trial.ttft_s(50), 6), "p99": round(trial.ttft_s(99), 6)},
        "tpot_s": {"p50": round(trial.tpot_s(50), 6), "p99": round(trial.tpot_s(99), 6)},
        "busy": {role.value: round(share, 4) for role, share in trial.busy.items()},
        "failed": trial.num_failed,
    }
