"""Scheduling policies: frozen values and pure functions, chosen by name.

reservation         blocks kept back for outputs: the contract, and the policies by name
reserve             what a policy keeps back in one step, as candidates are tried
fixed_blocks        the same number of blocks for every sequence
ratio_reservations  a share of the remaining outputs, per sequence or for all together
new_token_ratio     that share, adapted to what happens
learned_outputs     the largest use of blocks to come, by the lengths of past outputs
output_history      the lengths of past outputs
growth              blocks that a sequence is expected to need beyond those it holds
victims             which sequence is preempted first, and how many blocks are freed at once
"""
