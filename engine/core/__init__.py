"""Scheduling without I/O: sequences, blocks, plans. No clock, no thread, no framework.

scheduler         the one writer of sequences and blocks: events in, a planned step out
invariants        what always holds between sequences, seats and blocks
holdings          what sequences hold, from the queue to the end: seats and blocks
step_after        a step that the runner begins before the one before it has ended
step_again        a step that is run several times without a plan for each time
tried_plan        the plan that showed that a request can be seated
swapping          copies of preempted sequences' blocks to host memory and back
kept_prefixes     copies of prefixes to host memory, ahead of their eviction, and back for a hit
disk_prefixes     prefixes from host memory to disk, ahead of their eviction there, and back
prefix_transfers  cached prefixes that come from another node, or go there from both memories
planning/         what one step runs
step/             a planned step on its way to the runner and back
statistics        what a scheduler has done, as one immutable value
planner_contract  what the planner reads and the decision it returns
sequences/        sequences from the queue to the end
policies/         reservation and victims, by name
speculation/      drafting without a model, and how many drafts pay
blocks/           blocks of KV, by number
runner_contract   a step as the runner sees it
grammar_statistics  what following grammars took, as one immutable value

Decisions:

Swapped KV is a fallback of the prefix cache. A victim's full blocks stay findable until their room
is needed. Only evicted blocks are copied back from host memory, and blocks that found no place
there are recomputed.

On a device, swapped KV is copied beside the steps, and the scheduler has a state for it. A victim
that is copied out waits in the queue as any victim, but the copy holds its blocks. The planner
counts them as coming: it takes no further victim for what they will cover, sequences that need one
of them stay out of the step (`StopRule.COPYING`), and all others run. A sequence that is copied
back is `SWAPPING_IN`: it has its seat and its blocks, which are accounted like those of a landing,
and decodes when its copy has ended. What a copy reads or writes is released at its end and nowhere
else, also when the sequence has been aborted meanwhile. A copy that fails loses nothing: its
sequence is recomputed. Copies take effect in the order in which they begin, so a sequence can be
copied back after its copy out. The other way, to let the device order the copy before the next
step, would need no state but would stop that step for all sequences, and blocks would have a new
owner before they are read. In host memory (on a CPU) blocks are copied before the step, and none of
this exists.

A prefix in host memory is copied back before a sequence is admitted, not for an admitted one. The
planner admits as if there were no host memory. Where the prompt of an admission goes on there, its
blocks are copied into the pool and the plan is made again: in a step's own copies they are cached
blocks at once, on a device the sequence stays in the queue until its copy has ended
(`StopRule.FETCHING`), for which others may pass it as they pass any blocked one. So a hit is an
ordinary hit of the pool: a handoff, a reservation, a preemption or an abort meanwhile has no state
for it, a copy serves all who begin alike, and one that fails leaves nothing behind but a prompt to
be computed. A sequence that holds its seat while it is copied, as a swapped one does, would need a
way back for every such case. The price is the plan made twice, and the length of the copy in the
queue.

Prefixes are copied out ahead of their eviction, each once after each use. How far ahead follows
from what steps take, while blocks are free too, so the first eviction finds copies: what is copied
early is twice in memory meanwhile, so a fixed distance that bursts need would leave small pools no
gain. A plan that evicts more than that copies it first. What running sequences evict is copied in
their step: no more blocks than they take. An admission that evicts more than a step may copy waits
while copies are made, a few with each step, so nothing else waits for long, and it waits for a
hundredth of the time in which as much is computed. To seat it at once, and to copy a block before a
chunk overwrites it, would save that time, and everything that writes blocks would have to know of
it. A pull waits in the same way before it begins, because its blocks may be written from then on,
and nothing is admitted meanwhile that evicts: prompts that come as fast as blocks are copied would
take what was copied for it. On a device what running sequences evict is copied ahead too: twice as
many blocks as they could take in one step, because a step does not wait for copies. What they evict
beyond that is lost. What was used once is copied too, as far as uses of other blocks pay for it,
and takes at most a tenth of host memory from the rest: what nobody asks for again costs nothing
where nothing is asked for again, and little elsewhere. One that is computed again soon after its
eviction was used twice: turns of conversations are further apart than a pool holds. What is copied
back is evicted from host memory first, since the pool has it, and is copied out again when its turn
comes; so both together hold nearly what one pool of both sizes would. On a device a block that is
copied out keeps its place in the pool's order of eviction. `docs/policies.md` has the figures. Host
memory is one pool with one bound, `swap_space` plus `prefix_host_memory`. A preempted sequence
takes what it needs of it, at the cost of prefixes, because its work is certain to be needed.

What is on disk passes host memory in both directions, so a disk requires `prefix_host_memory`. A
file can be read only into memory that is held for it, however long that takes, and a device copies
from host memory anyway; so the pool, its invariants and its copies have no state for a disk, and
what is read late is still of use. Blocks are written ahead of their eviction from host memory, once
after each use: with a disk smaller than host memory, writing all that it lacks would never end.
What was used once is not written: files are for what has proved itself.
"""
