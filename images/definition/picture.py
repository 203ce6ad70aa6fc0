"""Draw the graph of layers and roles, as text and as SVG. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from images.definition.load import active_chain
from images.definition.spec import BuildChoice, Definition

WIDTH, HEIGHT, GAP_X, GAP_Y = 170, 34, 36, 14


@dataclass(frozen=True, slots=True)
class TreeNode:
    name: str
    role: bool
    note: str
    below: tuple[TreeNode, ...]


def tree(definition: Definition, choice: BuildChoice) -> TreeNode:
    """Return the first layer with everything built on it in this build."""
    children: dict[str, set[str]] = {}
    used: set[str] = set()
    tops = [role.layer for role in definition.roles.values()]
    while tops:
        stacked = active_chain(definition, tops.pop(), choice)
        for lower, upper in pairwise(stacked):
            children.setdefault(lower.name, set()).add(upper.name)
        for layer in stacked:
            if layer.name not in used:
                used.add(layer.name)
                tops += [artifact.layer for artifact in layer.artifacts.of(choice)]
    roles: dict[str, list[str]] = {}
    for role in definition.roles.values():
        stacked = active_chain(definition, role.layer, choice)
        if stacked:
            roles.setdefault(stacked[-1].name, []).append(role.name)

    def node(name: str) -> TreeNode:
        layer = definition.layers[name]
        notes = [f"provides {', '.join(provided)}"] if (provided := layer.provides.of(choice)) else []
        notes += [f"takes {a.to} from {a.layer}" for a in layer.artifacts.of(choice)]
        below = [node(child) for child in sorted(children.get(name, ()))]
        below += [TreeNode(role, True, definition.roles[role].describe, ()) for role in sorted(roles.get(name, ()))]
        return TreeNode(name, False, "; ".join(notes), tuple(below))

    first = next(name for name in used if name == active_chain(definition, name, choice)[0].name)
    return node(first)


def text(node: TreeNode, lead: str = "", branch: str = "") -> Iterator[str]:
    name = f"[{node.name}]" if node.role else node.name
    yield f"{lead}{branch}{name}" + (f"  ({node.note})" if node.note else "")
    inner = lead + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    for index, child in enumerate(node.below):
        yield from text(child, inner, "└─ " if index == len(node.below) - 1 else "├─ ")


def svg(root: TreeNode) -> str:
    """Draw the graph from left to right, one row for each leaf."""
    shapes: list[str] = []
    rows = place(root, 0, 0, shapes)
    width = (depth(root)) * (WIDTH + GAP_X) + GAP_X
    height = rows * (HEIGHT + GAP_Y) + GAP_Y
    style = (
        "text{font:13px sans-serif;text-anchor:middle;dominant-baseline:central}"
        "rect{fill:#eef;stroke:#446}.role rect{fill:#efe;stroke:#464}path{fill:none;stroke:#889}"
    )
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f"<style>{style}</style>\n{body}\n</svg>\n"
    )


def depth(node: TreeNode) -> int:
    return 1 + max((depth(child) for child in node.below), default=0)


def place(node: TreeNode, column: int, row: int, shapes: list[str]) -> int:
    """Draw a node and its children from `row` on; return the number of rows used."""
    taken = 0
    x, y = corner(column, row)
    for child in node.below:
        child_x, child_y = corner(column + 1, row + taken)
        middle = x + WIDTH + GAP_X / 2
        shapes.append(
            f'<path d="M{x + WIDTH},{y + HEIGHT / 2} C{middle},{y + HEIGHT / 2} {middle},{child_y + HEIGHT / 2}'
            f' {child_x},{child_y + HEIGHT / 2}"/>'
        )
        taken += place(child, column + 1, row + taken, shapes)
    shapes.append(
        f'<g class="{"role" if node.role else "layer"}"><title>{escape(node.note)}</title>'
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT / 2}">{escape(node.name)}</text></g>'
    )
    return max(taken, 1)


def corner(column: int, row: int) -> tuple[int, int]:
    return GAP_X + column * (WIDTH + GAP_X), GAP_Y + row * (HEIGHT + GAP_Y)
