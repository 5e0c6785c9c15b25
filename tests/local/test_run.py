"""`ddpjob run` as users see it, from outside. The trainings here import no torch."""

import fcntl
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import termios

import psutil
import pytest
import yaml
from shell import SECONDS_MAX, Cli, eventually, status_of

# ---------------------------------------------------------------- the end of a job


def test_a_job_succeeds_with_exit_code_0_its_lines_on_stdout_and_its_status_in_a_file(cli: Cli) -> None:
    job = cli.file("import os; print('hello from', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    done = cli.run("run", job, "--status", "status.json", code=0)
    assert sorted(done.stdout.splitlines()) == ["[0:0] hello from 0 of 2", "[1:1] hello from 1 of 2"]
    assert done.stderr.startswith("job · 2 nodes × 1 process · gloo · OMP_NUM_THREADS=1\n")
    assert re.search(r"✔ job Succeeded in \d+s", done.stderr)
    status = status_of(cli.folder / "status.json")
    assert (status["state"], status["completedNodes"]) == ("Succeeded", "0-1")
    assert [p.name for p in cli.folder.glob(".status*")] == [], "no temporary file is left"


def test_a_script_that_raises_only_on_rank_1_fails_the_job_and_the_rank_is_named(cli: Cli) -> None:
    job = cli.file(
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("no such shard: 7")
        time.sleep(1000)
        """,
        backoffLimit=0,
    )
    done = cli.run("run", job, "--status", "status.json")
    assert done.returncode == 1, "it ends: the other rank is stopped, it would wait for ever"
    assert re.search(
        r"✖ job Failed after \d+s: rank 1 \(node 1\) .*in train.py:4 \(ValueError: no such shard: 7", done.stderr
    )
    failure = status_of(cli.folder / "status.json")["lastFailure"]
    assert (failure["rank"], failure["exitCode"]) == (1, 1)
    assert "raise ValueError" in failure["logTail"]
    named = re.search(r"log: ddpjob (logs job .*)", done.stderr)
    assert named is not None, done.stderr
    assert "no such shard: 7" in cli.run(*named[1].split()).stdout, "the command that is named shows it"


def test_several_processes_per_node_get_no_rank_variable_and_the_node_is_named(cli: Cli) -> None:
    job = cli.file("import os; print(os.environ.get('RANK'), os.environ['PET_NPROC_PER_NODE'])", nprocPerNode=3)
    done = cli.run("run", job)
    assert sorted(done.stdout.splitlines()) == ["[0] None 3", "[1] None 3"]


def test_progress_reaches_the_status_over_an_authenticated_connection(cli: Cli) -> None:
    job = cli.file(
        """
        import json, os, urllib.request, urllib.error
        if os.environ["RANK"] == "0":
            token = open(os.environ["DDPJOB_STATUS_TOKEN_FILE"]).read().strip()
            assert token not in str(os.environ), "the token is not for everyone who reads the environment"
            def post(token, body):
                head = {"Authorization": "Bearer " + token}
                request = urllib.request.Request(os.environ["DDPJOB_STATUS_URL"], body, head)
                try: return urllib.request.urlopen(request).status
                except urllib.error.HTTPError as error: return error.code
            body = dict(step=5, totalSteps=10, rank=0, attempt=1, worldSize=2, metrics={"loss": "0.5"})
            body = json.dumps(body).encode()
            print(post("wrong", body), post(token, b"garbage"), post(token, body))
        """
    )
    done = cli.run("run", job, "--status", "status.json")
    assert "[0:0] 401 400 204" in done.stdout
    progress = status_of(cli.folder / "status.json")["progress"]
    assert (progress["step"], progress["percent"], progress["worldSize"]) == (5, 50, 2)
    assert "loss 0.5" in done.stderr


# ---------------------------------------------------------------- stopping

TRAINS = """
    import os, signal, sys, time
    def stop(*_): print("saving", flush=True); sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    print("trains", flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_job_gracefully_and_is_no_success(cli: Cli, number: signal.Signals) -> None:
    process = cli.start("run", cli.file(TRAINS), "--status", "status.json")
    eventually(lambda: status_of(cli.folder / "status.json").get("state") == "Running")
    assert {process.stdout.readline(), process.stdout.readline()} == {"[0:0] trains\n", "[1:1] trains\n"}
    process.send_signal(number)
    out, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 130
    assert out.count("saving") == 2, "every node had its chance to save"
    assert f"Stopping on {number.name}: 2 nodes, up to " in err
    assert "Suspended" not in err
    status = status_of(cli.folder / "status.json")
    assert (status["state"], status["message"]) == ("Suspended", "suspended; run it again to go on")
    assert "spec.suspend" not in err, "no field has stopped it"


def test_a_second_ctrl_c_stops_a_training_that_ignores_the_first(cli: Cli) -> None:
    script = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('trains')\ntime.sleep(1000)"
    command = ["ddprun", "--preload", "json", "train.py"]
    process = cli.start("run", cli.file(script, container={"command": command}, nodes=1))
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    eventually(lambda: "a second signal kills them now" in process.stderr.readline())
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=SECONDS_MAX)[1]
    assert process.returncode == 130
    assert err.endswith("; nothing was saved: it had to be killed by SIGKILL\n")


WORKERS = """
    import os, subprocess, sys, time
    # as torch does: workers in sessions of their own, which no process group reaches
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    workers = [subprocess.Popen(sleep, start_new_session=True) for _ in "ab"]
    print("trains", os.getpid(), flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["ddpjob run", "supervisor", "launcher", "worker"])
def test_after_kill_9_of_anything_no_process_survives(cli: Cli, victim: str) -> None:
    process = cli.start("run", cli.file(WORKERS, backoffLimit=0))
    assert process.stdout.readline()
    assert process.stdout.readline()
    everyone = eventually(lambda: (found := cli.marked()) and len(found) == 9 and found)
    runner = psutil.Process(process.pid)
    supervisor = next(p for p in everyone if p.ppid() == runner.pid)
    launcher = next(p for p in everyone if p.ppid() == supervisor.pid)
    worker = next(p for p in everyone if p.ppid() == launcher.pid)
    {"ddpjob run": runner, "supervisor": supervisor, "launcher": launcher, "worker": worker}[victim].kill()
    if victim == "supervisor":  # counts as a lost node: the job continues, backoffLimit is not charged
        eventually(lambda: "2 of 2 nodes are running, attempt 2" in process.stderr.readline())
    if victim in ("supervisor", "worker"):  # the job continues, because this launcher does not watch its workers
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == {"ddpjob run": -9, "launcher": 1}.get(victim, 130)
    eventually(lambda: not cli.marked())


def test_a_closed_stdout_ends_the_run_quietly(cli: Cli) -> None:
    process = cli.start("run", cli.file("while True: print('x' * 1000)"))
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(SECONDS_MAX) == 130
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    process.stderr.close()


# ---------------------------------------------------------------- two jobs, unusual output and input


def test_huge_output_long_lines_and_binary_bytes_all_pass(cli: Cli) -> None:
    job = cli.file(
        """
        import os, sys
        out = sys.stdout.buffer
        for n in range(30_000): out.write(b"line %d\\n" % n)
        out.write(b"x" * 10_000_000 + b"\\n\\xff\\xfe\\nlast\\n")
        """,
        nodes=1,
    )
    done = cli.run("run", job, "--logs", "logs")
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines), lines[-1]) == (0, 30_003, "[0:0] last")
    assert len(lines[30_000]) < 5_000
    (log,) = (cli.folder / "logs").glob("job/latest/job-1-0.log")
    assert log.stat().st_size > 10_000_000


def test_a_status_file_on_a_full_disk_is_reported_once_and_the_job_continues(cli: Cli) -> None:
    done = cli.run("run", cli.file("print(1)"), "--status", "/proc/status.json", code=0)
    assert done.stderr.count("--status /proc/status.json: ") == 1


def test_set_nodes_and_env_change_the_job(cli: Cli) -> None:
    job = cli.file("import os; print(os.environ['WORLD_SIZE'], os.environ['A'])")
    done = cli.run("run", job, "--nodes", "3", "--env", "A=x y", "--set", "metadata.name=other")
    assert sorted(done.stdout.splitlines()) == [f"[{n}:{n}] 3 x y" for n in range(3)]
    assert done.stderr.startswith("other · 3 nodes")


@pytest.mark.parametrize(
    ("spec", "options", "sentence"),
    [
        ({"nodes": 0}, [], "job.yaml:6: spec.nodes: must be at least 1, is 0"),
        ({}, ["--nodes", "two"], '--nodes: spec.nodes: must be a whole number of at least 1, is "two"'),
        ({}, ["--job", "other"], "no DDPJob named other"),
        ({"suspend": True}, [], "spec.suspend: is true, so nothing would start"),
        ({"container": {"command": ["trochrun", "x.py"]}}, [], '"trochrun" is not a program on this machine'),
        ({"container": {"command": ["torchrun", "--standalone", "x"]}}, [], "torchrun --standalone is for one node"),
        ({"container": {"resources": {"limits": {"nvidia.com/gpu": 16}}}}, [], "--cpu"),
        (
            {"backend": "nccl"},
            ["--env", "CUDA_VISIBLE_DEVICES="],
            "error[nccl-without-gpu]: nccl needs a GPU in each process",
        ),
        ({"container": {"command": "python -c 1"}}, [], 'must be a list of words, is "python -c 1"'),
        ({"container": {"command": None, "args": ["--epochs"]}}, [], "has args and no command"),
        ({"container": {"command": ["python3", "-u", "nowhere.py"]}}, [], "there is no file nowhere.py in "),
        ({}, ["--status", "no/such/folder.json"], "--status no/such/folder.json: there is no such folder"),
        ({}, ["--metrics-file", "no/such/x.prom"], "--metrics-file no/such/x.prom: there is no such folder"),
        ({}, ["--report", "no/such/run.html"], "--report no/such/run.html: there is no such folder"),
    ],
)
def test_wrong_input_ends_with_2_before_anything_starts(cli, spec, options, sentence):
    done = cli.here("run", cli.file("print('started')", **spec), *options)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stdout == ""


def test_a_script_that_is_in_neither_folder_is_named_with_both(cli: Cli) -> None:
    cli.file("pass", container={"command": ["python3", "nowhere.py"]})
    other = cli.folder / "other"
    other.mkdir()
    words = [sys.executable, "-m", "ddpjob_cli", "run", "../job.yaml"]
    done = subprocess.run(words, cwd=other, env=cli.env, capture_output=True, text=True, check=False)
    assert f"there is no file nowhere.py in {cli.folder} or {other}" in done.stderr


NCCL = """
import torch.distributed as dist

print("started", flush=True)
dist.init_process_group("nccl")
"""
WARNED = """
import fcntl
import os
import sys
import termios

if "torch" in sys.modules:  # never: what is checked need not be imported
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.save(torch.nn.Linear(1, 1), "model.pt")
print("started", os.environ["RANK"], flush=True)
"""


def test_an_error_that_check_knows_stops_a_run_before_anything_starts(cli: Cli) -> None:
    """An error that the check knows must stop a run before anything starts, and not after four attempts."""
    job = cli.file(NCCL)
    done = cli.run("run", job)
    assert (done.returncode, done.stdout) == (2, "")
    first, last = done.stderr.splitlines()
    assert first.startswith("train.py:5: error[nccl-without-gpu]: ")
    assert last == "not started: 1 error; fix it, or run with --no-check"


def test_no_check_starts_a_job_with_a_known_error(cli: Cli) -> None:
    """With --no-check the job must start, because a rule of the check may be wrong."""
    done = cli.run("run", cli.file(NCCL.replace("import torch.distributed as dist", ""), backoffLimit=0), "--no-check")
    assert done.returncode == 1
    assert "started" in done.stdout
    assert "nccl-without-gpu" not in done.stderr


def test_a_warning_is_shown_and_the_job_runs(cli: Cli) -> None:
    done = cli.run("run", cli.file(WARNED), code=0)
    assert done.stdout.count("started") == 2
    assert re.match(r"train.py:\d+: warning\[save-on-every-rank\]: ", done.stderr.splitlines()[0])


def test_a_script_that_reports_no_steps_gets_no_limit_for_hangs_and_no_fault_at_a_step(cli: Cli) -> None:
    """A script that reports no steps must get a message: limits for hangs and faults at a step have no effect."""
    job = cli.file("print('started')")
    done = cli.run("run", job, "--set", "spec.stall.timeoutSeconds=8")
    assert done.returncode == 0
    assert "A hang of this script will not be detected: train.py reports no steps" in done.stderr
    assert "will not be detected" not in cli.run("run", job).stderr, "who sets no limit has not asked"
    done = cli.run("run", job, "--fail", "rank=1,step=5,exit=3", code=2)
    assert done.stderr.startswith("--fail rank=1,step=5,exit=3: train.py reports no steps")


def test_output_of_a_script_that_starts_its_ranks_is_not_ascribed_to_rank_0(cli: Cli) -> None:
    """Output of a script that starts its ranks must not be ascribed to rank 0, because all workers share a stream."""
    workers = "mp.get_context('fork').Process(target=os.write, args=(1, b'worker\\n'))"
    job = cli.file(f"import multiprocessing as mp, os\nfor _ in (0, 1): {workers}.start()", nodes=1)
    done = cli.run("run", job, code=0)
    assert done.stdout.splitlines() == ["[0] worker", "[0] worker"]
    assert done.stderr.startswith("job · 1 node × processes of the script · gloo")
    cli.run("logs", "job", "--rank", "1", code=2, says="starts its ranks; choose with --node")
    assert "1 node × processes of the script" in cli.run("report", "job", code=0).stdout


def test_a_user_value_that_may_separate_the_ranks_wins_and_is_named_once(cli: Cli) -> None:
    done = cli.run("run", cli.file("import os; print(os.environ['MASTER_ADDR'])"), "--env", "MASTER_ADDR=10.0.0.1")
    assert sorted(done.stdout.splitlines()) == ["[0:0] 10.0.0.1", "[1:1] 10.0.0.1"]
    assert done.stderr.count("MASTER_ADDR: your value replaces the job's") == 1


def test_cpu_runs_a_gpu_job_with_the_same_number_of_ranks_on_gloo(cli: Cli) -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
    job = cli.file("import os; print(os.environ['DDPJOB_WORLD_SIZE'], os.environ['DDPJOB_BACKEND'])", container=gpus)
    done = cli.run("run", job, "--cpu")
    assert (
        done.stdout.splitlines() == ["[0] 4 gloo", "[1] 4 gloo"] or sorted(done.stdout.splitlines())[1] == "[1] 4 gloo"
    )
    assert "2 GPUs on each node are not used; 4 ranks train with gloo" in done.stderr


def test_an_unsupported_field_is_refused_unless_the_user_allows_it(cli: Cli) -> None:
    job = cli.file("print('ran')", container={"envFrom": [{"secretRef": {"name": "s"}}]})
    refused = cli.run("run", job, code=2)
    assert re.search(
        r"job\.yaml:\d+: spec\.template\.spec\.containers\[0\]\.envFrom: there are no Secrets", refused.stderr
    )
    allowed = cli.run("run", job, "--allow-unsupported")
    assert allowed.returncode == 0
    assert "ignored: spec.template.spec.containers[0].envFrom: there are no Secrets" in allowed.stderr


def test_a_full_disk_behind_stdout_loses_lines_and_does_not_stop_the_training(cli: Cli) -> None:
    with open("/dev/full", "w") as full:
        done = cli.run("run", cli.file("print(1); open('trained', 'w')"), "--logs", "logs", stdout=full)
    assert done.returncode == 0
    assert done.stderr.count("stdout: No space left on device") == 1
    assert (cli.folder / "trained").exists()


def test_a_status_file_follows_a_link_and_does_not_replace_a_device(cli: Cli) -> None:
    (cli.folder / "link.json").symlink_to("real.json")
    assert cli.run("run", cli.file("pass"), "--status", "link.json").returncode == 0
    assert (cli.folder / "link.json").is_symlink()
    assert status_of(cli.folder / "real.json")["state"] == "Succeeded"
    ours, theirs = os.openpty()
    device = os.ttyname(theirs)
    assert cli.run("run", cli.file("pass"), "--status", device).returncode == 0
    assert stat.S_ISCHR(os.stat(device).st_mode)
    assert b'"state": "Pending"' in os.read(ours, 4096)
    os.close(ours)
    os.close(theirs)


def test_a_relative_log_folder_does_not_depend_on_the_working_directory_of_the_script(cli: Cli) -> None:
    script = "import os; os.chdir('/'); print(os.path.exists(os.environ['DDPJOB_STATUS_TOKEN_FILE']))"
    done = cli.run("run", cli.file(script), "--logs", "logs")
    assert sorted(done.stdout.splitlines()) == ["[0:0] True", "[1:1] True"]


def test_a_relative_working_folder_starts_from_the_folder_of_the_command(cli: Cli) -> None:
    (cli.folder / "src").mkdir()
    (cli.folder / "src/train.py").write_text("import os; print(os.path.basename(os.getcwd()))")
    job = cli.file("", container={"workingDir": "src"}, nodes=1)
    (cli.folder / "train.py").unlink()
    done = cli.run("run", job, code=0)
    assert done.stdout.split()[-1] == "src"


def test_a_working_directory_on_an_empty_dir_is_created(cli: Cli) -> None:
    mounts = {"volumeMounts": [{"name": "d", "mountPath": "/work"}], "workingDir": "/work/sub", "command": ["pwd"]}
    body = yaml.safe_load(cli.file("", container=mounts).read_text())
    body["spec"]["template"]["spec"]["volumes"] = [{"name": "d", "emptyDir": {}}]
    (cli.folder / "w.yaml").write_text(yaml.safe_dump(body))
    done = cli.run("run", "w.yaml", code=0)
    assert all(line.endswith("/d/sub") for line in done.stdout.splitlines())


def test_output_after_the_reader_has_closed_is_no_error(cli: Cli) -> None:
    for words in (["crd"], ["run", cli.file("pass"), "--dry-run"]):
        process = cli.start(*words, stdout=subprocess.PIPE)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(SECONDS_MAX) == 0
        process.stderr.close()


def test_dry_run_prints_what_a_cluster_would_get_and_starts_nothing(cli: Cli) -> None:
    done = cli.run("run", cli.file("print('started')"), "--dry-run")
    kinds = [(o["kind"], o["metadata"]["name"]) for o in yaml.safe_load_all(done.stdout)]
    assert kinds == [("Service", "job"), ("Pod", "job-1-0"), ("Pod", "job-1-1")]
    assert done.stderr == ""


def test_an_active_deadline_also_stops_a_local_job(cli: Cli) -> None:
    done = cli.run("run", cli.file("import time; time.sleep(1000)", activeDeadlineSeconds=1))
    assert done.returncode == 1
    assert "not finished within activeDeadlineSeconds: 1" in done.stderr


def test_only_the_logs_and_the_record_of_a_run_remain(cli: Cli) -> None:
    mount = {"volumeMounts": [{"name": "d", "mountPath": "/data"}], "command": ["touch", "/data/x"]}
    body = cli.file("", container=mount)
    document = yaml.safe_load(body.read_text())
    document["spec"]["template"]["spec"]["volumes"] = [{"name": "d", "emptyDir": {}}]
    body.write_text(yaml.safe_dump(document))
    assert cli.run("run", body).returncode == 0
    left = [p.name for p in (cli.folder / "state").rglob("*") if p.is_file()]
    record = ["history.json", "run.json", "status.json"]
    assert sorted(left) == [".ddpjob-run", *record[:1], "job-1-0.log", "job-1-1.log", *record[1:]], (
        "a later run removes them"
    )


def test_a_process_that_was_running_before_survives_the_run(cli: Cli) -> None:
    """A process that was running before must survive, as in `tensorboard & exec ddpjob run job.yaml`."""
    job = cli.file("pass")
    entry = f"sleep 1000 & echo $! > sibling.pid; exec {sys.executable} -m ddpjob_cli run {job}"
    with (cli.folder / "err").open("w") as err:  # a file, because the sibling would hold a pipe open
        done = subprocess.run(
            ["sh", "-c", entry], cwd=cli.folder, env=cli.env, stdout=err, stderr=err, timeout=SECONDS_MAX
        )
    sibling = psutil.Process(int((cli.folder / "sibling.pid").read_text()))
    try:
        assert done.returncode == 0, (cli.folder / "err").read_text()
        assert sibling.status() != psutil.STATUS_ZOMBIE
    finally:
        sibling.kill()
        eventually(lambda: not cli.marked())


def test_a_local_run_needs_no_gang_and_reports_that_it_has_none(cli: Cli) -> None:
    """A local run ignores the gang and reports this, because all processes start on one machine without a scheduler."""
    job = cli.file("print('trained')", gang="native", topologyKey="rack")
    done = cli.run("run", job)
    assert done.stdout.count("trained") == 2
    assert "without effect on local processes: spec.gang, spec.topologyKey" in done.stderr


SAVES = """
    import os, signal, sys, time
    def stop(*_):
        time.sleep(0.5)
        open("saved-" + os.environ["RANK"], "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    open("trains-" + os.environ["RANK"], "w").close()
    time.sleep(1000)
"""


def trains(cli: Cli) -> bool:
    return len(list(cli.folder.glob("trains-*"))) == 2


def saved(cli: Cli) -> list[str]:
    return sorted(path.name for path in cli.folder.glob("saved-*"))


def test_a_closed_terminal_leaves_the_nodes_their_grace_to_save(cli: Cli) -> None:
    ours, theirs = os.openpty()
    cli.env |= {"TERM": "xterm-256color"}
    process = cli.start(
        "run",
        cli.file(SAVES),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    eventually(lambda: trains(cli))
    os.close(ours)
    assert process.wait(SECONDS_MAX) == 130
    assert saved(cli) == ["saved-0", "saved-1"]


def test_a_full_disk_behind_stderr_loses_messages_and_does_not_stop_the_training(cli: Cli) -> None:
    with open("/dev/full", "w") as full:
        done = cli.start("run", cli.file("print(1)"), stderr=full)
        assert done.communicate(timeout=SECONDS_MAX)[0].count(" 1\n") == 2
    assert done.returncode == 0


def test_under_nohup_a_closed_terminal_stops_nothing(cli: Cli) -> None:
    """A training started with `nohup ddpjob run … &` must continue after logout."""
    script = f"{SAVES.rpartition('time.sleep')[0]}while not os.path.exists('go'): time.sleep(0.05)"
    process = cli.start("run", cli.file(script), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    eventually(lambda: trains(cli))
    process.send_signal(signal.SIGHUP)
    (cli.folder / "go").touch()
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, err
    assert saved(cli) == []


def test_the_error_about_a_full_log_disk_names_the_disk(cli: Cli) -> None:
    """The error about a full disk must name it: `None: No space left on device` does not."""
    full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))}
    done = cli.run("run", cli.file("pass"), "--logs", "logs", **full)
    assert (done.returncode, done.stderr) == (
        2, "logs/job: File too large: logs cannot be written there; choose a folder with --logs\n",
    )  # fmt: skip


def test_a_folder_that_cannot_be_created_gives_an_error_of_one_line(cli: Cli) -> None:
    """A folder that only root may create, such as `/mnt/snapshots`, must give an error of one line."""
    (cli.folder / "file").touch()
    volume = {"name": "v", "hostPath": {"path": f"{cli.folder}/file/snapshots", "type": "DirectoryOrCreate"}}
    job = cli.file("pass", container={"volumeMounts": [{"name": "v", "mountPath": "/snapshots"}]})
    document = yaml.safe_load(job.read_text())
    document["spec"]["template"]["spec"]["volumes"] = [volume]
    job.write_text(yaml.safe_dump(document))
    done = cli.run("run", job)
    assert done.returncode == 1
    assert f"✖ job stopped: node 0 cannot be started: {cli.folder}/file/snapshots: Not a directory\n" in done.stderr


def test_a_character_missing_in_the_locale_is_replaced(cli: Cli) -> None:
    """A character that the locale lacks, such as € in ISO-8859-1, must be replaced and not end the run."""
    cli.env["PYTHONIOENCODING"] = "latin-1"
    job = cli.file("import os; os.write(1, 'costs 5 €\\n'.encode())")
    done = cli.run("run", job, "--logs", "logs", code=0, is_forked=False)
    assert r"[0:0] costs 5 \u20ac" in done.stdout
    (log,) = (cli.folder / "logs").glob("job/latest/job-1-0.log")
    assert log.read_text(encoding="utf-8") == "costs 5 €\n"


@pytest.mark.parametrize("to_file", [False, True])
def test_a_status_on_stdout_does_not_overwrite_other_output(cli: Cli, to_file: bool) -> None:
    """`ddpjob run … --status /dev/stdout` must work with a pipe or a file, and must not replace other output."""
    with (cli.folder / "printed").open("w") as printed:
        out = {"stdout": printed} if to_file else {}
        done = cli.run("run", cli.file("print('from a rank')"), "--status", "/dev/stdout", is_forked=False, **out)
    assert done.returncode == 0
    assert "goes on without it" not in done.stderr
    text = (cli.folder / "printed").read_text() if to_file else done.stdout
    assert "from a rank" in text
    assert '"state": "Succeeded"' in text
