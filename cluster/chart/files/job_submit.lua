-- Made by the chart, which sets `has` above. slurmctld runs these functions for each job, before it answers. A
-- job_submit.lua in slurm.files, or slurm.config.JobSubmitPlugins, replaces this file.

local LONGEST = 65536 -- bytes: one variable of 128 KiB, and no program of the job starts

-- What sbatch tells of its own surroundings: of a job that is brought back, those of the first submission.
local TOLD = {
  "HOSTNAME", "SLURM_EXPORT_ENV", "SLURM_PRIO_PROCESS", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "SLURM_UMASK",
  "SLURM_RLIMIT_AS", "SLURM_RLIMIT_CORE", "SLURM_RLIMIT_CPU", "SLURM_RLIMIT_DATA", "SLURM_RLIMIT_FSIZE", "SLURM_RLIMIT_MEMLOCK",
  "SLURM_RLIMIT_NOFILE", "SLURM_RLIMIT_NPROC", "SLURM_RLIMIT_RSS", "SLURM_RLIMIT_STACK",
}

-- Slurm answers sbatch seconds before it saves the job, but it has written the job's script and environment by then. With
-- the owner and the options among them the job can be submitted again after slurmctld was killed (init.slurm.lost_jobs).
local function keep_submission(job)
  local options, extra = (job.extra or ""):match("^minivm:([^\n]*)\n?(.*)$")
  if options then job.extra = extra end
  local env = job.environment
  if not (has.brings_back and job.script and env) then return end
  -- What marks a job that is back is emptied: the job's own submissions inherit its environment.
  local again, first, note = (env["MINIVM_BROUGHT_BACK"] or ""):match("^(%d+) ?(%d*) ?(%l*)$")
  if again then
    job.admin_comment = ("minivm: job %s again,%s held: slurmctld was killed before it had saved that job, which may have run%s. "
      .. "Run it: scontrol release; or scancel"):format(again, first ~= "" and (" first job %s,"):format(first) or "",
      note == "unknown" and "; only its #SBATCH options are known" or "")
    env["MINIVM_BROUGHT_BACK"] = ""
  end
  for _, name in ipairs(TOLD) do
    local value = env["MINIVM_WAS_" .. name]
    if value and value ~= "" then
      if again then env[name] = value end
      env["MINIVM_WAS_" .. name] = ""
    end
  end
  env["MINIVM_JOB_AGAIN"] = again and (first ~= "" and again .. " " .. first or again) or ""
  env["MINIVM_JOB_OWNER"] = ("%d:%d"):format(job.user_id, job.group_id)
  env["MINIVM_JOB_DIR"] = job.work_dir or "/"
  env["MINIVM_JOB_NAME"] = job.name or ""
  -- A component of a heterogeneous job is no job by itself: its options do not tell that.
  env["MINIVM_JOB_OPTIONS"] = job.het_job_offset == slurm.NO_VAL and options and #options <= LONGEST and options or ""
end

-- A user's own webhook comes with each of his submissions, and the service `notify` reads the last one. slurmctld waits for
-- this function: it writes only what has changed.
local OWN = "/var/lib/minivm/notify/users/"

local function keep_webhook(job, uid)
  local text, extra = (job.extra or ""):match("^minivm%-notify:([^\n]*)\n?(.*)$")
  if not text then return end
  job.extra = extra
  local name = job.user_name or ""
  if not has.webhooks or uid ~= job.user_id or uid == 0 or #text > 2048 then return end
  if #name > 64 or not name:find("^[%w_][%w._-]*$") then return end
  local file = io.open(OWN .. name)
  local before = file and file:read("*a") or ""
  if file then file:close() end
  if text == before then return end
  if text == "" then os.remove(OWN .. name) return end
  local unfinished = OWN .. ":" .. name
  file = io.open(unfinished, "w")
  if not file then return end
  local is_written = file:write(text)
  if file:close() and is_written then os.rename(unfinished, OWN .. name) else os.remove(unfinished) end
end

local SHELLS = {bash = true, dash = true, ksh = true, sh = true, zsh = true}
-- 86: the job is requeued. After any other end of the test the job runs, also under `sh -e`.
local PREFLIGHT = "[ ! -x /usr/bin/minivm ] || /usr/bin/minivm preflight || [ $? -ne 86 ] || exit 1\n"

-- Tell if the script's first line starts a shell, by itself or by env with options and variables.
local function starts_a_shell(first)
  local by_env = false
  for word in first:sub(3):gmatch("%S+") do
    local name = word:match("[^/]+$")
    if SHELLS[name] then return true end
    if name == "env" then by_env = true
    elseif not by_env or not (word:sub(1, 1) == "-" or word:find("=", 1, true)) then return false end
  end
  return false
end

-- Tell if the job has the constraint `preflight`, which is a wish and no feature of a node, and remove it.
local function asks_for_preflight(job)
  local features = job.features or ""
  local rest = ("&" .. features .. "&"):gsub("&preflight&", "&", 1)
  if #rest == #features + 2 then return false end
  job.features = rest:sub(2, -2)
  return true
end

-- A shell script of a job of many nodes tests them before its first command, at each start. The comments before it stay
-- where they are: a job that is brought back is submitted by this script, and sbatch reads no #SBATCH line after a command.
local function test_nodes_first(job)
  if not has.preflight then return end
  local nodes = job.min_nodes ~= slurm.NO_VAL and job.min_nodes or 1
  local wanted = asks_for_preflight(job) or (has.preflight > 0 and nodes >= has.preflight)
  local script = job.script or ""
  local first = script:match("^#![^\n]*\n")
  if not wanted or not first or not starts_a_shell(first) then return end
  local at = #first + 1
  for _ = 1, 1000 do -- slurmctld waits for this function: a script may be millions of comments
    local comment = script:match("^%s*\n", at) or script:match("^[ \t]*#[^\n]*\n", at)
    if not comment then break end
    at = at + #comment
  end
  if script:sub(at, at + #PREFLIGHT - 1) ~= PREFLIGHT then job.script = script:sub(1, at - 1) .. PREFLIGHT .. script:sub(at) end
end

-- slurmctld refuses the job with the same words as for a wrong account, and does not say that its user has none at all.
local function explain_no_account(job)
  if not has.enforces or job.default_account then return end
  slurm.log_user("minivm: you are in no account, and this cluster takes no job without one; ask an operator: "
    .. "sacctmgr add user NAME account=ACCOUNT, or accounts.yaml")
end

-- A job that asks for a login shell's environment (--export=NONE, --get-user-env) would have slurmd make a PID namespace
-- for it, and end where its pod must not: releases without GetEnvTimeout cannot be told not to. So slurmd does not see
-- the wish, and the task prolog grants it, as the user, in his job.
function slurm_job_submit(job, partitions, uid)
  if has.hides_user_env and job.environment and job.environment["SLURM_GET_USER_ENV"] == "1" then
    job.environment["SLURM_GET_USER_ENV"] = "task_prolog"
  end
  explain_no_account(job)
  test_nodes_first(job)
  keep_webhook(job, uid)
  keep_submission(job)
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end
