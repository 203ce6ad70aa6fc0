"""Error handling of `minivm`: a sentence and an exit code; for an unknown name, the nearest known one."""

from __future__ import annotations

import sys
from typing import Any

import click

from init.errors import ConfigError, InitError, ManyErrors, nearest


class Group(click.Group):
    """The one place where ordinary errors become a line and an exit code."""

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(context, args[0]) is None:
            hint = nearest(args[0], self.list_commands(context))
            raise click.UsageError(f"no command {args[0]!r} ({hint})", context)
        return super().resolve_command(context, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (ConfigError, ManyErrors) as error:
            click.echo(f"minivm: {error}", err=True)
            sys.exit(78)
        except InitError as error:
            click.echo(f"minivm: {error}", err=True)
            sys.exit(1)
        except EOFError as error:
            click.echo(f"minivm: {error}", err=True)
            sys.exit(1)
        except (KeyboardInterrupt, BrokenPipeError):
            sys.exit(130)
