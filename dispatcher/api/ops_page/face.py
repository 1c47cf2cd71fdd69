"""Derives lists, filters and forms of the operators' page from actions (see `dispatcher.actions`).

The macros of `actions.html` render them; a subject's own template may use each of them alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dispatcher.actions.action import Action, Change, Mistakes, Page, Reach, Refused, label, path_of, read
from dispatcher.actions.batch import Batch
from dispatcher.actions.runner import Face, Who, of_tenant, run
from dispatcher.api.ops_page.fields import Mistake, all_tenants_only, as_texts, note_unknown, parameter, typed
from dispatcher.api.ops_page.forms import Form
from dispatcher.api.ops_page.page_errors import PageError, not_found
from dispatcher.api.ops_page.site import Site
from dispatcher.api.ops_page.visitor import Visitor
from dispatcher.api.ops_page.zones import zone_of

A = TypeVar("A", bound=Action[Any])
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Posted:
    """A form whose page is shown again: with what was typed and the mistake, or with the secret that it made."""

    action: type[Action[Any]] | None = None
    form: Form | None = None
    mistake: Mistake | None = None
    secret: str | None = None


NOTHING: Final = Posted()
PageOfForms = Callable[[Request, Visitor, Posted], Awaitable[Response]]
"""Renders the page on which a form is."""
Reader = Callable[[Visitor, Page[Any]], Awaitable[Mapping[str, Any]]]


def pages(
    site: Site,
    path: str,
    actions: Sequence[type[Action[Any]]],
    template: str = "action_list.html",
    more: Reader | None = None,
    **values: Any,
) -> list[Route]:
    """The routes of a subject's page: its list (the first of `actions`), the list's filter, the other actions' forms.
    `more` reads more values of the template, for the rows of the list; the template also gets `values`."""

    async def page(request: Request, visitor: Visitor, posted: Posted = NOTHING) -> Response:
        return await list_page(site, request, visitor, template, actions, posted, more, path=path, **values)

    return [site.get(path, page), *forms(site, actions, page, path)]


async def list_page(
    site: Site,
    request: Request,
    visitor: Visitor,
    template: str,
    actions: Sequence[type[Action[Any]]],
    posted: Posted = NOTHING,
    more: Reader | None = None,
    filtered: Mapping[str, str] | None = None,
    **values: Any,
) -> Response:
    """See `pages`; `filtered` is the filter, if it is not in the URL."""
    found, filters, mistake = await listed(site, actions[0], request, visitor, filtered)
    posted = replace(posted, mistake=posted.mistake or mistake)
    values |= {"listing": actions[0], "page": found, "filters": filters, **(await more(visitor, found) if more else {})}
    return await shown(site, request, visitor, template, actions, posted, **values)


async def shown(
    site: Site,
    request: Request,
    visitor: Visitor,
    template: str,
    actions: Sequence[type[Action[Any]]],
    posted: Posted = NOTHING,
    **values: Any,
) -> Response:
    """A page with forms of actions: says what the last form did, or what is wrong with it."""
    name = parameter(request, "done")
    known = {
        "actions_of": actions,
        "done": next((action.done for action in actions if action.name == name), None),
        "posted": posted.action,
        "given": {} if posted.form is None or posted.secret else posted.form,
        "mistake": posted.mistake,
        "secret": posted.secret,
    }
    return await site.page(request, visitor, template, status=400 if posted.mistake else 200, **known | values)


async def listed(
    site: Site,
    listing: type[Action[Any]],
    request: Request,
    visitor: Visitor,
    form: Mapping[str, str] | None = None,
    most: int | None = None,
) -> tuple[Page[Any], Mapping[str, str], Mistake | None]:
    """The rows that the filter in the URL selects, the filter as it was typed, and its mistakes if there are any.

    With a mistake there are no rows.

    Args:
        form: The filter, if it is not in the URL: addresses are only in the bodies of requests.
        most: The most rows that are read; None for the rows of a page.
    """
    filters = typed(request.query_params if form is None else form, listing.fields)
    if form is None:
        note_unknown(request, listing.fields)
    try:
        asked = read(listing, {}, as_texts(listing, filters, zone_of(request)))
        found = await rows(site, asked if most is None else asked.but(limit=most), visitor)
    except Mistakes as error:
        return Page([], None), filters, Mistake(words_of(error))
    return (found if isinstance(found, Page) else Page(found, None)), filters, None


def asked(
    action: type[A], request: Request, visitor: Visitor, typed: Mapping[str, str], *, needs_reason: bool = True
) -> A:
    """The action that typed fields say, as the visitor may carry it out. Raises Mistakes."""
    found = read(action, {}, as_texts(action, typed, zone_of(request)), is_reason_required=needs_reason)
    with tenant_errors(visitor):
        return of_tenant(found, who(visitor))


async def rows(site: Site, asked: Action[R], visitor: Visitor) -> R:
    """What an action reads, for a visitor who may see it. If there is nothing, the visitor gets the page for this."""
    try:
        async with site.session() as session:
            return await _run(site, session, asked, visitor)
    except Refused as error:
        raise PageError(404 if error.code == "not-found" else 409, error.message, error.remedy or "") from None


def value(request: Request, form: Form | None, name: str) -> str:
    """What a page is about: a parameter in the path, or the same field of a form; empty if there is none."""
    return str(request.path_params.get(name) or (form.get(name, "") if form else ""))


async def one(site: Site, action: type[Action[R]], request: Request, visitor: Visitor, form: Form | None = None) -> R:
    """The row that a page is about. Its id is the action's first field (see `value`)."""
    name = next(iter(action.fields))
    try:
        asked = read(action, {}, {name: value(request, form, name)})
    except Mistakes:
        raise not_found(name.removesuffix("_id")) from None
    return await rows(site, asked, visitor)


def forms(
    site: Site,
    actions: Iterable[type[Action[Any]]],
    page: PageOfForms,
    path: str,
    after: Callable[[Any], None] = lambda _: None,
) -> list[Route]:
    """The routes of the forms of all actions that change something.

    Args:
        page: Renders the page that has the forms.
        path: Where the visitor is sent afterwards; the action's fields in braces are replaced.
        after: Called with each result.
    """
    return [
        site.post(path_of(action), _handler(site, action, page, path, after), title=action.summary()[0])
        for action in actions
        if issubclass(action, Change) and not issubclass(action, Batch)
    ]


def _handler(
    site: Site, action: type[Action[Any]], page: PageOfForms, path: str, after: Callable[[Any], None]
) -> Callable[[Request, Visitor, Form], Awaitable[Response]]:
    async def handler(request: Request, visitor: Visitor, form: Form) -> Response:
        if action.reach is Reach.ALL_TENANTS:
            all_tenants_only(visitor)
        known = {name: text for name, text in form.items() if name in action.fields and text.strip()}
        try:
            asked = read(action, {}, known, is_reason_required=True)
            async with site.session() as session:
                result = await _run(site, session, asked, visitor)
        except Mistakes as error:
            return await page(request, visitor, Posted(action, form, Mistake(words_of(error))))
        except Refused as error:
            words = f"{error.message} {error.remedy or ''}".strip()
            return await page(request, visitor, Posted(action, form, Mistake(words)))
        after(result)
        if action.secret:
            return await page(request, visitor, Posted(action, form, secret=getattr(result, action.secret)))
        tenant_id = None if action.reach is Reach.ALL_TENANTS else known.get("tenant_id")
        return site.see_other(path.format_map(asked.values()), done=action.name, tenant_id=tenant_id)

    return handler


async def _run(site: Site, session: Any, asked: Action[R], visitor: Visitor) -> R:
    with tenant_errors(visitor):
        return await run(session, asked, who(visitor), site.settings)


def who(visitor: Visitor) -> Who:
    return Who(Face.PAGE, visitor.name, visitor.tenant_id)


@contextmanager
def tenant_errors(visitor: Visitor) -> Iterator[None]:
    """What a visitor of one tenant may not see does not exist."""
    try:
        yield
    except Refused as error:
        if error.name == "reach":
            all_tenants_only(visitor)
        if error.name == "tenant":
            remedy = "Remove `tenant_id` from the address of this page."
            raise PageError(404, "There is no tenant with this id.", remedy) from None
        raise


def words_of(error: Mistakes) -> str:
    """All mistakes, as sentences for the visitor."""
    return " ".join(f"{label(each.field) if each.field else 'This form'} {each.rule}." for each in error.mistakes)
