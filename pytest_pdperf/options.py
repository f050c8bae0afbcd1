"""Every option of the suite in one table: flag, ini twin, default and help are defined here and nowhere else.

Imports nothing heavy: pytest loads it at every start, also for projects that never measure anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .errors import UsageProblem
from .option_values import (
    count_or_auto,
    gres_name,
    nats,
    positive_count,
    positive_seconds,
    seconds,
    two_topologies,
    whole_number,
)

NO_SUITE = (
    "no performance test lies here: pdperf init puts the suite into this folder, which pytest then finds"
)
"""For a run in a repository that has none."""
HOW_TO_RUN = (
    "performance suite: run it with --gpus LIST, or with --engine sim for simulated engines, "
    "or with --target URL on a deployment that runs already"
)

UPDATE_MODES = ("auto", "create", "fix", "tighten", "prune")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: `--flag` on the command line, `pdperf_name` in the ini file, else the default."""

    name: str
    help: str
    default: str | bool | None = None
    metavar: str | None = None
    kind: Literal["text", "flag", "list", "optional"] = "text"
    """`list` may be given several times; `optional` may stand without a value, which then is `const`."""
    const: str | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    starts_suite: bool = False
    """Giving this option means that the user wants the performance suite to run."""

    @property
    def flag(self) -> str:
        """Spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def ini(self) -> str:
        """Spelling in pytest.ini, tox.ini or pyproject.toml."""
        return self.dest

    @property
    def dest(self) -> str:
        """Attribute of pytest's option namespace; prefixed so that it meets no other plugin's."""
        return self.name if self.name.startswith("pdperf_") else "pdperf_" + self.name

    def shown_help(self) -> str:
        """Help text with choices, default and ini twin, for `pytest -h`."""
        notes = []
        if self.choices:
            notes.append("one of " + ", ".join(self.choices))
        if self.default not in (None, False):
            notes.append(f"default: {self.default}")
        notes.append(f"ini: {self.ini}")
        return f"{self.help} ({'; '.join(notes)})"


OPTIONS: tuple[Option, ...] = (
    Option(
        "engine",
        "engine to bring up: vllm, sglang, or, without any GPU, sim and sim-sglang for simulated ones (default: vllm)",
        metavar="NAME",
        starts_suite=True,
    ),
    Option(
        "gpus",
        "devices to use: 0-7 | 0,2,4-5 | all | GPU-uuid | MIG-uuid | cpu; a bare 4 is index 4",
        metavar="LIST",
        starts_suite=True,
    ),
    Option(
        "gpu_inventory",
        "recorded inventory of another machine's GPUs (`pdperf doctor --inventory`) to plan for, or for simulated "
        "engines to be placed and leased on; only with --plan or --engine sim",
        metavar="FILE",
    ),
    Option(
        "target",
        "measure a deployment that runs already, at this URL, and launch nothing",
        metavar="URL",
        starts_suite=True,
    ),
    Option(
        "target_role",
        "an engine behind the target, for its metrics: prefill|decode|server|router=URL; repeatable, one a replica",
        metavar="ROLE=URL",
        kind="list",
    ),
    Option(
        "target_api",
        "how to ask the target; auto: token ids over /v1/completions, else over /generate (chat has no exact length)",
        metavar="API",
        choices=("auto", "completions", "generate", "chat"),
        default="auto",
    ),
    Option(
        "target_api_key_env",
        "environment variable with the target's API key (default: PDPERF_API_KEY, where it is set)",
        metavar="VARIABLE",
    ),
    Option("target_ca", "PEM file with the authorities that signed the target's certificate", metavar="FILE"),
    Option(
        "target_insecure",
        "do not verify the target's certificate; every record of the run says so",
        kind="flag",
        default=False,
    ),
    Option(
        "target_hardware",
        "what the target runs on, in your words, such as 8xH100: part of the baselines' key (default: its address)",
        metavar="LABEL",
    ),
    Option(
        "launcher",
        "what starts engines and router: local, on this machine; slurm, as steps of a job that is asked for",
        metavar="NAME",
        default="local",
        choices=("local", "slurm"),
        starts_suite=True,
    ),
    Option(
        "slurm_arg",
        "option of salloc for the job, such as partition=gpu, account=lab, time=2:00:00, exclusive; nodes=2 spreads "
        "the roles over two nodes; may be repeated",
        metavar="ARG",
        kind="list",
    ),
    Option(
        "slurm_gres",
        "how the cluster calls its GPUs: gpu, or gpu:h100 for those of one type",
        metavar="NAME",
        default="gpu",
        parse=gres_name,
    ),
    Option(
        "k8s",
        "measure what runs in this namespace of a Kubernetes cluster, found by --k8s-selector, and launch nothing",
        metavar="NAMESPACE",
        starts_suite=True,
    ),
    Option(
        "k8s_selector",
        "labels of a role's pods: prefill|decode|server|router=KEY=VALUE,...; once for each role",
        metavar="ROLE=LABELS",
        kind="list",
    ),
    Option(
        "k8s_port",
        "port on which a role's pods serve requests and metrics (default: the one that the pod spec declares)",
        metavar="ROLE=PORT",
        kind="list",
    ),
    Option("k8s_context", "context of the kubeconfig (default: its current one)", metavar="NAME"),
    Option(
        "topology",
        "comma-separated topologies: names of the shipped or your own files, or paths to YAML files",
        metavar="NAMES",
        default="pd-1p2d,aggregated-3x",
    ),
    Option(
        "workload",
        "workload to run (default: quick on sim, cpu-smoke on cpu, fixed-shapes on GPUs)",
        metavar="NAME",
    ),
    Option("model", "model path or name that the engine loads; for sim the timing profile", metavar="PATH"),
    Option("served_model", "model name that clients use (default: last part of --model)", metavar="NAME"),
    Option(
        "engine_env",
        "virtual environment that holds the engine and router programs (default: this one, then PATH)",
        metavar="DIR",
    ),
    Option(
        "engine_arg",
        "engine flag, for every role or one: KEY=VALUE or ROLE.KEY=VALUE; may be repeated",
        metavar="ARG",
        kind="list",
    ),
    Option(
        "sim_fault",
        "make the simulator misbehave, for every role or one: decode_step=1.15, decode.die_after_tokens=50; repeatable",
        metavar="FAULT",
        kind="list",
    ),
    Option(
        "pdperf_fixtures",
        "folder with your own topologies/ and workloads/; searched before the shipped ones",
        metavar="DIR",
        default="fixtures",
    ),
    Option(
        "baselines",
        "folder of stored baselines, below the root directory",
        metavar="DIR",
        default="baselines",
    ),
    Option(
        "update_baselines",
        "store what this run measures: auto adds passing launches and, with --baseline-reason, re-pins failing cells",
        metavar="MODE",
        kind="optional",
        const="auto",
        choices=UPDATE_MODES,
    ),
    Option("baseline_reason", "why a slower result is the new normal; kept in the baseline", metavar="TEXT"),
    Option(
        "require_baseline",
        "yes: a cell without a baseline fails; no: it is reported as NO_BASELINE (default: yes when CI is set)",
        metavar="yes|no",
        choices=("yes", "no"),
        kind="optional",
        const="yes",
    ),
    Option(
        "confirm",
        "what fresh launches look at again before a FAIL: nothing, what stage 1 suspects, or every series",
        metavar="WHAT",
        choices=("never", "suspects", "all"),
        default="suspects",
    ),
    Option(
        "reference",
        "virtual environment of the build to compare with: suspects are then launched reference, new, new, reference",
        metavar="DIR",
    ),
    Option(
        "budget",
        "time for the whole session after which no fresh launch begins, such as 45m; what is then open stays SUSPECT",
        metavar="TIME",
        parse=positive_seconds,
    ),
    Option(
        "canary",
        "auto: time fixed work before and after each launch, and call a launch inconclusive where it is over 3 % off "
        "the baseline's; off: do not, also to accept a machine that changed for good (simulated engines have none)",
        metavar="auto|off",
        choices=("auto", "off"),
        default="auto",
    ),
    Option(
        "compare",
        "print every metric of topology A as a ratio to topology B, with its interval over the launches",
        metavar="A:B",
        parse=two_topologies,
    ),
    Option(
        "require_evidence",
        "yes: a PD cell whose disaggregation is not proven is INVALID; no: it is only reported",
        metavar="yes|no",
        choices=("yes", "no"),
        default="yes",
        kind="optional",
        const="yes",
    ),
    Option(
        "greedy_tolerance",
        "for engines that are not stable to the bit: greedy answers may part where the log-probabilities of their two "
        "tokens differ by no more than this, in nats; 0 wants equal tokens",
        metavar="NATS",
        default="0",
        parse=nats,
    ),
    Option(
        "pdperf_results",
        "folder for records, logs and the journal of this run",
        metavar="DIR",
        default="pdperf-results",
    ),
    Option(
        "resume",
        "go on with a broken-off run: its finished cells are kept and not measured again",
        metavar="RUN",
    ),
    Option(
        "startup_timeout",
        "deadline for one topology to come up, in seconds or as 90s, 15m",
        metavar="TIME",
        default="900",
        parse=positive_seconds,
    ),
    Option(
        "gpu_wait",
        "how long to wait for GPUs that another run has leased, or for a Slurm job to start, in seconds or as 30m "
        "(default: 0; with --launcher slurm 1h)",
        metavar="TIME",
        parse=seconds,
    ),
    Option(
        "overlap_start",
        "bring the next topology up while one is measured, where both have GPUs of their own; it disturbs, so such "
        "cells carry a warning and no canary is taken",
        kind="flag",
        default=False,
    ),
    Option(
        "launches", "bring every topology up this many times", metavar="N", default="1", parse=positive_count
    ),
    Option(
        "client_processes",
        "processes that the load client uses; auto: one, or as many as a cell's planned concurrency and rate call for",
        metavar="N|auto",
        default="auto",
        parse=count_or_auto,
    ),
    Option("workload_seed", "seed of prompts and arrivals", metavar="N", default="0", parse=whole_number),
    Option("plan", "print GPUs, ports, commands and cells, and start nothing", kind="flag", default=False),
)

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, slots=True)
class Settings:
    """The options after command line, ini and default are resolved, each parsed once."""

    values: Mapping[str, Any]
    given: frozenset[str]
    """Names that the command line or the ini set."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def active(self) -> bool:
        """True when the user asked for the performance suite."""
        return any(BY_NAME[name].starts_suite for name in self.given)


def resolve(command_line: Callable[[str], Any], ini: Callable[[str], Any]) -> Settings:
    """Apply the precedence command line, ini, default. Raises UsageProblem for a value that does not parse."""
    values: dict[str, Any] = {}
    given: set[str] = set()
    for option in OPTIONS:
        raw, place = command_line(option.dest), option.flag
        if raw in (None, [], False):
            raw, place = ini(option.ini), option.ini
        if raw in (None, "", [], False):
            raw, place = option.default, "default"
        else:
            given.add(option.name)
        values[option.name] = _parsed(option, raw, place)
    return Settings(values, frozenset(given))


def _parsed(option: Option, raw: Any, place: str) -> Any:
    if option.kind == "list":
        return tuple(raw or ())
    if option.kind == "flag" or raw is None:
        return bool(raw) if option.kind == "flag" else None
    if option.choices and raw not in option.choices:
        raise UsageProblem(f"{place}: {raw!r} is not one of {', '.join(option.choices)}")
    if option.parse is None:
        return raw
    try:
        return option.parse(raw)
    except ValueError as problem:
        raise UsageProblem(f"{place}: cannot use {raw!r}: {problem}") from None
