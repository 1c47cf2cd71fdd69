"""The domains of AWS's partitions, such as China or the European Sovereign Cloud, from botocore's table."""

from __future__ import annotations

import re
from functools import cache


def dns_suffix_of(region: str) -> str | None:
    """The domain of a region's services, such as `amazonaws.com`; None if botocore knows no such region."""
    return next((suffix for pattern, suffix in _partitions() if pattern.fullmatch(region)), None)


def region_in(host: str) -> str | None:
    """The region that the name of one of AWS's hosts contains; None if it contains none."""
    return next((label for label in host.split(".") if dns_suffix_of(label)), None)


@cache
def _partitions() -> list[tuple[re.Pattern[str], str]]:
    from botocore.loaders import create_loader  # imported here, because it takes 100 ms, and few hosts need it

    listed = create_loader().load_data("partitions")["partitions"]
    return [(re.compile(each["regionRegex"].strip("^$"), re.ASCII), each["outputs"]["dnsSuffix"]) for each in listed]
