"""What can be configured.

setting            how a setting declares its choices, bounds and unit
config             all sections, and the rules between them
api_config         the section of the router's API
handoff_config     the section of KV between nodes
scaling_config     the section of roles that follow the load
scheduling_config  the sections of scheduling and speculation
tracing_config     the section of tracing, and of recordings
redis_url          the address of the placement store: its forms and parts

Decisions:

A setting is one declaration. Its default, help text, unit and choices or bounds are declared in
`common/settings/config.py`. The flag, the environment variable, the TOML key, `--help`, the example
file and the error message are derived from it. All violated rules are reported together, each with
the source of its value, so a wrong configuration is corrected in one pass.
"""
