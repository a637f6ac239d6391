"""How much of a handoff overlaps with the prefill: `python -m bench.handoff --json`.

A prefill node's process (its step loop, scheduler, flow and connector, without gRPC) computes
prompts of 2,048 tokens in chunks of 512 and hands them to a decode node's process (its connector
and pool), one at a time, for each transport (zmq, shm) with two layouts:

    demo           the demo model, computed by the real engine
    demo_int8      the same with --kv-cache-dtype int8; only where --layout asks for it
    synthetic_8b   36 layers, 8 KV heads of 128, bfloat16 (302 MB a prompt); the compute sleeps,
                   layer by layer, at --tokens-per-s

The default pace, 4,000 tokens a second, is what 24 GB inference GPUs of some 120 dense bfloat16
TFLOPS reach with an 8B model: 2 x 8e9 operations a token at half of the peak. A prompt takes 0.5 s
then, and its KV needs 590 MB/s of the wire.

    hidden_share           bytes that the receiver had acknowledged when the prefill ended, by all
    exposed_ms_p50, _p99   from the end of the prefill (the sender's `commit`) to COMMITTED
    exposed_over_ttft      all exposed time by all time to first token (prompt in to token 0 out)
    cpu_s_per_gb_sender    CPU seconds spent on the transfer per 1e9 bytes. demo: connector and
                           socket threads, and the step thread inside the connector's methods;
                           synthetic_8b: the whole process, since its compute sleeps
    cpu_s_per_gb_receiver  the same of the decode node's process, all of it

`beside_slow_nodes` are those of synthetic_8b while the prefill node also sends to --slow-nodes
decode nodes that take a frame a second over zmq; they say nothing of the CPU time of one node.

The figures of each layout stand under zmq.demo, zmq.synthetic_8b and so on; those directly under a
transport are the worse of the two. Both processes share this machine's cores with the compute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from bench.command import flags_of, print_figures
from bench.handoff.decode_end import DecodeEnd
from bench.handoff.figures import Handoff, figures, worst_of
from bench.handoff.prefill_end import CHUNK_TOKENS, PROMPT_TOKENS, Case, Prefilled, PrefillEnd
from bench.handoff.slow_nodes import SlowNodes
from bench.remote import Remote

TRANSPORTS = ("zmq", "shm")
LAYOUTS = ("demo", "synthetic_8b")
MORE_LAYOUTS = ("demo_int8",)
_NUM_WARM_UPS = 2


def measure(case: Case, num_handoffs: int, num_slow: int = 0) -> list[Handoff]:
    """Measure prompts one after another, of which the first few are not counted.

    Meanwhile the prefill node sends to `num_slow` slow nodes too.
    """
    handoffs = []
    with (
        closing(Remote(PrefillEnd, case)) as prefill,
        closing(Remote(DecodeEnd, case, prefill.call("layout"))) as decode,
        closing(Remote(SlowNodes, case, prefill.call("layout"), num_slow)) as slow,
    ):
        prefill.call("burden", slow.call("reserve"))
        for number in range(_NUM_WARM_UPS + num_handoffs):
            done: Prefilled = prefill.call("prefill", decode.call("reserve", number), number)
            handoffs.append(_handoff(case, done, decode.call("wait_landed")))
    return handoffs[_NUM_WARM_UPS:]


def _handoff(case: Case, done: Prefilled, receiver_cpu_s: float) -> Handoff:
    if done.timing.lane != case.transport:
        raise RuntimeError(f"KV went over {done.timing.lane}, wanted {case.transport}")
    return Handoff(
        num_bytes=done.timing.num_bytes,
        hidden_bytes=done.timing.bytes_hidden,
        exposed_s=done.timing.exposed_s,
        ttft_s=done.ttft_s,
        sender_cpu_s=done.cpu_s,
        receiver_cpu_s=receiver_cpu_s,
    )


def run(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Return the figures of everything that was asked for."""
    result: dict[str, dict[str, object]] = {}
    for transport in options.transport or TRANSPORTS:
        layouts = {}
        for layout in options.layout or LAYOUTS:
            print(f"{transport}: {layout}", file=sys.stderr)
            case = Case(
                layout=layout,
                transport=transport,
                tokens_per_s=options.tokens_per_s,
                kv_verify=options.kv_verify,
            )
            layouts[layout] = figures(measure(case, options.handoffs))
            if layout == "synthetic_8b" and options.slow_nodes:
                print(f"{transport}: beside slow nodes", file=sys.stderr)
                beside = figures(measure(case, options.handoffs, options.slow_nodes))
                result[transport] = {"beside_slow_nodes": beside}
        result[transport] = {**worst_of(layouts), **layouts, **result.get(transport, {})}
    result["settings"] = {
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "synthetic_tokens_per_s": options.tokens_per_s,
        "kv_verify": options.kv_verify,
        "slow_nodes": options.slow_nodes,
    }
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print one JSON line last."""
    parser = flags_of("bench.handoff", __doc__)
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: both")
    parser.add_argument(
        "--layout", action="append", choices=(*LAYOUTS, *MORE_LAYOUTS),
        help=f"default: {' and '.join(LAYOUTS)}",
    )  # fmt: skip
    parser.add_argument("--handoffs", type=int, default=16, help="counted prompts of each case")
    parser.add_argument(
        "--tokens-per-s", type=float, default=4000.0, help="pace of the synthetic compute"
    )
    parser.add_argument("--kv-verify", default="auto", help="auto, off, commit or block")
    parser.add_argument(
        "--slow-nodes", type=int, default=0, help="measure beside so many too (default: 0)"
    )
    options = parser.parse_args(arguments)
    if options.handoffs < 1 or options.tokens_per_s <= 0:
        parser.error("wanted at least 1 handoff and a pace above 0")
    print_figures(run(options), is_one_line=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
