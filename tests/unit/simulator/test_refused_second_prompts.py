"""The simulated router passes on to its flows what is said of their second attempts."""

from __future__ import annotations

from common.errors import Overloaded
from common.ids import AttemptId, Incarnation
from common.request import GenerationRequest, SamplingParams
from kv_transfer.contract import Ticket
from node.flow.messages import CallRefused, Message, PromptAccepted, Reserved, Submit
from simulator.timeline import Timeline
from tests.simulation.flow_router import FlowRouter

D = Incarnation("d", 1)
P, Q = Incarnation("p", 1), Incarnation("q", 1)


def test_a_prompt_of_a_second_attempt_that_is_refused_is_asked_elsewhere() -> None:
    # The refusal was taken for that of a reservation, which the flow does not await: it was lost.
    sent: list[tuple[Incarnation, Submit]] = []

    def send(node: Incarnation, message: Message) -> None:
        if isinstance(message, Submit):
            sent.append((node, message))

    timeline = Timeline()
    router = FlowRouter(Incarnation("r", 1), send, decoders=[D], prefillers=[P, Q], clock=timeline)

    def reserved() -> Reserved:
        return Reserved(
            Ticket(
                attempt=sent[-1][1].request.id,
                decode_node=D,
                kv_endpoint="d",
                lease_token=len(sent),
                generation=1,
                target_block_ids=(0,),
                num_cached_tokens=0,
                fingerprint="f",
                lease_s=30.0,
            )
        )

    request = GenerationRequest(
        id=AttemptId("c", 1),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=4),
        deadline_s=60.0,
    )
    router.ask(request)
    router.on_reply(D, sent[-1][1].reply_to, reserved())
    router.on_reply(P, sent[-1][1].reply_to, PromptAccepted())
    router.on_node_suspected(P, is_heard=False)
    router.on_reply(D, sent[-1][1].reply_to, reserved())
    assert [(node, one.request.id.attempt) for node, one in sent] == [
        (D, 1),
        (P, 1),
        (D, 2),
        (Q, 2),
    ]
    router.on_reply(Q, sent[-1][1].reply_to, CallRefused(Overloaded("full")))
    node, again = sent[-1]
    assert (node, again.request.id.attempt) == (D, 3)
    assert again.must_prefill_locally
