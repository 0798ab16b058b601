-- Script for cli_filter/lua (slurm.conf(5), CliFilterPlugins=lua). It adds to jobs with --vm= what vsub
-- adds: the site's node feature, and the CPUs and memory per node that the user does not request.
-- Copy it as cli_filter.lua to the directory of slurm.conf on submit hosts, and set these two values.
local feature = "vtorque"
local vsub = "/opt/vtorque/bin/vsub"

local variables = { sbatch = "SBATCH_VM", salloc = "SALLOC_VM", srun = "SLURM_VM" }

local function needs(value)
  local quoted = "'" .. value:gsub("'", "'\\''") .. "'"
  local answer = io.popen(vsub .. " --request -vm " .. quoted .. " 2>/dev/null")
  local line = answer:read("*l") or ""
  answer:close()
  return line:match("^%S+ (%d+) (%d+)$") -- nothing: the SPANK plugin reports the error
end

local function add(options)
  local plugin = options.spank and options.spank.vtorque
  local value = plugin and plugin.vm or os.getenv(variables[options.type] or "SBATCH_VM")
  local step = options.type == "srun" and os.getenv("SLURM_JOB_ID")
  if not value or value == "" or value == "none" or step then
    return
  end
  local own = options.constraint
  if not own then
    options.constraint = feature
  elseif not own:find(feature, 1, true) then
    options.constraint = own:find("|", 1, true) and "(" .. own .. ")&" .. feature or own .. "&" .. feature
  end
  local cpus, mib = needs(value)
  if cpus and options["cpus-per-task"] == "0" and options.ntasks == "1" and options.mincpus == "-1" then
    options.mincpus = cpus
  end
  local memory = options.mem or options["mem-per-cpu"] or options["mem-per-gpu"]
  if mib and mib ~= "0" and not memory then
    options.mem = mib .. "M"
  end
end

function slurm_cli_setup_defaults(options, early)
  return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, component)
  if component == 0 then -- the other components of a heterogeneous job have no guests
    add(options)
  end
  return slurm.SUCCESS
end

function slurm_cli_post_submit(component, job, step)
  return slurm.SUCCESS
end
