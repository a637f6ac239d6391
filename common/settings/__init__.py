"""What can be configured.

setting            how a setting declares its choices, bounds and unit
config             all sections, and the rules between them
api_config         the section of the router's API
scheduling_config  the sections of scheduling and speculation
tracing_config     the section of tracing
redis_url          the address of the placement store: its forms and parts
"""
