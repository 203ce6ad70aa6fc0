"""Paths that several parts of init name. Text, because PID 1 goes without pathlib."""

PLAN = "/etc/minivm/plan.json"
SOCKET = "/run/minivm/control.sock"
REFUSED = "refused: "  # a line of the drop-ins' reader about a file that it left out
