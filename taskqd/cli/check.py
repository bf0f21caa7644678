"""``taskqd check FILE``: everything that can be known about a workgroup without starting it."""

from __future__ import annotations

import asyncio

import click

from taskqd.supervisor.consult import consult_alone
from taskqd.supervisor.plan import ChildSpec


@click.command()
@click.argument("file", metavar="FILE")
def command(file: str) -> int:
    """Validate a workgroup file: its keys, every setting, and that the actors import.

    Starts nothing and does not touch the database. Exits 0 when all is well, 78 with every problem when not.
    """
    plan, warnings = asyncio.run(consult_alone([file, "--for", "check"]))
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    processes = sum(child.replicas for child in plan.children)
    click.echo(f"ok: workgroup {plan.group!r}, {processes} processes")
    for child in plan.children:
        click.echo(f"  {_describe(child)}")
    required, grace = plan.budget["required"], plan.grace
    click.echo(f"  up to {required} database connections; stops within {grace:g} s")
    return 0


def _describe(child: ChildSpec) -> str:
    graces = f"{child.graces.cancellation:g} s to finish, {child.graces.cleanup:g} s to clean up"
    return f"{child.name} × {child.replicas}: taskqd {' '.join(child.arguments)} ({graces})"
