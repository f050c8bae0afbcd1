"""What the client pays for each event after the clock has stopped, and what a summary costs: must stay cheap enough
that a cell of 64 requests x 256 tokens is read in well under a second.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_pdperf.load.decode import read_answer
from pytest_pdperf.load.sse import SseParser
from pytest_pdperf.measure.cell_result import CellResult
from pytest_pdperf.measure.summarise import summarise
from tests.unit.report.report_data import cell_of, closed_loop, records

TOKENS = 256


def body(tokens: int = TOKENS) -> bytes:
    """A completions stream as vLLM sends it, one token an event, usage at the end."""
    event = (
        b'data: {"id":"cmpl-7f","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,'
        b'"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
    )
    last = event.replace(b'"finish_reason":null', b'"finish_reason":"length"')
    usage = b'data: {"id":"cmpl-7f","object":"text_completion","created":1700000000,"model":"m","choices":[],"usage":'
    usage += b'{"prompt_tokens":512,"total_tokens":%d,"completion_tokens":%d}}\n\n' % (512 + tokens, tokens)
    return event * (tokens - 1) + last + usage + b"data: [DONE]\n\n"


@pytest.mark.benchmark(group="parse")
@pytest.mark.parametrize("piece", [64 * 1024, 256], ids=["whole", "segments"])
def test_sse_framing(benchmark: BenchmarkFixture, piece: int) -> None:
    """Bytes to events, in one read and in reads of a small segment."""
    stream = body()
    pieces = [stream[i : i + piece] for i in range(0, len(stream), piece)]

    def parse() -> int:
        parser = SseParser()
        return sum(len(parser.feed(part)) for part in pieces)

    assert benchmark(parse) == TOKENS + 2


@pytest.mark.benchmark(group="parse")
def test_answer_of_a_request(benchmark: BenchmarkFixture) -> None:
    """A whole body to token events, counts and end marks."""
    answer = benchmark(read_answer, body(), "completions")
    assert len(answer.event_end) == TOKENS and answer.completion_tokens == TOKENS


@pytest.mark.benchmark(group="summarise")
@pytest.mark.parametrize("requests", [64, 512])
def test_summary_of_a_cell(benchmark: BenchmarkFixture, requests: int) -> None:
    """Records of 16 clients to every metric of the table."""
    made = records(closed_loop(16, [50.0 + i % 7 for i in range(requests)], tokens=TOKENS), 16)
    result: CellResult = benchmark(summarise, made, cell_of(concurrency=16, requests=requests), "pd")
    assert result.ok == requests and result.metrics["itl_ms_p99"].n == requests * (TOKENS - 1)
