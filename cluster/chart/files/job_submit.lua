-- A job that asks for a login shell's environment (--export=NONE, --get-user-env) would have slurmd make a PID namespace
-- for it, and end where its pod must not: releases without GetEnvTimeout cannot be told not to. So slurmd does not see
-- the wish, and the task prolog grants it, as the user, in his job.
function slurm_job_submit(job, partitions, uid)
  if job.environment and job.environment["SLURM_GET_USER_ENV"] == "1" then
    job.environment["SLURM_GET_USER_ENV"] = "task_prolog"
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end
