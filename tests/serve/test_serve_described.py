"""The OpenAPI page is true: what schemathesis makes of it never gives a 500, nor an answer that the page denies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from _serving import Served
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

PAGES = {"/predict", "/health", "/ready", "/metrics", "/versions", "/versions/pin", "/versions/rollback"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("described"), "--replicas", "1") as served:
        yield served.wait()


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_gives_a_500(server: Served, mode: schemathesis.GenerationMode) -> None:
    """With requests that the page allows, and with such as it does not."""
    page = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    tried = set()
    for found in page.get_all_operations():
        operation: Any = found.ok()

        @settings(
            max_examples=40,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            response = case.call()
            assert response.status_code != 500, (case.body, server.text)  # 504 is right for a short deadline
            case.validate_response(response, checks=[response_schema_conformance, status_code_conformance])

        try:
            ask()
        except Unsatisfiable:  # nothing can be wrong with a page that takes nothing
            assert mode.is_negative
        tried.add(operation.path)
    assert tried >= PAGES
    assert server.predict([[[1, 2, 3], [4, 5, 6]]])[0] == 200
