"""The files of the project."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")
# What is built, downloaded or somebody's own. In a git worktree `.git` is a file.
IGNORED = re.compile(r"\.git|\.venv|\.\w+_cache|\.hypothesis|__pycache__|build|dist|.+\.egg-info")


@cache
def all_files() -> tuple[Path, ...]:
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if not IGNORED.fullmatch(name))
        found += [Path(folder) / name for name in sorted(files) if not IGNORED.fullmatch(name)]
    return tuple(found)


def python_files() -> list[Path]:
    return [p for p in all_files() if p.suffix == ".py" and not p.name.endswith(GENERATED)]


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source, which is parsed once for all tests of a process."""
    return ast.parse(source)


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Return all nodes of a source, outer ones first, without contexts as `ast.Load`.

    They are found once for all tests of a process.
    """
    found = [tree]
    for node in found:
        for value in vars(node).values():
            if isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                found.append(value)
            elif isinstance(value, list):
                found += [one for one in value if isinstance(one, ast.AST)]
    return found


@cache
def blocks(tree: ast.Module) -> list[ast.AST]:
    """Return the nodes of a source that have a body of statements, the module among them.

    No expression has one, so that few of all nodes are looked at.
    """
    found: list[ast.AST] = []
    ahead: list[ast.AST] = [tree]
    while ahead:
        node = ahead.pop()
        if isinstance(getattr(node, "body", None), list):
            found.append(node)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            ahead += inner if isinstance(inner, list) else ()
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
