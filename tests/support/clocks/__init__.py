"""Time in tests: clocks that a test moves, waits with a deadline, costs that no load changes.

lines_run         a cost that no load changes: lines of Python that run
manual_clock      a clock that moves only when it is told to
patience          roles for which a process that stands still for some seconds is no news
stall_free_clock  a clock that does not count stalls of the machine, and how long a call took by it
stopped_time      an event loop's time that a test moves
waiting           wait for a condition, with a deadline
"""
