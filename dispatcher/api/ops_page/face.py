"""Derives the forms of the operators' page from actions (see `dispatcher.actions`). `actions.html` renders them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from types import ModuleType
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.action import Action, Mistakes, Reach, label, path_of, read
from dispatcher.actions.runner import Who, run
from dispatcher.api.ops_page.fields import Mistake, all_tenants_only, parameter
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor


def pages(subject: ModuleType) -> Callable[[Site], list[Route]]:
    """The function `routes` of a subject's own page: its list and the forms of its other actions."""
    actions: tuple[type[Action[Any]], ...] = subject.ACTIONS
    listing, path = actions[0], f"/{actions[0].subject()}"

    def routes(site: Site) -> list[Route]:
        async def render(
            request: Request, visitor: Visitor, *, form: Form | None = None, mistake: Mistake | None = None
        ) -> Response:
            if listing.reach is Reach.ALL_TENANTS:
                all_tenants_only(visitor)
            async with site.session() as session:
                rows = await run(session, listing(), Who(visitor.name, visitor.tenant_id))
            return await site.page(
                request,
                visitor,
                "action_list.html",
                status=200 if mistake is None else 400,
                heading=listing.subject().capitalize(),
                about=(subject.__doc__ or "").split("\n\n"),
                actions_of=actions,
                rows=rows,
                given=form or {},
                mistake=mistake,
                done=done(request, actions),
            )

        return [site.get(path, render), *forms(site, actions, render, path)]

    return routes


class Page(Protocol):
    """Renders the page on which a form is: again, with what was typed, if the form has a mistake."""

    def __call__(
        self, request: Request, visitor: Visitor, *, form: Form | None = None, mistake: Mistake | None = None
    ) -> Awaitable[Response]: ...


def forms(site: Site, actions: Iterable[type[Action[Any]]], page: Page, path: str) -> list[Route]:
    """The routes of the forms of all actions that change something.

    Args:
        page: Renders the page that has the forms.
        path: Where the visitor is sent afterwards.
    """
    return [
        site.post(path_of(action), _handler(site, action, page, path), title=action.summary()[0])
        for action in actions
        if not action.is_list
    ]


def _handler(
    site: Site, action: type[Action[Any]], page: Page, path: str
) -> Callable[[Request, Visitor, Form], Awaitable[Response]]:
    async def handler(request: Request, visitor: Visitor, form: Form) -> Response:
        if action.reach is Reach.ALL_TENANTS:
            all_tenants_only(visitor)
        known = {name: text for name, text in form.items() if name in action.fields}
        try:
            asked = read(action, {}, known, is_reason_required=True)
        except Mistakes as error:
            return await page(request, visitor, form=form, mistake=Mistake(_words(error)))
        async with site.session() as session:
            await run(session, asked, Who(visitor.name, visitor.tenant_id))
        return site.see_other(path, done=action.name)

    return handler


def _words(error: Mistakes) -> str:
    return " ".join(f"{label(each.field) if each.field else 'This form'} {each.rule}." for each in error.mistakes)


def done(request: Request, actions: Iterable[type[Action[Any]]]) -> str | None:
    """What the page says after a form was processed."""
    name = parameter(request, "done")
    return next((action.done for action in actions if action.name == name), None)
