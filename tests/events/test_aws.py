"""The region of an SQS queue comes from the name of its host, in every partition of AWS."""

from __future__ import annotations

import pytest

from dispatcher.events.aws import region_in


@pytest.mark.parametrize(
    ("host", "region"),
    [
        ("sqs.eu-west-1.amazonaws.com", "eu-west-1"),
        ("eu-west-1.queue.amazonaws.com", "eu-west-1"),
        ("sqs.cn-north-1.amazonaws.com.cn", "cn-north-1"),
        ("sqs.us-gov-west-1.amazonaws.com", "us-gov-west-1"),
        ("sqs-fips.us-east-2.amazonaws.com", "us-east-2"),
        ("sqs.us-west-2.api.aws", "us-west-2"),
        ("vpce-0a1b-9z.sqs.us-east-1.vpce.amazonaws.com", "us-east-1"),
        ("sqs.eusc-de-east-1.amazonaws.eu", "eusc-de-east-1"),
        ("sqs.us-iso-east-1.c2s.ic.gov", "us-iso-east-1"),
        ("sqs.us-isob-east-1.sc2s.sgov.gov", "us-isob-east-1"),
        ("queue.amazonaws.com", None),
        ("127.0.0.1", None),
        ("localhost", None),
        ("", None),
    ],
)
def test_the_region_in_a_hosts_name(host: str, region: str | None) -> None:
    assert region_in(host) == region
