"""The OpenAPI page is true: what schemathesis makes of it never gives a 500, nor an answer that the page denies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from _served import Served
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("described"), "--replicas", "1") as served:
        yield served.wait()


@pytest.fixture(scope="module")
def page(server: Served) -> object:
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")


schema = schemathesis.pytest.from_fixture("page")


@schema.parametrize()
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_gives_a_500(case: schemathesis.Case) -> None:
    response = case.call()
    checks = [not_a_server_error, response_schema_conformance]
    if case.method == case.operation.method.upper():  # a method that is not there has no description
        checks.append(status_code_conformance)
    case.validate_response(response, checks=checks)
