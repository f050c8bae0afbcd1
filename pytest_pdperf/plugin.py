"""The pytest side: hooks and options, nothing else. Heavy rooms are imported only when the suite runs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from . import fixtures
from .errors import UsageProblem
from .fixtures import SESSION
from .options import HOW_TO_RUN, NO_SUITE, OPTIONS, Settings, resolve

SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()


class Suspects:
    """Remembers the reports of items that wait for fresh launches: with xdist their items live in other processes."""

    def __init__(self, config: pytest.Config) -> None:
        self.reports: dict[str, pytest.TestReport] = {}
        self._config = config
        self._in_junit: dict[str, object] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of a suspect, and where it stands in the JUnit report."""
        if str(report.outcome) == "suspect":
            self.reports[report.nodeid] = report
            if (xml := self._junit()) is not None:
                self._in_junit[report.nodeid] = xml.node_reporter(report)

    def forget_in_junit(self, nodeid: str) -> None:
        """Take the suspect's entry out of the JUnit report: its final outcome is the same test, not another one."""
        entry, xml = self._in_junit.pop(nodeid, None), self._junit()
        if entry is not None and xml is not None:
            xml.node_reporters_ordered.remove(entry)

    def _junit(self) -> Any:
        from _pytest.junitxml import xml_key

        return self._config.stash.get(xml_key, None)


SUSPECTS: pytest.StashKey[Suspects] = pytest.StashKey()

MARKERS = (
    "pd: a cell measured on a prefill/decode disaggregated topology",
    "aggregated: a cell measured on aggregated servers",
    "fault: a disaggregated topology that is broken on purpose; no part of `-m pd`",
    "beside: the engine's own benchmark program on the same stack; no part of `-m pd`",
    "pdperf_cells(streams): measure with a test: cells with one stream ('single'), several ('mixed'), or 'none'; "
    "'fault': no cells, and only topologies of kind pd; 'beside': as 'single'",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the option table, each with its ini twin."""
    group = parser.getgroup("pdperf", "prefill/decode performance suite (pytest-pdperf)")
    for option in OPTIONS:
        kwargs: dict[str, Any] = {
            "dest": option.dest,
            "default": None,
            "help": option.shown_help().replace("%", "%%"),
        }
        if option.kind == "flag":
            kwargs["action"] = "store_true"
        else:
            kwargs["metavar"] = option.metavar
            if option.kind == "list":
                kwargs["action"] = "append"
            elif option.kind == "optional":
                kwargs |= {"nargs": "?", "const": option.const}
        group.addoption(option.flag, **kwargs)
        ini_type = {"flag": "bool", "list": "linelist"}.get(option.kind, "string")
        parser.addini(option.ini, f"ini twin of {option.flag}", type=ini_type, default=None)  # type: ignore[arg-type]


def pytest_configure(config: pytest.Config) -> None:
    """Read every setting and every YAML file now, so that bad input is a usage error before anything starts."""
    config.pluginmanager.register(fixtures, "pdperf-fixtures")
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    try:
        settings = resolve(lambda dest: config.getoption(dest, None), config.getini)
        config.stash[SETTINGS] = settings
        if settings.active:
            from .session import open_session

            if settings["plan"]:
                config.option.dist = "no"  # xdist: nothing runs, so nothing is spread over workers
            config.stash[SESSION] = open_session(config, settings)
            config.stash[SUSPECTS] = Suspects(config)
            config.pluginmanager.register(config.stash[SUSPECTS], "pdperf-suspects")
    except UsageProblem as problem:
        raise pytest.UsageError(str(problem)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Lease the devices for all xdist workers before the first of them starts."""
    pdperf = session.config.stash.get(SESSION, None)
    options = session.config.option
    starts_workers = getattr(options, "dist", "no") != "no" and not hasattr(session.config, "workerinput")
    if pdperf is None or not starts_workers or options.collectonly or pdperf.settings["plan"]:
        return
    try:
        pdperf.bench.lease_gpus()
    except UsageProblem as problem:
        raise pytest.UsageError(str(problem)) from None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give xdist workers the controller's run id, so that all write into one folder."""
    session = node.config.stash.get(SESSION, None)
    if session is not None:
        node.workerinput["pdperf_run_id"] = session.run_id


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Keep the cells of a topology on one worker, whose stack they share."""
    session = config.stash.get(SESSION, None)
    if session is None:
        return None
    from .workers import scheduler

    return scheduler(session, config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what an xdist worker has found out."""
    session = node.config.stash.get(SESSION, None)
    if session is not None:
        from .workers import OUTPUT, unpack

        unpack(session, node.gateway.id, getattr(node, "workeroutput", {}).get(OUTPUT))


def pytest_report_header(config: pytest.Config) -> list[str] | None:
    """Show every effective setting of a measuring run."""
    session = config.stash.get(SESSION, None)
    return session.header() if session else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make topologies x cells the parameters of every test marked with `pdperf_cells`."""
    marker = metafunc.definition.get_closest_marker("pdperf_cells")
    if marker is None:
        return
    streams = marker.args[0] if marker.args else "single"
    wanted = ["topology"] if streams in ("none", "fault") else ["topology", "cell"]
    session = metafunc.config.stash.get(SESSION, None)
    if session is None:
        own = {"fault": [pytest.mark.fault], "beside": [pytest.mark.beside]}
        kinds = own.get(streams, [pytest.mark.pd, pytest.mark.aggregated])
        marks = [*kinds, pytest.mark.skip(reason=HOW_TO_RUN)]
        metafunc.parametrize(
            wanted, [pytest.param(*[None] * len(wanted), marks=marks, id="not-asked-for")], indirect=True
        )
        return
    from .parameters import of_cells, of_topologies

    launches = of_topologies(session.inputs, session.settings["launches"], streams)
    metafunc.parametrize("topology", launches, indirect=True, scope="session")
    if "cell" in wanted:
        cells = of_cells(session.inputs.workload, streams)
        metafunc.parametrize("cell", cells, indirect=True, scope="function")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--resume`, leave out what the broken-off run has measured already."""
    pdperf = config.stash.get(SESSION, None)
    if pdperf is not None and (done := pdperf.finished(items)):
        items[:] = [item for item in items if item not in done]
        config.hook.pytest_deselected(items=done)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Check what the selected items need (GPUs, programs, ports) once, before the first of them starts."""
    pdperf = session.config.stash.get(SESSION, None)
    if pdperf is None or session.config.option.collectonly:
        return
    try:
        pdperf.prepare(session.items)
    except UsageProblem as problem:
        raise pytest.UsageError(str(problem)) from None


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """With `--plan`, print and start nothing; else let fresh launches decide the suspects after the last item."""
    pdperf = session.config.stash.get(SESSION, None)
    if pdperf is None or session.config.option.collectonly:
        return (yield)
    if pdperf.settings["plan"]:
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        for line in pdperf.describe_plan():
            reporter.write_line(line)
        session.items.clear()
        return (yield)
    kept = pdperf.kept()
    result = yield
    # pytest's exit status is about what this process ran; a resumed run is also what was kept of it.
    session.testsfailed += sum(kept)
    session.testscollected = session.testscollected or len(kept)
    suspects = session.config.stash[SUSPECTS]
    for nodeid, problem in pdperf.confirm().items():
        if nodeid in suspects.reports:
            suspects.forget_in_junit(nodeid)
            _report_again(session.config, suspects.reports[nodeid], problem, pdperf.properties_of(nodeid))
    return result


def _report_again(
    config: pytest.Config, first: pytest.TestReport, problem: str, properties: list[tuple[str, object]]
) -> None:
    """The final outcome of an item that was first reported as suspect."""
    outcomes = {"call": "failed" if problem else "passed", "teardown": "passed"}
    config.hook.pytest_runtest_logstart(nodeid=first.nodeid, location=first.location)
    for when, outcome in outcomes.items():
        report = pytest.TestReport(
            nodeid=first.nodeid,
            location=first.location,
            keywords=first.keywords,
            outcome=outcome,  # type: ignore[arg-type]
            longrepr=problem or None if when == "call" else None,
            when=when,  # type: ignore[arg-type]
            user_properties=properties,
            duration=first.duration if when == "call" else 0.0,
        )
        config.hook.pytest_runtest_logreport(report=report)


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Name the outcome of an item that waits for fresh launches."""
    return ("suspect", "S", "SUSPECT") if str(report.outcome) == "suspect" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put a cell's verdict into the report, so that JUnit, xdist and other plugins see it."""
    report = yield
    pdperf = item.config.stash.get(SESSION, None)
    if pdperf is not None and call.when == "call":
        report.user_properties.extend(pdperf.properties_of(item.nodeid))
        if report.passed and pdperf.awaits_confirmation(item.nodeid):
            report.outcome = "suspect"  # type: ignore[assignment]
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Take everything down and write baselines once, whatever happened before."""
    pdperf = session.config.stash.get(SESSION, None)
    if pdperf is None:
        return
    pdperf.finish()
    exitstatus = session.exitstatus = pdperf.exit_status(exitstatus)
    if pdperf.worker:
        from .workers import OUTPUT, pack

        session.config.workeroutput[OUTPUT] = pack(pdperf)  # type: ignore[attr-defined]
    elif not session.config.pluginmanager.has_plugin("terminalreporter"):
        from .report.ci import write_run_outputs

        summary = pdperf.summary()
        if summary.outcomes:
            required = pdperf.judging.require_baseline
            write_run_outputs(
                summary, require_baseline=required, exit_status=int(exitstatus), emit=lambda line: None
            )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Last resort after an internal error: nothing that we started may stay behind."""
    pdperf = config.stash.get(SESSION, None)
    if pdperf is not None:
        pdperf.close()


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Show the tables and what became of the baselines; write the reports."""
    pdperf = config.stash.get(SESSION, None)
    if pdperf is None:
        skipped = terminalreporter.stats.get("skipped", ())
        if any(HOW_TO_RUN in str(report.longrepr) for report in skipped):
            terminalreporter.write_line(HOW_TO_RUN)
        return
    from .report.ci import write_run_outputs
    from .report.terminal import write_summary

    exitstatus = pdperf.exit_status(exitstatus)
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not terminalreporter.stats.get("deselected"):
        terminalreporter.write_line(NO_SUITE)
    summary = pdperf.summary()
    write_summary(terminalreporter, summary)
    if (pdperf.folder / "faults").is_dir():
        from .breaking import lines

        terminalreporter.section("faults")
        for line in lines(pdperf.folder / "faults"):
            terminalreporter.write_line(line)
    if (pdperf.folder / "beside").is_dir():
        from .beside import shown

        terminalreporter.section("beside other tools")
        for line in shown(pdperf.folder / "beside"):
            terminalreporter.write_line(line)
    if summary.outcomes and pdperf.settings["compare"]:
        from .report.comparison import comparison_lines

        for line in comparison_lines(summary.outcomes, *pdperf.settings["compare"]):
            terminalreporter.write_line(line)
    if summary.outcomes:
        written = write_run_outputs(
            summary,
            require_baseline=pdperf.judging.require_baseline,
            exit_status=int(exitstatus),
            emit=terminalreporter.write_line,
        )
        if written:
            terminalreporter.write_line("reports: " + ", ".join(path.name for path in written))
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            terminalreporter.write_line(f"broken off: the same command with --resume={pdperf.run_id} goes on")
