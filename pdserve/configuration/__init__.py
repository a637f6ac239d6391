"""From flags, environment variables and a TOML file to one frozen `Config`.

options         the table of settings, made from the dataclasses of `common.settings.config`
option_values   text and TOML values to settings and back
flags           the flags of every command; parser: what reads them, and their help in parts
plan_flags      those of `plan` that are no settings
other_words     what other servers call these settings and commands
help_text       what `--help` prints
config_file     the TOML file
exposure        what a process must have before other machines can reach it
config_sources  the three sources joined, every error at once with its origin
shown_config    the effective configuration as TOML
"""
