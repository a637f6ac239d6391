"""What one step runs: a pure function of sequences, queue, blocks and policy.

planner         the function: each sequence is given tokens, and waiting ones are admitted; the
                chunks of running prompts
step_budget     tokens, blocks, seats and work of prompts that are left in one step
decode_plan     the decoding sequences of a step, and which are preempted
admission_plan  which waiting sequences are admitted
plan_ahead      a plan made while the step before runs, and whether it can be taken
going_on        the step after, which a runner begins before the one before it has ended
forecast        what the state will be when that step has ended

Decisions:

Victims are chosen before decodes are planned. All block needs are summed first. If they do not fit,
sequences are preempted until they do, with headroom. A plan therefore never has to be undone, and
no step both plans and preempts a sequence. The one exception: a prefill of a higher priority
(`--enable-priority-scheduling`) may preempt a decode that was already planned, and the budget of
that decode is returned.

A step is planned while the one before it runs, and nothing is taken for it. On a GPU a step runs on
a thread of its own. When that thread has queued the step's work (`on_queued`; earlier, two threads
would compete for the interpreter), the step thread reports the tokens of the step before and plans
the next step from a forecast (`engine/core/planning/forecast.py`): every sequence that draws has
one more token, of unknown value, and a sequence that ends by its length has left. The plan is only
a decision. When the step has ended, its results are recorded, messages and deadlines are handled,
and then the plan takes seats and blocks, without the sequences that have ended. So there is nothing
to undo, no block has two owners, and no sequence computes a token that its answer does not have.
Input tokens are read from the seats when the step begins, so they and the history of penalties are
those of a plan made later. Where the forecast says nothing certain (drafts, a failed step,
preemption) or something new could be planned (an arrival, a landing, a longer prefix), the plan is
forgotten and made again: `pdserve_plans_ahead_total` counts both. The price is that a seat freed by
an end token is given away one step later.

Where the runner can, the next step also begins before the tokens of the last one are known
(`going_on`): a GPU would idle while they are read, recorded and sent back, 0.3 to 0.5 ms of a step
of 6 ms. Only a step that any plan would contain begins so: one more token of everyone who runs. The
scheduler takes it as it is, so the card's step and the plan cannot differ, and there is still
nothing to undo. It costs a row for each sequence that a token ends, and one step more for an
arrival.

Where drafts are verified, the next step is planned after them. How many tokens such a step draws is
known at its end, and the drafter reads them. A plan for the longest outcome would preempt sequences
and refuse requests for tokens that are never drawn, so its decisions would differ from those made
later, and a plan for a shorter outcome lacks blocks. Only the decision could be hidden: 0.5 ms of a
step of 256 sequences on 2 cores of a Xeon, while finding the drafts (0.2 ms), taking the plan (0.1
ms) and recording the results (0.5 ms) wait for the tokens in any case. Batches so wide rarely
draft, because drafts do not pay there. Therefore a plan is made ahead whenever the running step has
no drafts, with any method. The drafter looks first when that step has ended: if it finds a draft
that pays, the plan is made again, with the drafts.

A step that was begun is not planned again, so drafts that are found by then wait for it. Therefore
a node that drafts goes on only when it has found none for a while (`step_after`): where a load does
not draft, it waits for the host no more than a node that never drafts.

A preempted sequence returns only with headroom for itself and all decoding sequences; otherwise it
would be preempted again immediately. A resumed sequence is spared while it has drawn fewer than
`min_progress_tokens`, if another victim exists.
"""
