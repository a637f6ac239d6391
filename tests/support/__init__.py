"""No tests: what tests of several folders use. A helper of one folder lies beside its tests.

attacks/          what outsiders try on ports, files and processes
clocks/           time that tests move, and waits with a deadline
cluster/          clusters of real processes
disk/             disks for prefixes, and file systems that fail
engine/           engines without a model
grammars/         grammars that are hostile or slow, and schemas
http/             the HTTP edge without a cluster behind it
kv/               connectors, lanes, networks in memory, and proxies
models/           small models, and runners on them
nodes/            one node in the process of the test
observing/        what a process shows of itself
stores/           placement stores, real and in memory
browser           a headless Chromium
commands          programs with a time limit, for tests of `compose/` and the chart
compiled_kernels  compiles the kernels before tests run
examples          how many examples a test tries
key_folders       folders of keys, and certificates that something is wrong with
templates         processes that are forked for roles, of which a run has one of each kind
tiny_kin          tiny configurations of kin of Llama and Qwen
told_reports      what a process of a run tells the first one of its tests
whole_files       which process of a run takes which files, and when it collects their tests
"""
