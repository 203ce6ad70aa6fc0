{{/* slurm.conf: the chart's lines, over them the profile's and slurm.config, then nodes, partitions and slurm.extraConfig. */}}
{{- define "minivm.slurm.conf" -}}
{{- $root := . -}}
{{- $full := include "minivm.fullname" . -}}
{{- $gresTypes := list -}}
{{- $grows := false -}}
{{- range $name, $_ := include "minivm.pools" . | fromJson -}}
  {{- $pool := include "minivm.pool" (dict "root" $root "name" $name) | fromJson -}}
  {{- if gt (int $pool.gpu.count) 0 }}{{ $gresTypes = append $gresTypes "gpu" }}{{ end -}}
  {{- range $pool.gres }}{{ $gresTypes = append $gresTypes (index (splitList ":" .) 0) }}{{ end -}}
  {{- if or $pool.elastic $pool.externalScaling $pool.perNode }}{{ $grows = true }}{{ end -}}
{{- end -}}
{{- $cgroup := eq .Values.slurm.proctrack "cgroup" -}}
{{- $facts := include "minivm.slurm.facts" . | fromJson -}}
{{- $lines := dict
  "AuthType" (printf "auth/%s" (include "minivm.auth" .))
  "CredType" (printf "cred/%s" (include "minivm.auth" .))
  "AuthAltTypes" "auth/jwt"
  "AuthAltParameters" (printf "jwt_key=/etc/slurm/jwt_hs256.key,%s" (ternary "disable_token_creation" (printf "max_token_lifespan=%d" (int .Values.slurm.userTokenSeconds)) (eq (int .Values.slurm.userTokenSeconds) 0)))
  "DisableRootJobs" "YES"
  "SlurmUser" "slurm"
  "SlurmctldPort" "6817"
  "SlurmdPort" "6818"
  "SrunPortRange" "60001-63000"
  "StateSaveLocation" "/var/spool/slurmctld"
  "SlurmdSpoolDir" "/var/spool/slurmd"
  "SlurmctldPidFile" "/run/slurm/slurmctld.pid"
  "SlurmdPidFile" "/run/slurm/slurmd.pid"
  "SlurmctldParameters" "enable_configless,conmgr_max_connections=8192,rl_enable,rl_bucket_size=1000,rl_refill_rate=100"
  "SelectType" "select/cons_tres"
  "SelectTypeParameters" "CR_Core_Memory"
  "ReturnToService" "2"
  "SlurmctldTimeout" "60"
  "SlurmdTimeout" "120"
  "MessageTimeout" "20"
  "MinJobAge" "300"
  "KillWait" "30"
  "UnkillableStepTimeout" "180"
  "InactiveLimit" "600"
  "JobRequeue" "1"
  "JobFileAppend" "1"
  "GetEnvTimeout" "0"
  "DefMemPerCPU" "1024"
  "LaunchParameters" "use_interactive_step"
  "MpiDefault" (default (first $facts.mpi) .Values.slurm.mpiDefault)
  "PropagateResourceLimitsExcept" "DATA,MEMLOCK,NPROC"
  "ProctrackType" (ternary "proctrack/cgroup" "proctrack/linuxproc" $cgroup)
  "TaskPlugin" (ternary "task/cgroup,task/affinity" "task/affinity" $cgroup)
  "PrologFlags" (ternary "Alloc,Contain" "Alloc" $cgroup)
  "JobAcctGatherType" (ternary "jobacct_gather/cgroup" "jobacct_gather/linux" $cgroup)
-}}
{{- /* Users reach a socket of slurmd, which 50 silent connections would block for all clients (24.11). */ -}}
{{- if eq (include "minivm.auth" .) "slurm" }}{{ $_ := set $lines "SlurmdParameters" "conmgr_max_connections=8192" }}{{ end -}}
{{- if eq .Values.slurm.nodeMode "dynamic" -}}
  {{- $_ := set $lines "MaxNodeCount" (toString .Values.slurm.maxNodes) -}}
  {{- $_ := set $lines "TreeWidth" "65533" -}}
{{- end -}}
{{- /* 26.05 lets a job wait that is larger than its partition, which a pool that grows needs, and which no other can run. */ -}}
{{- if not $grows }}{{ $_ := set $lines "EnforcePartLimits" "ANY" }}{{ end -}}
{{- if $gresTypes }}{{ $_ := set $lines "GresTypes" (join "," (uniq $gresTypes)) }}{{ end -}}
{{- if and .Values.slurm.topologyConfig (eq (include "minivm.topologyFile" .) "topology.conf") }}{{ $_ := set $lines "TopologyPlugin" "topology/tree" }}{{ end -}}
{{- if .Values.slurm.scripts.enabled -}}
  {{- $_ := set $lines "UnkillableStepProgram" "/usr/libexec/minivm/unkillable" -}}
  {{- $_ := set $lines "Prolog" "/usr/libexec/minivm/prolog" -}}
  {{- $_ := set $lines "Epilog" "/usr/libexec/minivm/epilog" -}}
  {{- $_ := set $lines "TaskProlog" "/usr/libexec/minivm/task_prolog" -}}
  {{- /* From this log come the ends of tasks in jobs' black boxes (health/black_box.py). */ -}}
  {{- $_ := set $lines "SlurmdDebug" "verbose" -}}
  {{- $_ := set $lines "SlurmdLogFile" "/var/log/minivm/slurmd.log" -}}
  {{- if $cgroup }}{{ $_ := set $lines "TaskEpilog" "/usr/libexec/minivm/task_epilog" }}{{ end -}}
  {{- if gt (int .Values.slurm.scripts.healthCheckInterval) 0 -}}
    {{- $_ := set $lines "HealthCheckProgram" "/usr/libexec/minivm/health" -}}
    {{- $_ := set $lines "HealthCheckNodeState" "ANY" -}}
    {{- $_ := set $lines "HealthCheckInterval" (toString .Values.slurm.scripts.healthCheckInterval) -}}
  {{- end -}}
  {{- with .Values.slurm.scripts.prologEpilogTimeout -}}
    {{- $_ := set $lines "PrologEpilogTimeout" (toString .) -}}
    {{- $_ := set $lines "BatchStartTimeout" $lines.PrologEpilogTimeout -}}
  {{- end -}}
{{- end -}}
{{- if eq .Values.accounting.mode "none" -}}
  {{- $_ := set $lines "AccountingStorageType" "accounting_storage/none" -}}
{{- else -}}
  {{- $_ := set $lines "AccountingStorageType" "accounting_storage/slurmdbd" -}}
  {{- $_ := set $lines "AccountingStorageHost" (include "minivm.accountingHost" .) -}}
  {{- $_ := set $lines "AccountingStoragePort" "6819" -}}
  {{- if $gresTypes }}{{ $_ := set $lines "AccountingStorageTRES" (printf "gres/%s" (join ",gres/" (uniq $gresTypes))) }}{{ end -}}
{{- end -}}
{{- if include "minivm.slurmMetrics" . }}{{ $_ := set $lines "MetricsType" $facts.metrics }}{{ end -}}
{{- if include "minivm.filtersCommands" . }}{{ $_ := set $lines "CliFilterPlugins" "cli_filter/lua" }}{{ end -}}
{{- if eq (index $facts "user-env") "job_submit" }}{{ $_ := unset $lines "GetEnvTimeout" }}{{ end -}}
{{- if include "minivm.filtersJobs" . }}{{ $_ := set $lines "JobSubmitPlugins" "lua" }}{{ end -}}
{{- if include "minivm.notifies" . }}{{ $_ := set $lines "MailProg" "/usr/libexec/minivm/mail" }}{{ end -}}
{{- if .Values.activeChecks.enabled }}{{ $_ := mustMergeOverwrite $lines (dict "PreemptType" "preempt/partition_prio" "PreemptMode" "CANCEL") }}{{ end -}}
{{- $_ := mustMergeOverwrite $lines (index (.Files.Get "files/profiles.yaml" | fromYaml) .Values.slurm.profile) -}}
{{- $site := include "minivm.slurm.site" . | fromJson -}}
{{- range $key := keys $lines }}{{ if hasKey $site (lower $key) }}{{ $_ := unset $lines $key }}{{ end }}{{ end -}}
{{- range $key, $value := .Values.slurm.config -}}
  {{- if not (kindIs "invalid" $value) }}{{ $_ := set $lines $key (toString $value) }}{{ end -}}
{{- end -}}
{{- /* A batch job whose prolog takes longer is taken for lost when its node registers, and requeued. */ -}}
{{- $prolog := include "minivm.slurm.says" (dict "key" "PrologEpilogTimeout" "lines" $lines "root" .) -}}
{{- if and $prolog (not (hasKey $site "batchstarttimeout")) }}{{ $_ := set $lines "BatchStartTimeout" $prolog }}{{ end -}}
{{- include "minivm.nodesFit" (dict "lines" $lines "root" .) -}}
{{- include "minivm.activeFits" (dict "lines" $lines "root" .) -}}
{{- include "minivm.mountsForJobs" . -}}
# Made by the chart. The pod's name and the name that others reach it by are two things.
ClusterName={{ .Values.clusterName }}
SlurmctldHost={{ $full }}-controller-0({{ include "minivm.controllerHost" . }})
{{- range $key := keys $lines | sortAlpha }}
{{ $key }}={{ index $lines $key }}
{{- end }}
{{ range $name, $_ := include "minivm.pools" . | fromJson }}
{{- $pool := include "minivm.pool" (dict "root" $root "name" $name) | fromJson }}
{{- if eq $root.Values.slurm.nodeMode "static" }}
{{ include "minivm.slurm.nodes" (dict "root" $root "name" $name "pool" $pool) }}
{{- end }}
NodeSet=pool_{{ $name }} Feature={{ $name }}
{{- end }}
{{- if .Values.activeChecks.enabled }}
# Also for partitions of slurm.extraConfig: none of their jobs makes room for a partition of a higher tier.
PartitionName=DEFAULT PreemptMode=OFF
{{- end }}
{{ range $name, $partition := include "minivm.partitions" . | fromJson }}
PartitionName={{ $name }} Nodes={{ range $i, $pool := $partition.pools }}{{ if $i }},{{ end }}pool_{{ $pool }}{{ end }} Default={{ ternary "YES" "NO" (default false $partition.default) }} State=UP{{ range $key, $value := $partition.options }} {{ $key }}={{ $value }}{{ end }}
{{- end }}
{{- if .Values.activeChecks.enabled }}
# Active checks: jobs of Slurm's own user, which any other job cancels.
PartitionName=minivm-active Nodes={{ range $i, $pool := keys (include "minivm.pools" . | fromJson) | sortAlpha }}{{ if $i }},{{ end }}pool_{{ $pool }}{{ end }} Default=NO State=UP Hidden=YES AllowGroups=root PriorityTier=0 PriorityJobFactor=0 PreemptMode=CANCEL GraceTime=0 MaxTime=10
{{- end }}
{{ .Values.slurm.extraConfig }}
{{- end -}}

{{/* slurm.config by names in lower case, as JSON: Slurm knows no other. */}}
{{- define "minivm.slurm.site" -}}
{{- $found := dict -}}
{{- $names := dict -}}
{{- range $name, $value := .Values.slurm.config -}}
  {{- $key := lower $name -}}
  {{- if hasKey $names $key }}{{ include "minivm.mistake" (list $ (printf "slurm.config has %s and %s, which are one name to Slurm" (get $names $key) $name)) }}{{ end -}}
  {{- $_ := set $names $key $name -}}
  {{- $_ := set $found $key (ternary "" (toString $value) (kindIs "invalid" $value)) -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* What a key is in slurm.conf, as Slurm reads it: of two lines of one name, in whichever case, the last counts, and
slurm.extraConfig comes last. A line goes on where it ends with a backslash, and a quoted value has no quotes. */}}
{{- define "minivm.slurm.says" -}}
{{- $found := "" -}}
{{- range $name, $value := .lines }}{{ if eq (lower $name) (lower $.key) }}{{ $found = $value }}{{ end }}{{ end -}}
{{- $text := regexReplaceAll "(?m)(^|[^\\\\])#.*$" .root.Values.slurm.extraConfig "${1}" -}}
{{- $text = regexReplaceAll "\\\\[ \\t\\r]*\\n" $text "" -}}
{{- range regexFindAll (printf "(?im)^[ \\t]*%s[ \\t]*=[ \\t]*(\"[^\"\\n]*\"|[^\\s]+)" .key) $text -1 -}}
  {{- $found = regexReplaceAll "^[^=]*=[ \\t]*" . "" | trimAll "\"" -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* slurmd of a node for which slurmctld has no room ends. A pod that sleeps keeps its record: every name counts. */}}
{{- define "minivm.nodesFit" -}}
{{- $most := include "minivm.slurm.says" (dict "key" "MaxNodeCount" "lines" .lines "root" .root) -}}
{{- $names := 0 -}}
{{- range $name, $_ := include "minivm.pools" .root | fromJson -}}
  {{- $pool := include "minivm.pool" (dict "root" $.root "name" $name) | fromJson -}}
  {{- if not $pool.perNode }}{{ $names = add $names (include "minivm.pool.names" $pool | int) }}{{ end -}}
{{- end -}}
{{- if and (eq .root.Values.slurm.nodeMode "dynamic") (regexMatch "^[0-9]+$" $most) (gt (int $names) (int $most)) }}{{ include "minivm.mistake" (list $.root (printf "slurm.maxNodes: workers.pools have %d nodes together, by replicas and elastic.max, and slurmctld takes %s" (int $names) $most)) }}{{ end -}}
{{- end -}}

{{/* Active checks need preemption between partitions that nothing else uses, and pools that do not follow idleness. */}}
{{- define "minivm.activeFits" -}}
{{- if .root.Values.activeChecks.enabled -}}
{{- $site := include "minivm.slurm.site" .root | fromJson -}}
{{- range $key := list "PreemptType" "PreemptMode" "PreemptParameters" -}}
  {{- $value := include "minivm.slurm.says" (dict "key" $key "lines" $site "root" $.root) -}}
  {{- if $value }}{{ include "minivm.mistake" (list $.root (printf "activeChecks.enabled: slurm.config or slurm.extraConfig sets %s to %s, and active checks need preemption by partition for themselves alone: remove the line, or disable active checks" $key $value)) }}{{ end -}}
{{- end -}}
{{- if regexMatch `(?im)^[ \t]*PartitionName=.*\b(PreemptMode=|PriorityTier=0\b)` .root.Values.slurm.extraConfig }}{{ include "minivm.mistake" (list $.root "slurm.extraConfig: a partition there has PreemptMode or PriorityTier=0, and active checks alone may be preempted and have tier 0: remove it, or disable active checks") }}{{ end -}}
{{- range $name, $partition := include "minivm.partitions" .root | fromJson -}}
  {{- if eq $name "minivm-active" }}{{ include "minivm.mistake" (list $.root "slurm.partitions: minivm-active is the partition of activeChecks: give yours another name") }}{{ end -}}
  {{- range $key, $value := $partition.options -}}
    {{- if eq (lower $key) "preemptmode" }}{{ include "minivm.mistake" (list $.root (printf "slurm.partitions.%s.options.PreemptMode: with activeChecks.enabled no users' partition is preempted: remove it, or disable active checks" $name)) }}{{ end -}}
    {{- if and (eq (lower $key) "prioritytier") (lt (int $value) 1) }}{{ include "minivm.mistake" (list $.root (printf "slurm.partitions.%s.options.PriorityTier is %v, and active checks have 0: set 1 or more" $name $value)) }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- range $name, $_ := include "minivm.pools" .root | fromJson -}}
  {{- $pool := include "minivm.pool" (dict "root" $.root "name" $name) | fromJson -}}
  {{- if or $pool.elastic $pool.externalScaling }}{{ include "minivm.mistake" (list $.root (printf "activeChecks.enabled: the pool %s shrinks when its nodes are idle, and a check makes a node busy: remove elastic and externalScaling, or disable active checks" $name)) }}{{ end -}}
{{- end -}}
{{- if dig "lend" "pools" list .root.Values.fleet.policy }}{{ include "minivm.mistake" (list $.root "activeChecks.enabled: fleet.policy.lend lends idle machines, and a check makes a machine busy: use one of the two") }}{{ end -}}
{{- if not .root.Values.slurm.scripts.enabled }}{{ include "minivm.mistake" (list $.root "activeChecks.enabled: the checks are files of the scripts tree, and slurm.scripts.enabled is false: set it to true") }}{{ end -}}
{{- $enforce := include "minivm.slurm.says" (dict "key" "AccountingStorageEnforce" "lines" .lines "root" .root) -}}
{{- if and $enforce (ne (lower $enforce) "none") (not .root.Values.activeChecks.account) }}{{ include "minivm.mistake" (list $.root (printf "activeChecks.account is empty, and AccountingStorageEnforce is %s: name an account that has the user slurm (sacctmgr add user slurm account=ACCOUNT)" $enforce)) }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* What the release of Slurm in the controller's image is and can, as JSON: files/slurm.yaml. By slurm.version, or the
image's tag, or the default; of a release that is not there, what is known of the newest before it. */}}
{{- define "minivm.slurm.facts" -}}
{{- $known := .Files.Get "files/slurm.yaml" | fromYaml -}}
{{- $tag := index .Values.image.tags "controller" | default .Values.image.tag -}}
{{- $wish := default (regexFind "^[0-9]{2}[.][0-9]{2}" $tag) (regexFind "^[0-9]{2}[.][0-9]{2}" .Values.slurm.version) | default $known.default -}}
{{- $found := "" -}}
{{- range $release := keys $known.releases | sortAlpha }}{{ if le $release $wish }}{{ $found = $release }}{{ end }}{{ end -}}
{{- if not $found }}{{ fail (printf "Slurm %s is older than all that the chart knows: %s" $wish (keys $known.releases | sortAlpha | join ", ")) }}{{ end -}}
{{- mergeOverwrite (index $known.releases $found) (dict "release" $wish) | toJson -}}
{{- end -}}

{{/* Where the chart needs a filter of jobs in slurmctld, and the site has none of its own. */}}
{{- define "minivm.filtersJobs" -}}
{{- $facts := include "minivm.slurm.facts" . | fromJson -}}
{{- $said := include "minivm.slurm.says" (dict "key" "JobSubmitPlugins" "lines" dict "root" .) -}}
{{- $site := or (hasKey .Values.slurm.files "job_submit.lua") $said (hasKey (include "minivm.slurm.site" . | fromJson) "jobsubmitplugins") -}}
{{- if and $site .Values.activeChecks.preflight.enabled }}{{ include "minivm.mistake" (list $ "activeChecks.preflight.enabled: the chart's job_submit.lua puts the test into jobs, and yours replaces it: disable preflight, and add `minivm preflight || [ $? -ne 86 ] || exit 1` to scripts in your own") }}{{ end -}}
{{- if and $site .Values.notifications.webhook.ofUsers }}{{ include "minivm.mistake" (list $ "notifications.webhook.ofUsers: the chart's job_submit.lua takes users' webhooks out of their jobs, and yours replaces it: empty ofUsers, or remove yours") }}{{ end -}}
{{- if and (or .Values.slurm.bringBackJobs .Values.activeChecks.preflight.enabled .Values.notifications.webhook.ofUsers (eq (index $facts "user-env") "job_submit")) (not $site) }}yes{{ end -}}
{{- end -}}

{{/* Whether slurmctld refuses jobs of users without an account. */}}
{{- define "minivm.enforces" -}}
{{- $said := include "minivm.slurm.says" (dict "key" "AccountingStorageEnforce" "lines" (include "minivm.slurm.site" . | fromJson) "root" .) -}}
{{- if regexMatch "(?i)associations|limits|qos|safe|wckeys|all" $said }}yes{{ end -}}
{{- end -}}

{{/* What job_submit.lua asks of the cluster, as a line of Lua. */}}
{{- define "minivm.jobFilterHas" -}}
{{- $facts := include "minivm.slurm.facts" . | fromJson -}}
local has = {brings_back = {{ .Values.slurm.bringBackJobs }}, hides_user_env = {{ eq (index $facts "user-env") "job_submit" }}{{ if .Values.activeChecks.preflight.enabled }}, preflight = {{ .Values.activeChecks.preflight.nodes }}{{ end }}{{ if include "minivm.enforces" . }}, enforces = true{{ end }}{{ if .Values.notifications.webhook.ofUsers }}, webhooks = true{{ end }}}
{{- end -}}

{{/* slurmd mounts a job's own /tmp itself: without the right to, it takes jobs, and every one of them fails. */}}
{{- define "minivm.mountsForJobs" -}}
{{- $mounts := false -}}
{{- range list "JobContainerType" "NamespaceType" -}}
  {{- $said := include "minivm.slurm.says" (dict "key" . "lines" (include "minivm.slurm.site" $ | fromJson) "root" $) -}}
  {{- if regexMatch "(?i)^(job_container|namespace)/(tmpfs|linux)" $said }}{{ $mounts = true }}{{ end -}}
{{- end -}}
{{- if and $mounts (not (has "SYS_ADMIN" .Values.workers.capabilities)) }}{{ include "minivm.mistake" (list $ "slurm.config: a job's own /tmp is mounted by slurmd, which takes SYS_ADMIN in workers.capabilities; each job has a TMPDIR of its own without") }}{{ end -}}
{{- end -}}

{{/* slurmctld's own metrics, if its release has them; it serves them to any client. */}}
{{- define "minivm.slurmMetrics" -}}
{{- if .Values.slurm.metrics -}}
{{- $facts := include "minivm.slurm.facts" . | fromJson -}}
{{- if not (hasKey $facts "metrics") }}{{ include "minivm.mistake" (list $ "slurm.metrics: this release of Slurm has no metrics of its own; from 25.11 on it has") }}{{ end -}}
{{- $site := include "minivm.slurm.site" . | fromJson -}}
{{- if include "minivm.slurm.says" (dict "key" "PrivateData" "lines" $site "root" .) }}{{ include "minivm.mistake" (list $ "slurm.metrics: with PrivateData slurmctld gives its metrics to nobody") }}{{ end -}}
{{- if include "minivm.slurm.says" (dict "key" "CommunicationParameters" "lines" $site "root" .) | lower | contains "disable_http" }}{{ include "minivm.mistake" (list $ "slurm.metrics: CommunicationParameters=disable_http takes them away") }}{{ end -}}
yes
{{- end -}}
{{- end -}}

{{/* A list is topology.yaml, which says its plugins itself. */}}
{{- define "minivm.topologyFile" -}}
{{- $yaml := regexMatch "^(---)?\\s*- " .Values.slurm.topologyConfig -}}
{{- $facts := include "minivm.slurm.facts" . | fromJson -}}
{{- if and $yaml (ne $facts.topology "topology.yaml") }}{{ include "minivm.mistake" (list $ (printf "slurm.topologyConfig is a topology.yaml, and this release of Slurm reads %s alone" $facts.topology)) }}{{ end -}}
{{- ternary "topology.yaml" "topology.conf" $yaml -}}
{{- end -}}

{{/* Whether the fleet tells slurmctld where in the fabric each worker is. */}}
{{- define "minivm.places" -}}
{{- $tiers := dig "topology" "tiers" list .Values.fleet.policy -}}
{{- if and .Values.fleet.enabled (or $tiers (dig "topology" "blocks" "label" "" .Values.fleet.policy)) -}}
{{- $facts := include "minivm.slurm.facts" . | fromJson -}}
{{- if ne $facts.topology "topology.yaml" }}{{ include "minivm.mistake" (list $ "fleet.policy.topology: this release of Slurm takes no places of dynamic nodes: use 25.05 or newer (image.tags.controller, or slurm.version), or remove it") }}{{ end -}}
{{- if ne .Values.slurm.nodeMode "dynamic" }}{{ include "minivm.mistake" (list $ "fleet.policy.topology: places are told of dynamic nodes, and slurm.nodeMode is static") }}{{ end -}}
{{- if or .Values.slurm.topologyConfig (hasKey .Values.slurm.files "topology.conf") }}{{ include "minivm.mistake" (list $ "fleet.policy.topology: slurm.topologyConfig, or a topology.conf in slurm.files, says it already") }}{{ end -}}
yes
{{- end -}}
{{- end -}}

{{/* A block for each domain, with the fleet's name for it, and one for nodes without a domain. slurmctld exits on sizes that
are not doublings of the first one. */}}
{{- define "minivm.blocks" -}}
{{- $blocks := dig "topology" "blocks" dict .Values.fleet.policy -}}
{{- if $blocks.label -}}
{{- $sizes := list -}}
{{- range $blocks.sizes }}{{ $sizes = append $sizes (int .) }}{{ end -}}
{{- if not $sizes }}{{ include "minivm.mistake" (list $ "fleet.policy.topology.blocks.sizes: how many nodes a block has, as [18]") }}{{ end -}}
{{- $first := first $sizes -}}
{{- $can := list -}}
{{- range $power := until 16 }}{{ $can = append $can $first }}{{ $first = mul $first 2 | int }}{{ end -}}
{{- range $sizes }}{{ if not (has . $can) }}{{ include "minivm.mistake" (list $ (printf "fleet.policy.topology.blocks.sizes: %d is not the first one's double, fourfold and so on" .)) }}{{ end }}{{ end -}}
block_sizes: {{ $sizes | toJson }}
blocks:
{{- range $blocks.domains }}
  - block: {{ include "minivm.block" . | toJson }}
{{- end }}
  - block: unknown
{{- end -}}
{{- end -}}

{{/* As fleet/decide/topology.py has it. */}}
{{- define "minivm.block" -}}
{{- $name := regexReplaceAll "[^A-Za-z0-9_-]" . "_" -}}
{{- if ne $name . }}{{ $name = printf "%s+%s" $name (sha256sum . | trunc 8) }}{{ end -}}
{{- if gt (len $name) 64 }}{{ $name = printf "%s+%s" (trunc 54 $name) (sha256sum $name | trunc 8) }}{{ end -}}
{{- $name -}}
{{- end -}}

{{/* A node that is in no switch gets no job: where it is until the fleet has looked. Its daemon may be of an older release
than the controller's, during an upgrade. */}}
{{- define "minivm.bornAt" -}}
{{- $release := regexFind "^[0-9]{2}[.][0-9]{2}" (index .Values.image.tags "worker" | default "") -}}
{{- if and (include "minivm.places" .) (or (not $release) (ge $release "25.05")) -}}
{{- $path := "" -}}
Topology=default:/
{{- range $i, $_ := initial (.Values.fleet.policy.topology.tiers | default (list "")) }}{{ $path = printf "%sunknown/" $path }}:{{ $path }}{{ end -}}
:{{ $path }}unknown
{{- if include "minivm.blocks" . }},blocks:unknown{{ end -}}
{{- end -}}
{{- end -}}

{{/* Whether slurmd loads the library that starts scripts faster: as the site says, or else with the profile `short`. */}}
{{- define "minivm.fastScripts" -}}
{{- if kindIs "bool" .Values.slurm.fastScripts }}{{ if .Values.slurm.fastScripts }}yes{{ end }}{{ else if eq .Values.slurm.profile "short" }}yes{{ end -}}
{{- end -}}

{{/* Slurm's file for containers: the site's own wins. */}}
{{- define "minivm.ociConf" -}}
{{- if and .Values.containers.enabled (not (hasKey .Values.slurm.files "oci.conf")) }}yes{{ end -}}
{{- end -}}

{{/* Containers by pyxis, beside Slurm's own door: a plug-in that srun and sbatch have, too. */}}
{{- define "minivm.byPyxis" -}}
{{- if and .Values.containers.enabled (eq .Values.containers.by "pyxis") -}}
{{- if hasKey .Values.slurm.files "plugstack.conf" }}{{ include "minivm.mistake" (list $ "containers.by: pyxis makes a plugstack.conf, and slurm.files has one, too") }}{{ end -}}
yes
{{- end -}}
{{- end -}}

{{- define "minivm.workerImage" -}}
{{- if eq (include "minivm.byPyxis" .) "yes" }}worker-pyxis{{ else if .Values.containers.enabled }}worker-containers{{ else }}worker{{ end -}}
{{- end -}}

{{/* Where the site has no filter of its own for srun, sbatch and salloc. */}}
{{- define "minivm.filtersCommands" -}}
{{- $site := or (hasKey .Values.slurm.files "cli_filter.lua") (include "minivm.slurm.says" (dict "key" "CliFilterPlugins" "lines" dict "root" .)) (hasKey (include "minivm.slurm.site" . | fromJson) "clifilterplugins") -}}
{{- if not $site }}yes{{ end -}}
{{- end -}}

{{/* Whether people are told of their jobs by mail or a webhook. */}}
{{- define "minivm.notifies" -}}
{{- $n := .Values.notifications -}}
{{- if or $n.mail.relay $n.webhook.format $n.webhook.ofUsers -}}
{{- range $n.webhook.ofUsers -}}
  {{- if not (regexMatch "^https?://[a-z0-9.-]+(:[0-9]{1,5})?/[A-Za-z0-9._~/@:+=-]*$" .) }}{{ include "minivm.mistake" (list $ (printf "notifications.webhook.ofUsers: %q is not how a URL begins: https://HOST/ in small letters, and a part of the path" .)) }}{{ end -}}
{{- end -}}
{{- if include "minivm.slurm.says" (dict "key" "MailProg" "lines" (include "minivm.slurm.site" . | fromJson) "root" .) }}{{ include "minivm.mistake" (list $ "notifications: slurm.config or slurm.extraConfig sets MailProg, which would send none of them: remove the line, or mail.relay, webhook.format and webhook.ofUsers") }}{{ end -}}
{{- if and $n.mail.relay (not $n.mail.from) }}{{ include "minivm.mistake" (list $ "notifications.mail.from is empty: set the sender's address, as slurm@example.org") }}{{ end -}}
{{- if $n.mail.relay -}}
  {{- if and $n.mail.from (not (regexMatch "^[A-Za-z0-9_][A-Za-z0-9._+-]*@[A-Za-z0-9][A-Za-z0-9.-]*$" $n.mail.from)) }}{{ include "minivm.mistake" (list $ (printf "notifications.mail.from is %q: set an address, as slurm@example.org" $n.mail.from)) }}{{ end -}}
  {{- range $name := append $n.mail.domains $n.mail.domain | compact -}}
    {{- if not (regexMatch "^([A-Za-z0-9][A-Za-z0-9.-]*|[*])$" $name) }}{{ include "minivm.mistake" (list $ (printf "notifications.mail.domain and .domains: %q is no domain, such as example.org" $name)) }}{{ end -}}
  {{- end -}}
  {{- if eq $n.mail.domain "*" }}{{ include "minivm.mistake" (list $ "notifications.mail.domain is \"*\": name one domain, of recipients without one; domains may have it") }}{{ end -}}
{{- end -}}
{{- if and $n.webhook.format $n.webhook.url (not (regexMatch "^https?://[^ ]+$" $n.webhook.url)) }}{{ include "minivm.mistake" (list $ "notifications.webhook.url is no URL: it begins with https:// or http:// and has no spaces") }}{{ end -}}
{{- if and $n.mail.user (hasPrefix "smtp://" $n.mail.relay) }}{{ include "minivm.mistake" (list $ "notifications.mail: a password over smtp:// would be readable on the network: use starttls:// or smtps://") }}{{ end -}}
{{- if and $n.webhook.format (not $n.webhook.url) (not $n.existingSecret) }}{{ include "minivm.mistake" (list $ "notifications.webhook.url is empty: set it, or notifications.existingSecret with the key url") }}{{ end -}}
{{- if and $n.existingSecret (or $n.mail.user $n.mail.password $n.webhook.url) }}{{ include "minivm.mistake" (list $ "notifications.existingSecret: mail.user, mail.password and webhook.url are given too: keep them in one place") }}{{ end -}}
yes
{{- end -}}
{{- end -}}

{{/* The Secret of notifications; empty where they need none. */}}
{{- define "minivm.secret.notify" -}}
{{- if include "minivm.notifies" . -}}
{{- $n := .Values.notifications -}}
{{- if $n.existingSecret }}{{ $n.existingSecret }}{{ else if or $n.mail.user $n.webhook.url }}{{ include "minivm.fullname" . }}-notify{{ end -}}
{{- end -}}
{{- end -}}

{{- define "minivm.notify.json" -}}
{{- $n := .Values.notifications -}}
{{- $file := dict "cluster" .Values.clusterName "ca" $n.ca "perUser" (int $n.perUser) "total" (int $n.total) -}}
{{- if $n.mail.relay }}{{ $_ := set $file "mail" (dict "relay" $n.mail.relay "from" $n.mail.from "domain" $n.mail.domain "domains" $n.mail.domains) }}{{ end -}}
{{- if $n.webhook.format }}{{ $_ := set $file "webhook" (dict "format" $n.webhook.format) }}{{ end -}}
{{- with $n.webhook.ofUsers }}{{ $_ := set $file "ofUsers" . }}{{ end -}}
{{- if $n.existingSecret }}{{ $_ := set $file "secret" $n.existingSecret }}{{ end -}}
{{- $file | toJson -}}
{{- end -}}

{{/* What the filter asks of the cluster, as a line of Lua. Slurm's default MailProg is not in the images. */}}
{{- define "minivm.filterHas" -}}
{{- $site := include "minivm.slurm.site" . | fromJson -}}
{{- $mail := include "minivm.slurm.says" (dict "key" "MailProg" "lines" $site "root" .) -}}
{{- $store := include "minivm.slurm.says" (dict "key" "AccountingStorageType" "lines" $site "root" .) -}}
{{- $accounting := ternary (ne .Values.accounting.mode "none") (contains "slurmdbd" $store) (eq $store "") -}}
{{- $facts := include "minivm.slurm.facts" . | fromJson -}}
local has = {containers = {{ or .Values.containers.enabled (hasKey .Values.slurm.files "oci.conf") }}, accounting = {{ $accounting }}, mail = {{ or (ne $mail "") (eq (include "minivm.notifies" .) "yes") }}, addresses = {{ and (eq (include "minivm.notifies" .) "yes") (ne .Values.notifications.mail.relay "") }}{{ if .Values.notifications.mail.relay }}, domains = {"{{ join "\", \"" (append .Values.notifications.mail.domains (or .Values.notifications.mail.domain (last (splitList "@" .Values.notifications.mail.from)))) }}"}{{ end }}{{ if include "minivm.notifies" . }}, webhooks = {{ "{" }}{{ range $i, $url := .Values.notifications.webhook.ofUsers }}{{ if $i }}, {{ end }}"{{ $url }}"{{ end }}{{ "}" }}{{ end }}, mpi = {"{{ join "\", \"" $facts.mpi }}"}, release = "{{ $facts.release }}", brings_back = {{ and .Values.slurm.bringBackJobs (ne (include "minivm.filtersJobs" .) "") }}, enforces = {{ eq (include "minivm.enforces" .) "yes" }}}
{{- end -}}

{{- define "minivm.poolCounts" -}}
{{- $full := include "minivm.fullname" . -}}
{{- $counts := dict -}}
{{- range $name, $_ := include "minivm.pools" . | fromJson -}}
  {{- $pool := include "minivm.pool" (dict "root" $ "name" $name) | fromJson -}}
  {{- $_ := set $counts (printf "%s-%s" $full $name) (include "minivm.pool.names" $pool | int) -}}
{{- end -}}
{{- dict "release" $full "pools" $counts | toJson -}}
{{- end -}}

{{/* `all` over every pool, and each of several pools by its name; the site's own are added, and null takes one away.
A partition that goes takes its jobs with it: so nothing that is added makes another one go. */}}
{{- define "minivm.partitions" -}}
{{- $pools := keys (include "minivm.pools" . | fromJson) | sortAlpha -}}
{{- $made := dict "all" (dict "pools" $pools) -}}
{{- if gt (len $pools) 1 }}{{ range $pools }}{{ $_ := set $made . (dict "pools" (list .)) }}{{ end }}{{ end -}}
{{- $default := "" -}}
{{- range $name, $partition := .Values.slurm.partitions -}}
  {{- if kindIs "invalid" $partition -}}
    {{- if not (hasKey $made $name) }}{{ include "minivm.mistake" (list $ (printf "slurm.partitions.%s is null, and there is no partition of that name to take away" $name)) }}{{ end -}}
    {{- $_ := unset $made $name -}}
  {{- else -}}
    {{- $partition = merge (deepCopy $partition) (default dict (get $made $name)) -}}
    {{- if not $partition.pools }}{{ include "minivm.mistake" (list $ (printf "slurm.partitions.%s names no pools" $name)) }}{{ end -}}
    {{- range $partition.pools -}}
      {{- if not (has . $pools) }}{{ include "minivm.mistake" (list $ (printf "slurm.partitions.%s names the pool %s, which workers.pools does not have" $name .)) }}{{ end -}}
    {{- end -}}
    {{- if and $partition.default $default }}{{ include "minivm.mistake" (list $ (printf "slurm.partitions.%s.default: %s is the default too, and Slurm has one: set it in one of them" $name $default)) }}{{ end -}}
    {{- if $partition.default }}{{ $default = $name }}{{ end -}}
    {{- $_ := set $made $name $partition -}}
  {{- end -}}
{{- end -}}
{{- if and (hasKey $made "all") (not $default) (not (hasKey $made.all "default")) }}{{ $_ := set $made.all "default" true }}{{ end -}}
{{- $made | toJson -}}
{{- end -}}

{{/* gpu:h100:8,nvme:2 */}}
{{- define "minivm.pool.gres" -}}
{{- $gres := .gres -}}
{{- if gt (int .gpu.count) 0 -}}
  {{- $gpu := ternary (printf "gpu:%s:%d" .gpu.model (int .gpu.count)) (printf "gpu:%d" (int .gpu.count)) (ne .gpu.model "") -}}
  {{- $gres = prepend $gres $gpu -}}
{{- end -}}
{{- join "," $gres -}}
{{- end -}}

{{/* How many names the pods of a pool may have. */}}
{{- define "minivm.pool.names" -}}
{{- if and (eq .kind "WorkerPool") .elastic }}{{ int .elastic.max }}{{ else }}{{ int .replicas }}{{ end -}}
{{- end -}}

{{/* Those names, separated by commas. As text: `append` copies its list, which takes minutes for 64,000 names. */}}
{{- define "minivm.pool.podNames" -}}
{{- range $i := until (include "minivm.pool.names" .pool | int) }}{{ if $i }},{{ end }}{{ $.prefix }}-{{ $i }}{{ end -}}
{{- end -}}

{{/* A right is given to pods by their names, one by one, and etcd takes no object above 1.5 MiB. */}}
{{- define "minivm.fitsInARole" -}}
{{- $bytes := 0 -}}
{{- range $name, $_ := include "minivm.pools" .root | fromJson -}}
  {{- $count := include "minivm.pool" (dict "root" $.root "name" $name) | fromJson | include "minivm.pool.names" | int -}}
  {{- $bytes = printf "\"%s-%s-%d\"," (include "minivm.fullname" $.root) $name $count | len | mul $count | add $bytes -}}
{{- end -}}
{{- if gt (mul .times $bytes) 1400000 }}{{ fail (printf "workers.pools: %s names each worker in a Role, and they are too many for one: fewer replicas, a lower elastic.max, or %s" .of .without) }}{{ end -}}
{{- end -}}

{{/* The pool's own name is always a feature: node sets and partitions are made of it. */}}
{{- define "minivm.pool.features" -}}
{{- $features := prepend .pool.features .name -}}
{{- if gt (int .pool.gpu.count) 0 }}{{ $features = append $features "gpu" }}{{ end -}}
{{- if .pool.gpu.model }}{{ $features = append $features .pool.gpu.model }}{{ end -}}
{{- if .pool.rdma.enabled }}{{ $features = append $features "rdma" }}{{ end -}}
{{- range $i, $topology := .pool.topologyFeatures -}}
  {{- $features = append $features (printf "%s$(MINIVM_TOPOLOGY_%d)" (default "" $topology.prefix) $i) -}}
{{- end -}}
{{- join "," (uniq $features) -}}
{{- end -}}

{{- define "minivm.pool.nodeConfig" -}}
{{- $parts := list -}}
{{- with include "minivm.pool.gres" .pool }}{{ $parts = append $parts (printf "Gres=%s" .) }}{{ end -}}
{{- if ne (int .pool.ports.slurmd) 6818 }}{{ $parts = append $parts (printf "Port=%d" (int .pool.ports.slurmd)) }}{{ end -}}
{{- with .pool.nodeConfig }}{{ $parts = append $parts . }}{{ end -}}
{{- join " " $parts -}}
{{- end -}}

{{- define "minivm.slurm.nodes" -}}
{{- $full := include "minivm.fullname" .root -}}
{{- $sts := printf "%s-%s" $full .name -}}
{{- if or (lt (int .pool.node.cpus) 1) (lt (int .pool.node.memoryMiB) 1) -}}
  {{- include "minivm.mistake" (list .root (printf "slurm.nodeMode is static: workers.pools.%s.node needs cpus and memoryMiB" .name)) -}}
{{- end -}}
{{- range $i := until (int .pool.replicas) -}}
NodeName={{ $sts }}-{{ $i }} NodeAddr={{ $sts }}-{{ $i }}{{ if not $.pool.perPodServices }}.{{ $sts }}{{ end }} CPUs={{ int $.pool.node.cpus }} RealMemory={{ int $.pool.node.memoryMiB }} Feature={{ include "minivm.pool.features" (dict "name" $.name "pool" (omit $.pool "topologyFeatures")) }}{{ with include "minivm.pool.nodeConfig" (dict "pool" $.pool) }} {{ . }}{{ end }} State=UNKNOWN
{{ end -}}
{{- end -}}

{{- define "minivm.gres.conf" -}}
{{- $root := . -}}
{{- if .Values.slurm.gresConfig -}}
{{ .Values.slurm.gresConfig }}
{{- else -}}
{{- $facts := include "minivm.slurm.facts" . | fromJson -}}
{{- $detect := "off" -}}
{{- range $name, $_ := include "minivm.pools" . | fromJson -}}
  {{- $pool := include "minivm.pool" (dict "root" $root "name" $name) | fromJson -}}
  {{- if gt (int $pool.gpu.count) 0 }}{{ $detect = default $facts.gpu $pool.gpu.autodetect }}{{ end -}}
{{- end -}}
# GPUs are found on each node; what a node should have is in its own configuration.
AutoDetect={{ $detect }}
{{- end }}
{{- end -}}

{{- define "minivm.cgroup.conf" -}}
CgroupPlugin={{ ternary "autodetect" "disabled" (eq .Values.slurm.proctrack "cgroup") }}
{{- if eq .Values.slurm.proctrack "cgroup" }}
# No systemd in a pod: slurmd makes its own cgroups below the pod's.
IgnoreSystemd=yes
EnableControllers=yes
ConstrainCores=yes
ConstrainRAMSpace=yes
ConstrainDevices=yes
{{- end }}
{{- with .Values.slurm.cgroupConfig }}
{{ . }}
{{- end }}
{{- end -}}
