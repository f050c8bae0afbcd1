"""The part of the Slurm launcher that needs no Slurm: sizes, shares, command lines and what Slurm's words mean."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence

import pytest

from pytest_pdperf.commands.checks import Level, check_left_jobs
from pytest_pdperf.engines.base import Command
from pytest_pdperf.errors import UsageProblem
from pytest_pdperf.spec.topology import Role
from pytest_pdperf.stack import procfs
from pytest_pdperf.stack.slurm import probe
from pytest_pdperf.stack.slurm.asking import Size, Wish, forecast, read_wish, salloc
from pytest_pdperf.stack.slurm.client import Answer, check_version, foreign_variables
from pytest_pdperf.stack.slurm.job import Job, JobNode, State, job_state, owner_comment, read_job, scancel
from pytest_pdperf.stack.slurm.launcher import SlurmLauncher, ask_nodes
from pytest_pdperf.stack.slurm.leftovers import cancel, left_jobs
from pytest_pdperf.stack.slurm.nodes import Need, fewest_nodes, parse_gres, read_nodes, spread
from pytest_pdperf.stack.slurm.sharing import cpus_wanted, shares_of
from pytest_pdperf.stack.slurm.step import Share, step_command
from tests.unit.stack.slurm_recorded import Recorded


def needs(*sizes: tuple[Role, int]) -> list[Need]:
    return [Need(f"{role.value}-{i}", role, size) for i, (role, size) in enumerate(sizes)]


P, D, S = Role.PREFILL, Role.DECODE, Role.SERVER


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:4", {"gpu": 4}),
        ("gpu:h100:8(S:0-1)", {"gpu:h100": 8}),
        ("gpu:a100:4(S:0,2),gpu:v100:2,nic:mlx5:1", {"gpu:a100": 4, "gpu:v100": 2, "nic:mlx5": 1}),
        ("gpu:2(IDX:0-1)", {"gpu": 2}),
        ("gpu", {"gpu": 1}),
        ("craynetwork:4,bandwidth:lustre:4M", {"craynetwork": 4, "bandwidth:lustre": 4 * 1024**2}),
        ("(null)", {}),
        ("", {}),
    ],
)
def test_gres_are_read_with_and_without_type(text: str, found: Mapping[str, int]) -> None:
    assert parse_gres(text) == found


@pytest.mark.parametrize(
    ("sizes", "rooms", "nodes"),
    [
        ([(P, 1), (D, 1)], [8], [0, 0]),
        ([(P, 1), (D, 1)], [8, 8], [0, 1]),
        ([(P, 1), (D, 1), (D, 1)], [2, 2], [0, 1, 1]),
        ([(P, 1), (P, 1), (D, 1), (D, 1)], [8, 8], [0, 0, 1, 1]),
        ([(P, 4), (D, 4), (D, 4)], [8, 8], [0, 1, 1]),
        ([(P, 2), (P, 2), (D, 4)], [4, 4], [0, 0, 1]),
        ([(S, 2), (S, 2), (S, 2)], [4, 4], [0, 0, 1]),
        ([(P, 2), (D, 2), (D, 2), (D, 2)], [4, 4], [0, 0, 1, 1]),
        ([(P, 1), (D, 1)], [0, 2], [1, 1]),
    ],
)
def test_roles_part_where_they_can_and_nodes_fill_evenly(
    sizes: list[tuple[Role, int]], rooms: list[int], nodes: list[int]
) -> None:
    found = spread(needs(*sizes), rooms)
    assert found is not None and list(found.values()) == nodes


def test_what_does_not_fit_is_not_placed() -> None:
    assert spread(needs((P, 4), (D, 4)), [4, 3]) is None
    assert spread(needs((P, 3), (D, 3), (D, 3)), [4, 4]) is None, (
        "three groups of three need three nodes of four"
    )
    assert fewest_nodes(needs((P, 3), (D, 3), (D, 3)), 4, "t") == 3
    assert fewest_nodes(needs((P, 4), (D, 4)), 8, "t") == 1
    with pytest.raises(UsageProblem, match="decode-1 needs 8 GPUs of one node, and the largest has 4"):
        fewest_nodes(needs((P, 4), (D, 8)), 4, "t")


def test_a_wish_is_options_of_salloc_by_their_long_names() -> None:
    wish = read_wish(["partition=gpu", "time=2:00:00", "exclusive", "nodes=2", "cpus_per_task=32"])
    assert wish == Wish(
        ("--partition=gpu", "--time=2:00:00", "--exclusive", "--cpus-per-task=32"), nodes=2, partition="gpu"
    )
    assert wish.sets_cpus and not read_wish(["exclusive"]).sets_cpus


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gres=gpu:4", "gres is decided by --slurm-gres and the topology"),
        ("--ntasks=2", "ntasks is decided by the launcher"),
        ("p=gpu", "write the long name: partition=gpu"),
        ("nodes=1-2", "want one number of nodes"),
        ("nodes=0", "want one number of nodes"),
        ("-t 2:00:00", "want a long option of salloc"),
        ("", "want a long option of salloc"),
    ],
)
def test_a_wish_for_what_is_decided_elsewhere_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageProblem, match=f"^--slurm-arg {text!r}: {problem}"):
        read_wish([text])


def test_the_job_is_asked_for_by_node_and_its_forecast_asks_the_same() -> None:
    size, wish = Size(2, 4, 34, "gpu:h100"), read_wish(["partition=gpu"])
    asks = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=34", "--gres=gpu:h100:4", "--partition=gpu"]
    command = salloc(size, wish, name="n", comment="c")
    assert [word for word in command if word in asks] == asks and command[-2:] == ("sleep", "infinity")
    assert [word for word in forecast(size, wish) if word in asks] == asks
    assert forecast(size, wish)[:2] == ("sbatch", "--test-only")
    own = salloc(size, read_wish(["cpus-per-gpu=8"]), name="n", comment="c")
    assert "--cpus-per-gpu=8" in own and not any(word.startswith("--cpus-per-task") for word in own)
    assert not any(word.startswith("--gres") for word in salloc(Size(1, 0, 4), wish, name="n", comment="c"))


def test_cpus_follow_the_gpus_and_leave_some_for_the_router() -> None:
    assert cpus_wanted(128, 8, 4, 1) == 64 + 2
    assert cpus_wanted(128, 8, 8, 2) == 128, "never more than the node has"
    assert cpus_wanted(64, 0, 3, 3) == 8
    assert cpus_wanted(4, 8, 3, 3) == 4


def test_shares_add_up_to_what_the_job_has() -> None:
    job = Job("7", (JobNode("a", 66, 4), JobNode("b", 128, 8)), ours=True)
    wanted = needs((P, 4), (D, 4), (D, 2))
    shares = shares_of(wanted, {"prefill-0": 0, "decode-1": 1, "decode-2": 1}, job, "gpu:h100", gpus=True)
    assert shares["router"] == Share("a", 0, 2)
    assert shares["prefill-0"] == Share("a", 4, 64, "gpu:h100")
    assert (shares["decode-1"].cpus, shares["decode-2"].cpus) == (85, 43), "by GPUs, and together all 128"
    with pytest.raises(UsageProblem, match="the job has 2 CPUs on node a for 3 processes"):
        small = Job("7", (JobNode("a", 2, 2),), ours=True)
        shares_of(needs((P, 1), (D, 1)), {"prefill-0": 0, "decode-1": 0}, small, "gpu", gpus=True)


def test_a_step_hides_the_surrounding_job_and_leaves_the_gpus_to_slurm() -> None:
    base = {"PATH": "/usr/bin", "SLURM_CPUS_PER_TASK": "4", "SLURM_CONF": "/etc/s.conf", "SRUN_DEBUG": "3"}
    inner = Command(("/opt/e/bin/vllm", "serve", "a b"), {"CUDA_VISIBLE_DEVICES": "0,1", "K": "v"})
    step = step_command("7", "prefill-0", Share("n1", 2, 16, "gpu:h100"), inner, ("10.0.0.1",), base)
    assert step.argv[-4:] == ("pdperf", *inner.argv), "words, never a text"
    assert {"--jobid=7", "--nodelist=n1", "--exact", "--gres=gpu:h100:2", "--cpus-per-task=16"} <= set(
        step.argv
    )
    assert step.env["K"] == "v" and step.env["PATH"] == "/opt/e/bin:/usr/bin"
    gone = {name for name, value in step.env.items() if value is None}
    assert gone == {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "SLURM_CPUS_PER_TASK", "SRUN_DEBUG"}
    assert step.env["NO_PROXY"] == "127.0.0.1,localhost,10.0.0.1"
    cpu = step_command("7", "p", Share("n1", 0, 2), Command(("x",), {"CUDA_VISIBLE_DEVICES": ""}), (), base)
    assert cpu.env["CUDA_VISIBLE_DEVICES"] == "" and "--gres=none" in cpu.argv


def test_only_variables_of_a_job_are_foreign() -> None:
    env = {
        "SLURM_JOB_ID": "1",
        "SLURM_CONF": "c",
        "SALLOC_ACCOUNT": "p",
        "SLURMD_NODENAME": "n",
        "MY_SLURM_X": "1",
    }
    assert foreign_variables(env) == ("SLURM_JOB_ID", "SLURMD_NODENAME")


JOB = """JobId=12 JobName=x
   RunTime=00:00:01 TimeLimit=00:10:00 EndTime=2026-11-29T21:12:18
   NodeList=n[1-3]
     Nodes=n[1-2] CPU_IDs=0-2,8 Mem=4000 GRES=gpu:h100:2(IDX:0-1)
     Nodes=n3 CPU_IDs=5 Mem=4000 GRES=
"""


def test_a_job_is_read_node_by_node() -> None:
    run = Recorded(
        {"scontrol show job": JOB, "scontrol show hostnames n[": "n1\nn2\n", "scontrol show hostnames": "n3"}
    )
    job = read_job(run, "12", gres="gpu", ours=True)
    two = tuple(JobNode(name, 4, 2, ("gpu:h100",)) for name in ("n1", "n2"))
    assert job == Job("12", (*two, JobNode("n3", 1, 0)), True, "2026-11-29T21:12:18")
    assert read_job(run, "12", gres="gpu:a100", ours=True).nodes[0].gpus == 0, (
        "another type is not what was asked for"
    )


def test_a_job_that_the_queue_forgot_has_no_state() -> None:
    assert job_state(Recorded({"squeue": "PENDING|Resources|N/A"}), "1") == State("PENDING", "Resources")
    assert job_state(Recorded({"squeue": ""}), "1") == State("")
    gone = Answer(1, "", "slurm_load_jobs error: Invalid job id specified")
    assert job_state(Recorded({"squeue": gone}), "1") == State("")
    deaf = job_state(Recorded({"squeue": Answer(1, "", "Unable to contact slurm controller")}), "1")
    assert deaf == State("UNKNOWN", "squeue failed: Unable to contact slurm controller")

    def silent(*argv: str) -> Answer:
        raise UsageProblem("--launcher slurm: no answer from squeue within 30 s")

    assert job_state(silent, "1") == State("UNKNOWN", "no answer from squeue within 30 s")
    scancel(silent, "1")


def test_nodes_are_those_of_the_default_partition_that_are_up() -> None:
    rows = "a|gpu*|gpu:8|128|idle\nb|gpu*|gpu:8|128|down*\nc|cpu|(null)|64|idle\nd|gpu*|gpu:4|64|mixed\n"
    run = Recorded({"sinfo": rows})
    assert [(node.name, node.count("gpu"), node.cpus) for node in read_nodes(run, None)] == [
        ("a", 8, 128),
        ("d", 4, 64),
    ]
    assert run.asked == ["sinfo --noheader --Node -o %N|%P|%G|%c|%T"]
    with pytest.raises(UsageProblem, match="no usable node in partition gpu: b is drained"):
        read_nodes(Recorded({"sinfo": "b|gpu*|gpu:8|128|drained"}), "gpu")


def test_a_slurm_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert check_version(Recorded({"srun": "slurm-wlm 22.05.8"})) == "22.05.8"
    with pytest.raises(UsageProblem, match=r"20\.11\.7 has no `srun --exact`"):
        check_version(Recorded({"srun": "slurm 20.11.7"}))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UsageProblem, match="no program srun on PATH"):
        check_version(Recorded({}))


def launcher(run: Recorded) -> SlurmLauncher:
    shares = {"prefill-0": Share("n1", 1, 2), "router": Share("n2", 0, 1)}
    job = Job("7", (JobNode("n1", 4, 1), JobNode("n2", 4, 1)), ours=True)
    return SlurmLauncher(run, job, shares, {"n1": "10.0.0.1", "n2": "10.0.0.2"})


def told(node: str, *taken: int) -> str:
    row = {"node": node, "address": "10.0.0.9", "taken": taken, "cpu": "c", "cpus": 4, "kernel": "k"}
    return "pdperf-node " + json.dumps(row) + "\n"


def test_ports_are_asked_of_the_node_that_they_will_be_on() -> None:
    run = Recorded({"srun --jobid=7": "noise\n" + told("n1", 24000) + told("n2")})
    taken = launcher(run).taken([("prefill-0", "http", 24000), ("router", "http", 24001)])
    assert taken == ("prefill-0: http port 24000 is taken on n1",)
    assert run.asked[0].endswith('{"n1": [24000], "n2": [24001]}')
    with pytest.raises(UsageProblem, match="node n2 of job 7 did not answer"):
        ask_nodes(Recorded({"srun": told("n1")}), launcher(run).job)


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["ERROR x", "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***"], 1),
        (["slurmstepd-n1: error: *** STEP 7.2 ON n1 CANCELLED AT 2026 ***"], 0),
        (
            ["slurmstepd: error: Detected 1 oom_kill event in StepId=7.0."],
            0,
        ),
        (["srun: error: Unable to create step for job 7: Requested nodes are busy"], 0),
        (["pdperf: 1: exec: /opt/e/bin/vllm: not found"], 0),
        (["ValueError: out of memory", "srun: error: n1: task 0: Exited with exit code 1"], None),
    ],
)
def test_slurms_own_words_explain_an_end_and_an_engines_do_not(
    lines: Sequence[str], cause: int | None
) -> None:
    assert launcher(Recorded({})).cause(lines) == (None if cause is None else lines[cause])


def test_waiting_for_other_steps_is_a_stage() -> None:
    text = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    assert launcher(Recorded({})).stage(text) == "waiting for a place in the Slurm job"
    assert launcher(Recorded({})).stage("Loading weights took 3 s") is None


def test_the_probe_finds_taken_ports_and_the_way_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port, free = server.getsockname()[1], other.getsockname()[1]
        other.close()
        assert probe.taken("127.0.0.1", [port, free]) == [port]
    assert probe.address("127.0.0.1") == "127.0.0.1"


def test_jobs_of_dead_runs_are_found_by_their_mark_and_only_those_are_cancelled() -> None:
    rows = "1|pdperf-a|RUNNING|pdperf=1:2:here\n2|pdperf-b|PENDING|pdperf=3:4:here\n"
    rows += "3|train|RUNNING|(null)\n4|pdperf-c|RUNNING|pdperf=5:6:there\n5|pdperf-d|RUNNING|\n"
    owners = {"1:2:here": True, "3:4:here": False, "5:6:there": None}
    run = Recorded({"squeue": rows, "scancel": ""})
    found = left_jobs(run, owners.__getitem__, 1000)
    assert [(job.id, job.dead) for job in found] == [("2", True), ("4", False)]
    assert check_left_jobs(found, cancelled=False).level is Level.FAIL
    cancel(run, found)
    assert run.asked[1:] == ["scancel 2"]
    told = check_left_jobs(found, cancelled=True)
    assert told.level is Level.INFO and told.text == (
        "1 of dead runs were cancelled; "
        "Slurm job 4 (pdperf-c, running): of another machine, or from before this one booted"
    )
    assert check_left_jobs([], cancelled=False).level is Level.OK


def test_the_mark_of_a_job_is_that_of_this_process() -> None:
    run = Recorded({"squeue": f"1|pdperf-a|RUNNING|{owner_comment()}"})
    assert left_jobs(run) == []
    other_machine = owner_comment().replace(procfs.pid_space(), "another-boot/pid[4026531836]")
    run = Recorded({"squeue": f"1|pdperf-a|RUNNING|{other_machine}"})
    assert [job.dead for job in left_jobs(run)] == [False], "its pid means nothing here"
