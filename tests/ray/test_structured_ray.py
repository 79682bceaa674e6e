"""Forms and tools with the app on Ray Serve, by the `openai` client's own helpers."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai_tools import check_named_tool_and_none, check_parse, check_tools
from serving import deploy, serving

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def url(local_ray: None) -> Iterator[str]:
    with serving() as url:
        deploy({"num_stages": 2, "max_num_seqs": 16, "kv_cache_bytes": 32 << 20})
        yield url


def test_the_clients_helpers(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        check_parse(client)
        check_tools(client)
        check_named_tool_and_none(client)
