"""The text of `--help`, and its layout."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping

from common.settings.setting import joined_by_or
from pdserve.configuration.option_values import shown_value
from pdserve.configuration.options import SECTIONS, Option, Value

INTRODUCTION = "Serve large language models with prefill and decode on different nodes."

_SOURCES = """\
Every setting is also a variable and a key of the TOML file: --max-num-seqs 8,
PDSERVE_MAX_NUM_SEQS=8, or max_num_seqs = 8 under [engine]. A flag wins over
the variable, the variable over the file, the file over the default.
"""

EXAMPLES = {
    "pdserve": """\
examples:
  pdserve up                     a router, a prefill and a decode node on this machine
  pdserve status                 what runs, and how busy it is
  pdserve chat                   talk to it
  pdserve COMMAND --help         one command, and the groups of its settings
""",
    "serve": f"""\
{_SOURCES}
examples:
  pdserve serve --role router  --model ./SmolLM2     with Redis, on one machine
  pdserve serve --role prefill --model ./SmolLM2
  pdserve serve --role decode  --model ./SmolLM2
  pdserve serve --role decode  --model ./SmolLM2 --host 10.0.0.3 \\
    --keys ./keys/node --redis-url rediss://10.0.0.1
  pdserve serve --role mixed --config pdserve.toml --kv-cache-memory 8GiB
""",
    "up": f"""\
{_SOURCES}
examples:
  pdserve up                                  the demo model
  pdserve up --model ./SmolLM2 --port 9000    your own model
  pdserve up --prefill 2 --decode 1           more nodes
  pdserve up --mixed 1                        one node that prefills and decodes
""",
    "profile": """\
Loads the model as a node does, and measures for about a minute, after the
model is loaded and its kernels are compiled: steps by rows and context,
by chunk and context, steps that verify drafts, and KV transfers by size.
Nothing else should run on this machine meanwhile.

examples:
  pdserve profile smollm2.json --model ./SmolLM2
  pdserve profile demo.json --model demo --speculative-method ngram
""",
    "plan": """\
Tries clusters on a virtual clock, with the router and the schedulers that serve
and the step times of a profile, and prints the one with the fewest nodes that
meets the targets: how many prefill and decode nodes, or mixed ones, what gives
way first, and which settings help. It takes some minutes and one core, and
needs no model, no GPU and no network. docs/planning.md has the details.

Exit code 0: planned (also where --nodes are too few). Exit code 1: no number of
nodes meets the targets. Exit code 2: a flag or a file is wrong.

examples:
  pdserve plan --rate 5 --lengths 2000:200 --ttft 500 --tpot 30
  pdserve plan --trace conversations.jsonl --ttft 2000 --tpot 50 --page plan.html
  pdserve plan --trace router.log --profile mine.json --ttft 1000 --tpot 80 --nodes 4
""",
    "status": """\
examples:
  pdserve status
  pdserve status --url http://10.0.0.1:8000
  pdserve status --watch --api-key-file keys/client/admin.key
  pdserve status --wide                       versions, addresses, memory, scheduling, drafts
""",
    "chat": """\
The conversation is kept until /exit or Ctrl-D. Ctrl-C stops an answer; what was
received of it stays in the conversation. Through a pipe, all of the input is
one message, and the output is the answer alone.

examples:
  pdserve chat
  pdserve chat --url http://10.0.0.1:8000 --api-key-file keys/client/api.key
  echo "What is a KV cache?" | pdserve chat
""",
    "drain": """\
The node takes no new requests from now on. Its running requests have the
node's drain_timeout_s to end; then other nodes continue them, and clients
see a pause and no error. Then the node exits with code 0; a node that runs
with --stay-drained leaves the cluster, and its process stays. A router with
API keys requires an administrator's key. A second `pdserve drain` changes
nothing.

Exit code 0: the node was asked to drain (with --wait: it has left).
Exit code 1: there is no such node or no router, the router refused, or the
node is still listed 20 s after its drain_timeout_s.
Exit code 2: a flag or the key file is wrong.
Exit code 130: Ctrl-C ended the waiting; the draining continues.

examples:
  pdserve drain decode-2 --wait
  pdserve drain prefill-1 --url http://10.0.0.1:8000 --api-key-file keys/client/admin.key
""",
    "role": """\
The node takes new work of another role from now on: prefill, decode or mixed.
It finishes the requests that it has; none is refused or restarted. Every
router reads the new role from the placement store. The role lasts until the
node ends: a restart begins with the role of its settings. A router with API
keys requires an administrator's key. Asking for the role that the node has
changes nothing.

Exit code 0: the node has the role.
Exit code 1: there is no such node or no router, the router refused, the node
cannot take this role with its settings, it is draining, or it is the last one
that decodes.
Exit code 2: a flag or the key file is wrong.

examples:
  pdserve role prefill-2 decode
  pdserve role decode-1 mixed --url http://10.0.0.1:8000 --api-key-file keys/client/admin.key
""",
    "check-config": f"""\
{_SOURCES}
Run it where the role will run, as the same user: it also checks that the model,
keys and folders can be read and that the sizes fit this machine. It opens no
connection, and does not fetch a model that is given by name.

Exit code 0: the configuration can start. Exit code 1 or 2: it cannot.

examples:
  pdserve check-config --role decode --config pdserve.toml
""",
    "api-keys": """\
Routers read the file again when it changes: a change takes effect within a
second, without a restart. The file holds hashes, so a key is shown only when
it is made. Requests in progress continue when their key is revoked.

examples:
  pdserve api-keys add router/api_keys.json alice --requests-per-minute 60
  pdserve api-keys add router/api_keys.json operator --admin
  pdserve api-keys revoke router/api_keys.json alice
  pdserve api-keys list router/api_keys.json
""",
    "keys": """\
Start each process with --keys and its own subfolder. Then gRPC, KV and Redis
are encrypted and closed to others, the router requires an API key, and the
metrics require a token. SECURITY.md has the details.

examples:
  pdserve keys init ./keys
  pdserve serve --role router --model ./SmolLM2 --host 10.0.0.2 \\
    --keys ./keys/router --redis-url rediss://10.0.0.1
  pdserve serve --role decode --model ./SmolLM2 --host 10.0.0.4 \\
    --keys ./keys/node --redis-url rediss://10.0.0.1
  pdserve keys renew ./keys node
""",
    "simulate": """\
A history is a cluster, its requests and its faults, drawn from a seed. The
router, the nodes' scheduler and the transfers of KV are the code that serves,
on a virtual clock; processes, networks, clocks and the store fail. Every step is
checked for blocks that leak or are used twice, and the end of a history for
requests that did not end exactly once, with the right answer.
docs/simulation.md says what is modelled.

With --replay, FILE is such a history, or a recording that a router or a node
has written (serve --record DIR). The recorded inputs are given to the same code
again, and its decisions are compared with the recorded ones: the first
difference shows a bug, or what a change of the code has changed.

Exit code 0: no history was wrong, no decision differed. Exit code 1: one was
or did; it is printed, a history shortened and with the file that runs it again.
Exit code 2: a flag or the file is wrong.

examples:
  pdserve simulate --seed 1 --histories 1000
  pdserve simulate --faults crash,partition --nodes 2:2 --requests 40
  pdserve simulate --replay wrong-history.json
  pdserve simulate --replay recordings/router-1.jsonl
""",
    "kv-key": """\
Every prefill and decode node requires the same file. Keep it secret: everybody
who reads it can read and write the KV of the cluster. It protects KV alone, so
a node that listens beyond loopback still requires --insecure. The keys of
`pdserve keys init` protect all ports.

examples:
  pdserve kv-key pdserve-kv.key
  pdserve serve --role decode --model ./SmolLM2 --kv-key pdserve-kv.key \\
    --host 10.0.0.3 --redis-url redis://10.0.0.1/0 --insecure
""",
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Lays out a flag and its help on one line, at most as wide as the terminal and 100."""

    def __init__(self, prog: str) -> None:
        width = min(100, max(60, shutil.get_terminal_size().columns - 2))
        super().__init__(prog, max_help_position=34, width=width)

    def _format_usage(self, usage, actions, groups, prefix):  # type: ignore[no-untyped-def]
        """Return one line that does not list every flag."""
        if any(action.metavar == "COMMAND" for action in actions):
            return f"usage: {self._prog} COMMAND [flags]\n\n"
        values = "".join(f" {action.metavar}" for action in actions if not action.option_strings)
        return f"usage: {self._prog}{values} [flags]\n\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Show that the part of a help may be left out, and is written after `=`."""
        if action.option_strings[:1] == ["-h"] and action.nargs == "?":
            return f"-h, --help[={action.metavar}]"
        return super()._format_action_invocation(action)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Show a value without brackets: it is optional only to the parser."""
        if action.nargs == "?":
            return str(action.metavar or default_metavar)
        return super()._format_args(action, default_metavar)


def group_list(counts: Mapping[str, int]) -> str:
    """Return how to see each group of settings, with the number of its flags."""
    lines = [
        f"  --help={name:<12}  {_meaning(name)} ({count})"
        for name, count in counts.items()
        if count
    ]
    return "\n".join(["all settings:", *lines, "  --help=all           everything"])


def section_title(section: str) -> str:
    """Return the section's name and the first line of its docstring."""
    return f"{section}: {_meaning(section)}"


def _meaning(section: str) -> str:
    line = (SECTIONS[section].__doc__ or "").partition("\n")[0].rstrip(".")
    return f"{line[:1].lower()}{line[1:]}"


def option_help(option: Option, default: Value) -> str:
    """Return the help of one setting with its default, for argparse."""
    default_text = f"default: {shown_value(option, default)}" if default != "" else ""
    return described(option, default_text).replace("%", "%%")


def described(option: Option, default_text: str = "") -> str:
    """Return what a setting means, which values it may have, and what special values do."""
    declared = option.declared
    text = ": ".join(filter(None, (declared.help, joined_by_or(declared.one_of))))
    notes = "; ".join(filter(None, (declared.bounds, declared.note, default_text)))
    return f"{text} ({notes})" if notes else text
