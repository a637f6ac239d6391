"""Values shared by every role. Standard library only.

ids               incarnations, attempts, request ids
request           what a client asks for, and what a node answers
grammar           a grammar that an answer must follow, as text
token_rules       biases, bad words, allowed tokens and the thinking budget of a request
prompt_logprobs   log probabilities of the tokens of a prompt
nodes             what the cluster knows of a node: its record and its load
measured_profile  the file of `pdserve profile`: what a machine does with a model
wire_types        types of received values, with the limits that decoders check
errors            the typed errors, each with a stable code
version           the version of this package
addresses         host:port, and what is loopback
child_process     how a process starts another, which never outlives it
control_group     what a container's limits leave of memory and cores
long_lived        what lives as long as the process is excluded from garbage collection
model_names       the models that are known by name, and names of a served one
kv/               the KV cache in numbers
settings/         what can be configured
files/            files that more than one process reads or writes
observing/        clocks, logs, latencies, traces
recording/        what a process was told and decided, in a file
"""
