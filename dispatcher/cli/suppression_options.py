"""The arguments and options of `dispatcher suppressions`."""

from __future__ import annotations

from typing import Any, Final

import click

from dispatcher.cli.filter_options import DEFAULT_TENANT
from dispatcher.cli.output import counted
from dispatcher.domain.email_rules import tenant
from dispatcher.domain.suppression import Recipient, SuppressionReason
from dispatcher.errors import InvalidEmail


class RecipientText(click.ParamType[Recipient]):
    """An address or a domain."""

    name = "recipient"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Recipient:
        """The recipient; a usage error if the value is neither an address nor a domain."""
        try:
            return value if isinstance(value, Recipient) else Recipient.parse(str(value))
        except InvalidEmail as error:
            self.fail(f"{value!r} {error.reason}.", param, ctx)


class TenantText(click.ParamType[str]):
    """A tenant's id."""

    name = "tenant"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The id, unchanged."""
        try:
            return tenant(value)
        except InvalidEmail as error:
            self.fail(f"{error.reason}.", param, ctx)


tenant_option: Final = click.option(
    "--tenant",
    "tenant_id",
    type=TenantText(),
    default=DEFAULT_TENANT,
    show_default=True,
    metavar="ID",
    help="The tenant. Each tenant has its own suppressed recipients.",
)
kind_option: Final = click.option(
    "--kind",
    type=click.Choice([reason.value for reason in SuppressionReason]),
    default=SuppressionReason.MANUAL.value,
    show_default=True,
    help="The kind of the new entries: why the recipients get no email.",
)
recipients_argument: Final = click.argument(
    "recipients", metavar="ADDRESS|DOMAIN...", nargs=-1, required=True, type=RecipientText()
)


def already(count: int) -> str:
    """The end of a sentence: how many recipients were already suppressed. Only a full stop if there are none."""
    return f"; {counted(count, 'recipient')} already suppressed for at least as long." if count else "."
