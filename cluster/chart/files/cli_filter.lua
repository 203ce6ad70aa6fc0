-- Made by the chart, for a cluster without oci.conf. Slurm takes --container there and starts the program outside of
-- any: srun, sbatch and salloc refuse it before there is a job. slurm.files with an oci.conf or a cli_filter.lua of its
-- own, or slurm.config.CliFilterPlugins, replaces this.

function slurm_cli_setup_defaults(options, early_pass)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, component)
    if options["container"] ~= nil then
        slurm.log_error("minivm: --container: this cluster has no container runtime (no oci.conf); nothing was submitted")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_cli_post_submit(component, job, step)
    return slurm.SUCCESS
end
