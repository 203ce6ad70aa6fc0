-- Made by the chart, which sets `has` above to what this cluster has. srun, sbatch and salloc run these functions with the
-- user's own rights before they ask slurmctld. A cli_filter.lua in slurm.files, or slurm.config.CliFilterPlugins, replaces
-- this file.

local SHOWN = 12
local LONGEST = 65536 -- bytes: one variable of 128 KiB, and no program of the job starts

-- Inside a step that srun started? The environment does not tell: sbatch hands a step's variables on to the next job.
local function in_a_step()
    local file = io.open("/proc/self/cgroup")
    local text = file and file:read("*a") or ""
    if file then file:close() end
    return text:find("/step_%d") ~= nil
end

-- The names that accounting has of a kind; none where it does not answer.
local function known(kind, field)
    local pipe = io.popen("timeout 3 sacctmgr -nP show " .. kind .. " format=" .. field .. " 2>/dev/null")
    local list = {}
    for line in pipe:lines() do list[#list + 1] = line end
    pipe:close()
    return list
end

local function holds(list, name)
    for _, one in ipairs(list) do
        if one == name:lower() then return true end
    end
    return false
end

local function shown(list)
    return table.concat(list, ", ", 1, math.min(#list, SHOWN)) .. (#list > SHOWN and ", ..." or "")
end

-- Slurm takes any account and QOS where it enforces none, and books the job to nobody. `own` is the one that Slurm makes:
-- a site that has no other does without, and scripts from elsewhere still run there. `mine` are those of the user.
local function is_known(kind, field, own, name, mine)
    if name == nil or name == "" then return true end
    local list = known(kind, field)
    if #list == 0 or holds(list, name) then return true end
    local text = ("minivm: --%s=%s: this cluster has no such %s"):format(kind, name, kind)
    if #list == 1 and list[1] == own then
        slurm.log_info("%s, nor any other; the job runs without it", text)
        return true
    end
    local choice = mine and #mine > 0 and "you may use " .. shown(mine) or "it has " .. shown(list)
    slurm.log_error("%s (%s); nothing was submitted", text, choice)
    return false
end

-- slurmctld's answer to another user's account is the same as to one that does not exist, and names none.
local function may_use_account(name)
    if name == nil or name == "" then return true end
    local mine = {}
    for _, one in ipairs(known('associations where user="$(/usr/bin/id -un)"', "account")) do
        if not holds(mine, one) then mine[#mine + 1] = one end
    end
    if holds(mine, name) then return true end
    if not is_known("account", "account", "root", name, mine) then return false end
    if not has.enforces or #mine == 0 then return true end -- of a user without any, job_submit.lua tells
    slurm.log_error("minivm: --account=%s: you are not in this account (you may use %s); nothing was submitted", name, shown(mine))
    return false
end

local function output(command)
    local pipe = io.popen(command .. " 2>/dev/null")
    local text = pipe:read("*a") or ""
    pipe:close()
    return text
end

-- A step on a node whose Slurm lacks the plug-in hangs: the launched daemon ends without a word, and srun waits for it.
-- This image tells for its own release alone. During an upgrade the nodes are of another than the login pod, and `has`
-- is of the controller's, which they are about to get.
local function can_launch(mpi)
    if mpi == nil or mpi == "" or mpi == "none" or mpi == "list" then return true end
    -- By full paths: the user's PATH may have neither. A listing without any plug-in says nothing.
    local present = output("/bin/ls /usr/lib/*/slurm*/mpi_*.so")
    if present == "" then return true end
    local is_here = mpi:find("^[%w_]+$") and present:find("/mpi_" .. mpi .. ".so", 1, true)
    local is_known = false
    for _, name in ipairs(has.mpi) do is_known = is_known or name == mpi end
    local why = "Slurm has no such plug-in in this image"
    if is_here then
        if is_known or os.getenv("SLURMD_NODENAME") then return true end
        local own = output("/usr/bin/scontrol --version")
        if own == "" or own:find(" " .. has.release, 1, true) then return true end
        why = ("this cluster is being upgraded to Slurm %s, which has no such plug-in"):format(has.release)
    end
    slurm.log_error("minivm: --mpi=%s: %s; start the program by mpirun, or by --mpi=%s; nothing was submitted",
        mpi, why, has.mpi[1])
    return false
end

-- A user's name or an address, as the service that sends the mail takes them: it asks again, for anybody can leave this out.
local function is_recipient(text)
    local before, domain = text:match("^([%w_][%w.#$&'*+/=^_`{|}~-]*)@([%w][%w.-]*)$")
    if before then
        local is_known = false
        for _, name in ipairs(has.domains) do is_known = is_known or name == "*" or name:lower() == domain:lower() end
        return is_known and #before <= 64 and #domain <= 190 and not text:find("..", 1, true)
    end
    return #text <= 64 and text:find("^[%w_][%w._-]*$") ~= nil
end

local function are_recipients(text)
    local number = 0
    for part in (text .. ","):gmatch("([^,]*),") do
        number = number + 1
        if number > 5 or not is_recipient(part) then return false end
    end
    return true
end

function slurm_cli_setup_defaults(options, early_pass)
    return slurm.SUCCESS
end

-- The user's own settings, ~/.config/minivm/notify.toml, are defaults of --mail-type and --mail-user. Slurm does not tell an
-- option NONE from none. The webhook is a secret: job_submit.lua takes it out of the job.
local OWN = '[ -f "$HOME/.config/minivm/notify.toml" ] && [ "$(/usr/bin/id -u)" != 0 ] && exec /usr/bin/minivm notify check --for-submission'
local function read_own_settings(options)
    local pipe = io.popen(OWN) -- its errors go to the user
    local events, mail, webhook = pipe:read("*l"), pipe:read("*l"), pipe:read("*l")
    pipe:close()
    local kind = options["mail-type"]
    if events and events ~= "" and (kind == nil or kind == "" or kind == "NONE") then options["mail-type"] = events end
    if mail and mail ~= "" and (options["mail-user"] or "") == "" then options["mail-user"] = mail end
    return webhook
end

-- job_submit.lua takes them out again and keeps them beside the job's script. Slurm's own text has no line break.
local function send_options(options)
    local made, text = pcall(slurm.json_cli_options, options)
    if made and text and #text <= LONGEST and not text:find("\n") then
        options["extra"] = "minivm:" .. text .. "\n" .. (options["extra"] or "")
    end
end

function slurm_cli_pre_submit(options, component)
    if options["container"] ~= nil and not has.containers then
        slurm.log_error("minivm: --container: this cluster has no container runtime (no oci.conf); nothing was submitted")
        return slurm.ERROR
    end
    if options["type"] == "srun" and not can_launch(options["mpi"]) then return slurm.ERROR end
    if options["type"] == "srun" and os.getenv("SLURM_JOB_ID") then
        -- A step within a step would wait for ever for what its own parent holds: it shares that instead.
        if options["exclusive"] ~= "exclusive" and in_a_step() then options["overlap"] = "yes" end
        return slurm.SUCCESS
    end
    if has.accounting then
        if not (may_use_account(options["account"]) and is_known("qos", "name", "normal", options["qos"])) then return slurm.ERROR end
    end
    -- Backfill gives a job without --time the limit of 365 days when it starts it.
    local limits = options["test-only"] == "set" and output("timeout 3 squeue -h -t R -o %l") or ""
    if limits:find("UNLIMITED") or limits:find("365-00:00:00", 1, true) then
        slurm.log_info("minivm: --test-only: a start in a far year means after a running job that has no --time")
    end
    local webhook = has.webhooks and read_own_settings(options)
    local mail = options["mail-type"]
    local is_wanted = mail ~= nil and mail ~= "" and mail ~= "NONE"
    if is_wanted and not has.mail then
        slurm.log_info("minivm: --mail-type: this cluster sends no mail (slurm.conf has no MailProg); the job runs without it")
    end
    local to = options["mail-user"]
    if is_wanted and has.addresses and to ~= nil and to ~= "" and not are_recipients(to) then
        slurm.log_error("minivm: --mail-user: expected a user's name or an address at %s, five at most with commas between; nothing was submitted",
            table.concat(has.domains, ", "))
        return slurm.ERROR
    end
    if has.brings_back and options["type"] == "sbatch" then send_options(options) end
    if has.webhooks and #has.webhooks > 0 then
        options["extra"] = "minivm-notify:" .. (webhook or "") .. "\n" .. (options["extra"] or "")
    end
    return slurm.SUCCESS
end

function slurm_cli_post_submit(component, job, step)
    return slurm.SUCCESS
end
