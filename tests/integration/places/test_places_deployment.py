"""What a deployment turns out to be: an LLM server or not, serving the model or not, letting us in or not."""

from __future__ import annotations

import socket

import pytest

from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.places.deployment import Deployment, look
from pytest_pdperf.places.greeting import greet
from pytest_pdperf.places.named import Named
from pytest_pdperf.spec.topology import Role
from pytest_pdperf.stack.access import Access
from tests.integration.places.answering import SGLANG_PAGE, VLLM_PAGE, Answer, answering, models

SECRET = "kept-out-of-every-message"


def test_the_only_model_is_taken_with_its_context_and_what_it_says_of_itself() -> None:
    with answering({"/v1/models": models("qwen", max_model_len=4096, owned_by="vllm")}) as server:
        found = look(Named(server.url), ())
    assert (found.model, found.max_context, found.engine, found.version) == ("qwen", 4096, "vllm", "unknown")
    assert not found.simulated
    assert found.watchable == {"target": server.url}
    assert "no engine is named" in found.notes[0]


def test_a_simulated_engine_is_called_so_whatever_stands_in_front() -> None:
    with answering({"/v1/models": models("m", owned_by="pdperf-sim")}) as server:
        assert look(Named(server.url), ()).simulated


def test_adapters_are_taken_only_when_they_are_asked_for() -> None:
    listed = {"data": [{"id": "base"}, {"id": "adapter", "parent": "base"}]}
    with answering({"/v1/models": (200, listed)}) as server:
        assert look(Named(server.url), ()).model == "base"
        assert look(Named(server.url), ("adapter",)).model == "adapter"


@pytest.mark.parametrize(
    ("answer", "wanted", "message"),
    [
        (models("a", "b"), (), "serves a, b: say which with --served-model"),
        (
            models("qwen3-32b"),
            ("qwen3-23b",),
            "--model qwen3-23b: the target serves qwen3-32b; did you mean 'qwen3-32b'",
        ),
        (
            (200, "<html>It works!</html>"),
            (),
            "no LLM server: /v1/models gave HTTP 200, text/html, '<html>It works!",
        ),
        ((404, "nothing"), (), "no LLM server: /v1/models gave HTTP 404"),
        ((200, {"data": []}), (), "no LLM server"),
        ((200, {"data": [{"id": 7}]}), (), "no LLM server"),
        ((302, "https://elsewhere/login"), (), "redirects to https://elsewhere/login"),
        ((401, "who?"), (), "HTTP 401: it wants an API key: put it into PDPERF_API_KEY"),
        ((403, "no"), (), "HTTP 403: it wants an API key"),
    ],
)
def test_what_is_no_deployment_says_what_came_instead(
    answer: Answer, wanted: tuple[str, ...], message: str
) -> None:
    with answering({"/v1/models": answer}) as server:
        with pytest.raises(UsageProblem) as problem:
            look(Named(server.url), wanted)
    assert message in str(problem.value)
    assert len(str(problem.value).splitlines()) == 1


def test_nobody_at_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UsageProblem, match="no answer"):
            look(Named(url), ())


def test_the_key_goes_to_target_and_engines_and_into_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", SECRET)
    pages = {"/v1/models": models("m"), "/metrics": VLLM_PAGE}
    with answering(pages, key=SECRET) as server:
        named = Named(server.url, {"server-0": (Role.SERVER, server.url)}, access=Access("OUR_KEY"))
        assert look(named, ()).engine == "vllm"
        assert {given for _, given in server.seen} == {f"Bearer {SECRET}"}
        assert {"/v1/models", "/metrics"} <= {path for path, _ in server.seen}
        with pytest.raises(UsageProblem) as problem:
            greet(look(named, ()))
    assert SECRET not in str(problem.value)
    assert "serves no request" in str(problem.value)
    monkeypatch.setenv("OUR_KEY", "wrong")
    with answering(pages, key=SECRET) as server:
        with pytest.raises(UsageProblem, match="refuses the key in OUR_KEY"):
            look(Named(server.url, access=Access("OUR_KEY")), ())


ROLES: dict[str, tuple[dict[str, Answer], str]] = {
    "no metrics": ({"/metrics": (404, "nope")}, "no metrics page (HTTP 404"),
    "the router's page": (
        {"/metrics": (200, "# TYPE router_x gauge\nrouter_x 1\n")},
        "no known engine (router_x)",
    ),
    "another mode": (
        {"/metrics": SGLANG_PAGE, "/server_info": (200, {"disaggregation_mode": "decode"})},
        "says that it is a decode engine; are roles mixed up?",
    ),
}


@pytest.mark.parametrize(("answers", "message"), ROLES.values(), ids=ROLES)
def test_a_role_url_that_is_no_such_engine(answers: dict[str, Answer], message: str) -> None:
    with answering({"/v1/models": models("m")}) as front, answering(answers) as engine:
        named = Named(front.url, {"prefill-0": (Role.PREFILL, engine.url)})
        with pytest.raises(UsageProblem) as problem:
            look(named, ())
    assert "--target-role prefill" in str(problem.value) and message in str(problem.value)


def test_what_the_user_says_of_the_engine_is_held_against_what_is_seen() -> None:
    with answering({"/v1/models": models("m", owned_by="vllm")}) as server:
        with pytest.raises(UsageProblem, match="print the metrics of vllm"):
            look(Named(server.url), (), "sglang")
        with pytest.raises(UsageProblem, match="not simulated"):
            look(Named(server.url), (), "sim")
    with answering({"/v1/models": models("m")}) as server:
        assert look(Named(server.url), (), "sglang").engine == "sglang"


EVENT = (
    'data: {"choices": [{"index": 0, "text": "ab"}], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize(
    ("answers", "engine", "api"),
    [
        ({"/v1/completions": (200, EVENT), "/generate": (200, EVENT)}, "vllm", "completions"),
        ({"/v1/completions": (200, EVENT), "/generate": (200, EVENT)}, "sglang", "generate"),
        ({"/v1/completions": (400, "text only"), "/generate": (200, EVENT)}, "unknown", "generate"),
    ],
)
def test_the_api_that_takes_exact_prompts_is_found(answers: dict[str, Answer], engine: str, api: str) -> None:
    with answering(answers) as server:
        assert greet(Deployment(Named(server.url), "m", engine=engine)).api == api


def test_a_front_door_for_chat_alone_is_asked_that_way_only_on_request() -> None:
    with answering({"/v1/chat/completions": (200, EVENT)}) as server:
        with pytest.raises(UsageProblem, match="--target-api chat asks with text"):
            greet(Deployment(Named(server.url), "m"))
        assert greet(Deployment(Named(server.url, api="chat"), "m")).api == "chat"


def test_an_engine_that_counts_none_of_the_requests_belongs_to_another_deployment() -> None:
    page = (
        '# TYPE vllm:request_success_total counter\nvllm:request_success_total{finished_reason="length"} 5\n'
    )
    with (
        answering({"/v1/completions": (200, EVENT)}) as front,
        answering({"/metrics": (200, page)}) as engine,
    ):
        named = Named(front.url, {"server-0": (Role.SERVER, engine.url)})
        with pytest.raises(UsageProblem, match=r"none of the 3 requests .* engine of another deployment"):
            greet(Deployment(named, "m"), counted_s=0.0)
