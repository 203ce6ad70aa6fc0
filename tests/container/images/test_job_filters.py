"""The chart's filters keep a job's submission beside its script, and change nothing else for it or for its own jobs."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from cluster.change.pinning import find_newest_here
from images.engine.docker import DockerEngine
from tests.container.conftest import IMAGES
from tests.support.rendered_chart import render

pytestmark = [pytest.mark.docker, pytest.mark.cluster]

# The image's own Lua, as Slurm's plug-ins load it.
RUN = """
import ctypes, ctypes.util, glob, os
(path, *_) = glob.glob("/usr/lib/*/liblua5.[0-9].so.0")
lua = ctypes.CDLL(path)
lua.luaL_newstate.restype = lua.lua_tolstring.restype = ctypes.c_void_p
lua.lua_tolstring.restype = ctypes.c_char_p
state = ctypes.c_void_p(lua.luaL_newstate())
lua.luaL_openlibs(state)
failed = lua.luaL_loadstring(state, os.environ["LUA"].encode()) or lua.lua_pcall(state, 0, 0, 0)
assert not failed, lua.lua_tolstring(state, -1, None)
"""
SLURM = """
slurm = {SUCCESS = 0, ERROR = -1, NO_VAL = 4294967294, log_info = print, log_error = print}
slurm.json_cli_options = function(options) return sent end
"""
JOB = 'job = {script = "x", user_id = 5, group_id = 6, work_dir = "/w", name = "n", het_job_offset = slurm.NO_VAL}\n'


def said(name: str, lua: str, values: dict[str, Any] | None = None) -> list[str]:
    """Run the chart's filter in the controller's image, and the lines after it; return what these print."""
    tags = find_newest_here(DockerEngine().client, IMAGES, slurm="24.11", variant="debian")
    if "controller" not in tags:
        pytest.skip(f"no controller image under {IMAGES}")
    documents = render({"accounting": {"mode": "none"}, **(values or {})}, release="slurm", namespace="hpc")
    (text,) = [item["data"][name] for item in documents if item["metadata"]["name"] == "slurm-config"]
    line = ["docker", "run", "--rm", "--network=none", "--entrypoint=/opt/minivm/bin/python3", "-e", "LUA",
            f"{IMAGES}/controller:{tags['controller']}", "-c", RUN]  # fmt: skip
    env = {"PATH": "/usr/bin:/bin", "LUA": f"{SLURM}{text}\n{lua}\nio.stdout:flush()"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


def test_long_arguments_are_not_sent_where_they_would_keep_the_job_from_running() -> None:
    """One variable of 128 KiB fails every execve of the job."""
    call = 'o = {type = "sbatch"}; sent = ("x"):rep(%d); slurm_cli_pre_submit(o, 0); print(#(o.extra or ""))\n'
    assert said("cli_filter.lua", call % 60000 + call % 70000) == [str(60000 + len("minivm:\n")), "0"]


def test_long_options_are_not_kept_whatever_sends_them() -> None:
    call = 'job.environment = {}; job.extra = "minivm:" .. ("x"):rep(%d) .. "\\nmine"; slurm_job_submit(job)\n'
    call += "print(#job.environment.MINIVM_JOB_OPTIONS, job.extra)\n"
    assert said("job_submit.lua", JOB + call % 60000 + call % 70000) == ["60000\tmine", "0\tmine"]


def test_what_marks_a_job_that_is_back_does_not_reach_the_jobs_that_it_submits() -> None:
    lua = (
        JOB
        + """
    local env = {MINIVM_BROUGHT_BACK = "8 unknown", MINIVM_WAS_SLURM_UMASK = "0027", SLURM_UMASK = "0022"}
    job.environment = env
    slurm_job_submit(job)
    print(job.admin_comment:match("^minivm: job 8 again, ") ~= nil, env.SLURM_UMASK, env.MINIVM_JOB_AGAIN)
    job.admin_comment, env.SLURM_UMASK = nil, "0077"
    slurm_job_submit(job)
    env.MINIVM_BROUGHT_BACK = "9 8"
    slurm_job_submit(job)
    print(job.admin_comment:match("^minivm: job 9 again, first job 8, held: ") ~= nil, env.MINIVM_JOB_AGAIN)
    job.admin_comment = nil
    slurm_job_submit(job)
    print(job.admin_comment, env.SLURM_UMASK, "[" .. env.MINIVM_JOB_AGAIN .. env.MINIVM_BROUGHT_BACK .. "]")
    """
    )
    assert said("job_submit.lua", lua) == ["true\t0027\t8", "true\t9 8", "nil\t0077\t[]"]


OF_USERS = {"notifications": {"webhook": {"ofUsers": ["https://hooks.example.org/u/"]}}}


def test_a_webhook_is_taken_out_of_the_job_and_kept_under_its_authenticated_user_alone() -> None:
    lua = (
        JOB
        + """
    os.execute("mkdir -p /var/lib/minivm/notify/users")
    local function kept(name) local f = io.open("/var/lib/minivm/notify/users/" .. name) return f and f:read("*a") end
    local function submit(text, name, uid)
        job.user_name, job.extra, job.environment = name, "minivm-notify:" .. text .. "\\nminivm:-J x\\nmine", {}
        slurm_job_submit(job, nil, uid)
        print(job.extra, job.environment.MINIVM_JOB_OPTIONS, kept("alice"))
    end
    submit("{1}", "alice", 5)
    submit("{2}", "alice", 6) -- root, or an operator, for alice
    submit(("x"):rep(3000), "alice", 5)
    submit("{3}", "../alice", 5)
    submit("{4}", "alice", 5)
    submit("", "alice", 5)
    submit("", "alice", 5)
    print(io.popen("ls -A /var/lib/minivm/notify/users /var/lib/minivm/notify"):read("*a"))
    """
    )
    kept = [line.split("\t") for line in said("job_submit.lua", lua, OF_USERS)]
    assert [line[:2] for line in kept[:7]] == [["mine", "-J x"]] * 7
    assert [line[2] for line in kept[:7]] == ["{1}", "{1}", "{1}", "{1}", "{4}", "nil", "nil"]
    assert "alice" not in str(kept[7:])


def test_a_user_s_own_settings_are_defaults_and_the_webhook_goes_first() -> None:
    lua = """
    local asked, answer = {}, "FAIL,END\\nalice@x.org\\n{hook}\\n"
    io.popen = function(line)
        asked[#asked + 1] = line
        local file = io.tmpfile(); file:write(answer); file:seek("set"); return file
    end
    sent = "-J x"
    for _, o in ipairs({{type = "sbatch", extra = "mine"}, {type = "sbatch", ["mail-type"] = "NONE"},
                        {type = "salloc", ["mail-type"] = "BEGIN", ["mail-user"] = "bob"}}) do
        print(slurm_cli_pre_submit(o, 0), o["mail-type"], o["mail-user"], (o.extra:gsub("\\n", "|")))
    end
    answer = ""
    local o = {type = "sbatch"}
    print(slurm_cli_pre_submit(o, 0), o["mail-type"], o["mail-user"], (o.extra:gsub("\\n", "|")))
    print(#asked)
    """
    assert said("cli_filter.lua", lua, OF_USERS) == [
        "0\tFAIL,END\talice@x.org\tminivm-notify:{hook}|minivm:-J x|mine",
        "0\tFAIL,END\talice@x.org\tminivm-notify:{hook}|minivm:-J x|",
        "0\tBEGIN\tbob\tminivm-notify:{hook}|",
        "0\tnil\tnil\tminivm-notify:|minivm:-J x|",
        "4",
    ]
    assert said("cli_filter.lua", "io.popen = nil; o = {}; print(slurm_cli_pre_submit(o, 0), o.extra)") == ["0\tnil"]


LINE = "[ ! -x /usr/bin/minivm ] || /usr/bin/minivm preflight || [ $? -ne 86 ] || exit 1"


def preflight(nodes: int, lua: str) -> list[str]:
    lua = "for _, job in ipairs({" + lua + "}) do slurm_job_submit(job); print(job.features, job.script) end"
    return said("job_submit.lua", lua, {"activeChecks": {"preflight": {"enabled": True, "nodes": nodes}}})


def test_a_job_that_asks_for_it_or_has_many_nodes_tests_them_first() -> None:
    wanted = '{min_nodes = slurm.NO_VAL, features = "gpu&preflight", script = "#!/bin/bash -l\\nwork\\n"}'
    large = '{min_nodes = 4, script = "#!/usr/bin/env bash\\nwork\\n"}'
    assert preflight(4, f"{wanted}, {large}") == [
        "gpu\t#!/bin/bash -l", LINE, "work", "", "nil\t#!/usr/bin/env bash", LINE, "work", "",
    ]  # fmt: skip


def test_other_jobs_are_left_as_they_are() -> None:
    small = '{min_nodes = 3, features = "preflighted", script = "#!/bin/sh\\nwork"}'
    python = '{min_nodes = 4, script = "#!/usr/bin/python3\\nwork"}'
    tested = f'{{min_nodes = 4, script = "#!/bin/sh\\n{LINE}\\nwork"}}'
    interactive = "{min_nodes = 4}"
    assert preflight(4, f"{small}, {python}, {tested}, {interactive}") == [
        "preflighted\t#!/bin/sh", "work", "nil\t#!/usr/bin/python3", "work", "nil\t#!/bin/sh", LINE, "work", "nil\tnil",
    ]  # fmt: skip
    by_env, csh = "#!/usr/bin/env -S A=b bash -e", "#!/usr/bin/env csh /bin/sh"
    firsts = ", ".join(
        f'{{min_nodes = 4, script = "{first}\\nwork"}}' for first in (by_env, csh, "#!/bin/perl sh", "#!")
    )
    assert preflight(4, firsts) == [
        f"nil\t{by_env}", LINE, "work", f"nil\t{csh}", "work", "nil\t#!/bin/perl sh", "work", "nil\t#!", "work",
    ]  # fmt: skip
    assert preflight(0, '{min_nodes = 99, script = "#!/bin/sh\\nwork"}') == ["nil\t#!/bin/sh", "work"]


def test_without_preflight_the_constraint_is_slurms_own() -> None:
    lua = JOB + 'job.features = "preflight"; slurm_job_submit(job); print(job.features, job.script)'
    assert said("job_submit.lua", lua) == ["preflight\tx"]


def test_a_user_without_any_account_reads_so() -> None:
    call = "slurm.log_user = print; print(slurm_job_submit(job) == slurm.SUCCESS)\n"
    call += 'job.default_account = "physics"; print(slurm_job_submit(job) == slurm.SUCCESS)\n'
    enforces = {"slurm": {"config": {"AccountingStorageEnforce": "associations"}}}
    first, *rest = said("job_submit.lua", JOB + call, enforces)
    assert first.startswith("minivm: you are in no account") and rest == ["true", "true"]
    assert said("job_submit.lua", JOB + call) == ["true", "true"]


def test_an_account_of_somebody_else_is_refused_with_those_of_the_user() -> None:
    """Refuse it only where the cluster enforces accounts: elsewhere slurmctld takes any account."""
    lua = """
    local answers = {["where user"] = "chem\\nchem\\n", ["show account "] = "chem\\nphysics\\n", qos = "normal\\n"}
    io.popen = function(command)
        local text = ""
        for part, answer in pairs(answers) do if command:find(part, 1, true) then text = answer end end
        return {lines = function() return text:gmatch("[^\\n]+") end, close = function() end}
    end
    slurm.log_error = function(form, ...) print(form:format(...)) end
    for _, name in ipairs{"CHEM", "physics", "nope"} do
        print(slurm_cli_pre_submit({type = "sbatch", account = name}, 0) == slurm.SUCCESS)
    end
    """
    values: dict[str, Any] = {"accounting": {"mode": "embedded"}, "slurm": {"bringBackJobs": False}}
    unknown = "minivm: --account=nope: this cluster has no such account (you may use chem); nothing was submitted"
    assert said("cli_filter.lua", lua, values) == ["true", "true", unknown, "false"]
    values["slurm"] |= {"config": {"AccountingStorageEnforce": "safe"}}
    other = "minivm: --account=physics: you are not in this account (you may use chem); nothing was submitted"
    assert said("cli_filter.lua", lua, values) == ["true", other, "false", unknown, "false"]
