"""Scheduling policies: frozen values and pure functions, chosen by name.

reservation         blocks kept back for outputs: the contract, and the policies by name
fixed_blocks        the same number of blocks for every sequence
ratio_reservations  a share of the remaining outputs, per sequence or for all together
new_token_ratio     that share, adapted to what happens
growth              blocks that a sequence is expected to need beyond those it holds
victims             which sequence is preempted first, and how many blocks are freed at once
"""
