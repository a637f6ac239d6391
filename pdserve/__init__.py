"""The command: reads a configuration, chooses concrete parts and joins them.

cli             `pdserve`: one command line for every role
configuration/  flags, environment variables and TOML to one frozen `Config`
roles/          from a configuration to a running router or node
local_cluster/  `pdserve up`: a whole cluster on one machine
profiling/      `pdserve profile`: what this machine does with a model, measured
planning/       `pdserve plan`: how many nodes a load wants, and of which role
simulating/     `pdserve simulate`: histories with faults on a simulated cluster
commands/       status and drain: commands that talk to a running router
keys/           certificates, KV keys, Redis users and API keys
checkpoints/    from what `--model` names to a folder on this machine

Nothing is imported here: `__main__` first says where this project's modules are found.
"""
