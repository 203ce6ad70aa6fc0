{{- define "minivm.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* By the version: what `helm template` knows of a cluster's APIs is every API there ever was. */}}
{{- define "minivm.policyVersion" -}}
{{ ternary "policy/v1" "policy/v1beta1" (semverCompare ">=1.21.0-0" .Capabilities.KubeVersion.Version) }}
{{- end -}}

{{- define "minivm.labels" -}}
app.kubernetes.io/name: minivm
app.kubernetes.io/instance: {{ include "minivm.fullname" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/*
The roles, as JSON: those with the trait that is given, or all of them for "".
  slurm  its pods run Slurm's daemons or clients, and report their conditions
  users  people and jobs run programs in its pods
*/}}
{{- define "minivm.roles" -}}
{{- $trait := . -}}
{{- $roles := dict
  "accounting" (list "slurm")
  "controller" (list "slurm")
  "demo" list
  "fleet" list
  "login" (list "slurm" "users")
  "worker" (list "slurm" "users") -}}
{{- $named := list -}}
{{- range $role, $traits := $roles }}{{ if or (not $trait) (has $trait $traits) }}{{ $named = append $named $role }}{{ end }}{{ end -}}
{{- toJson $named -}}
{{- end -}}

{{/* Takes (dict "root" $ "role" "worker" "pool" "gpu"); what selectors match, so it never changes. */}}
{{- define "minivm.selector" -}}
app.kubernetes.io/name: minivm
app.kubernetes.io/instance: {{ include "minivm.fullname" .root }}
app.kubernetes.io/component: {{ .role }}
{{- with .pool }}
minivm.io/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "minivm.image" -}}
{{- $i := .root.Values.image -}}
{{- with $i.registry }}{{ . }}/{{ end }}{{ $i.repository }}/{{ .role }}:{{ index $i.tags .role | default $i.tag }}
{{- with index $i.digests .role }}@{{ . }}{{ end }}
{{- end -}}

{{/* The name by which clients and daemons reach slurmctld and slurmrestd. */}}
{{- define "minivm.controllerHost" -}}
{{ include "minivm.fullname" . }}-{{ ternary "slurmctld" "controller" .Values.controller.stableAddress }}
{{- end -}}

{{/* The name by which clients and slurmctld reach slurmdbd. */}}
{{- define "minivm.accountingHost" -}}
{{- if eq .Values.accounting.mode "pod" }}{{ include "minivm.fullname" . }}-accounting{{ else }}{{ include "minivm.controllerHost" . }}{{ end -}}
{{- end -}}

{{/* The EndpointSlice by which clients reach the controller that acts; empty where Kubernetes knows the only one. */}}
{{- define "minivm.endpointSlice" -}}
{{- if and (gt (int .Values.controller.replicas) 1) (not .Values.controller.moveAddress) }}{{ include "minivm.controllerHost" . }}-active{{ end -}}
{{- end -}}

{{/* The names of the controllers' pods, as JSON. */}}
{{- define "minivm.controllerPods" -}}
{{- $pods := list -}}
{{- range $i := until (int .Values.controller.replicas) }}{{ $pods = append $pods (printf "%s-controller-%d" (include "minivm.fullname" $) $i) }}{{ end -}}
{{- toJson $pods -}}
{{- end -}}

{{/* Where slurmrestd listens in the controller's pod, which the fleet asks. */}}
{{- define "minivm.restPort" -}}
{{- $said := index .Values.controller.env "MINIVM_SLURMRESTD" | default "0.0.0.0:6820" -}}
{{- if not (regexMatch ":[0-9]+$" $said) }}{{ include "minivm.mistake" (list $ (printf "controller.env.MINIVM_SLURMRESTD is %s: the fleet asks slurmrestd by its port, HOST:PORT" $said)) }}{{ end -}}
{{ regexFind "[0-9]+$" $said }}
{{- end -}}

{{/*
How daemons and clients prove who they are: munge or slurm. It is slurm.auth where that is set. Else a cluster that is there
keeps what it has, by its slurm.conf in the cluster or the keys that outlived it, and a new one has slurm. What sees no
cluster cannot know, and refuses. The answer is kept beside the values, for one render.
*/}}
{{- define "minivm.auth" -}}
{{- $auth := default .Values.chosenAuth .Values.slurm.auth -}}
{{- if not $auth -}}
  {{- $auth = include "minivm.auth.kept" . | default "slurm" -}}
  {{- $_ := set .Values "chosenAuth" $auth -}}
{{- end -}}
{{- $auth -}}
{{- end -}}

{{- define "minivm.auth.kept" -}}
{{- $full := include "minivm.fullname" . -}}
{{- $space := .Release.Namespace -}}
{{- $s := .Values.secrets -}}
{{- $config := lookup "v1" "ConfigMap" $space (printf "%s-config" $full) -}}
{{- if $config -}}
  {{- $lines := regexFindAll "(?im)^[ \t]*AuthType[ \t]*=[ \t]*\"?auth/(munge|slurm)\\b" (dig "data" "slurm.conf" "" $config) -1 -}}
  {{- if not $lines }}{{ include "minivm.mistake" (list . (printf "slurm.auth: the ConfigMap %s-config has no AuthType of auth/munge or auth/slurm, so what the cluster uses is unknown: set slurm.auth to munge or slurm" $full)) }}{{ end -}}
  {{- last $lines | default "" | lower | regexFind "[a-z]+$" -}}
{{- else if not (lookup "v1" "ServiceAccount" $space "") -}}
  {{- include "minivm.mistake" (list . "slurm.auth: this render sees no cluster, and must not change how a running one authenticates: set slurm.auth to slurm for a new cluster, and to what an existing one has, which is munge unless its slurm.conf has AuthType=auth/slurm (docs/how-to/change-authentication.md)") -}}
{{- else -}}
  {{- $munge := or $s.munge.existingSecret $s.munge.key (lookup "v1" "Secret" $space (printf "%s-munge" $full)) -}}
  {{- $slurm := or $s.slurm.existingSecret $s.slurm.key $s.slurm.jwks (lookup "v1" "Secret" $space (printf "%s-slurm-key" $full)) -}}
  {{- if and $munge $slurm }}{{ include "minivm.mistake" (list . "slurm.auth: there are keys of munge and of auth/slurm, and no slurm.conf in the cluster says which it used: set slurm.auth to munge or slurm") }}{{ end -}}
  {{- ternary "munge" "slurm" (not (empty $munge)) -}}
{{- end -}}
{{- end -}}

{{/* Names of the Secrets: an existing one, or the chart's own. */}}
{{- define "minivm.secret.munge" -}}
{{ default (printf "%s-munge" (include "minivm.fullname" .)) .Values.secrets.munge.existingSecret }}
{{- end -}}
{{- define "minivm.secret.slurm" -}}
{{ default (printf "%s-slurm-key" (include "minivm.fullname" .)) .Values.secrets.slurm.existingSecret }}
{{- end -}}
{{- define "minivm.secret.jwt" -}}
{{ default (printf "%s-jwt" (include "minivm.fullname" .)) .Values.secrets.jwt.existingSecret }}
{{- end -}}
{{- define "minivm.secret.ssh" -}}
{{ default (printf "%s-ssh-host-keys" (include "minivm.fullname" .)) .Values.secrets.sshHostKeys.existingSecret }}
{{- end -}}
{{- define "minivm.secret.workerSsh" -}}
{{ default (printf "%s-worker-host-keys" (include "minivm.fullname" .)) .Values.secrets.workerHostKeys.existingSecret }}
{{- end -}}
{{- define "minivm.secret.sssd" -}}
{{ default (printf "%s-sssd" (include "minivm.fullname" .)) .Values.secrets.sssd.existingSecret }}
{{- end -}}
{{- define "minivm.secret.ring" -}}
{{ default (printf "%s-ring" (include "minivm.fullname" .)) .Values.secrets.ring.existingSecret }}
{{- end -}}
{{/* A ring's board requires signed reports; a file that the operator configures takes precedence over the chart's. */}}
{{- define "minivm.hasRing" -}}
{{- if not (hasKey .Values.scripts.env "MINIVM_GITSYNC_RING_SECRET") -}}
{{- if or .Values.secrets.ring.existingSecret .Values.secrets.ring.key (index .Values.scripts.env "MINIVM_GITSYNC_RING_URL") }}yes{{ end -}}
{{- end -}}
{{- end -}}
{{- define "minivm.secret.database" -}}
{{ default (printf "%s-database" (include "minivm.fullname" .)) .Values.accounting.database.existingSecret }}
{{- end -}}
{{- define "minivm.hasSssd" -}}
{{- if or .Values.secrets.sssd.existingSecret .Values.secrets.sssd.config .Values.demo.enabled }}yes{{ end -}}
{{- end -}}

{{- define "minivm.hasPeople" -}}
{{- with .Values.people }}{{ if or .existingConfigMap .existingSecret .users .groups }}yes{{ end }}{{ end -}}
{{- end -}}

{{/* The name of the ConfigMap of people.yaml where no Secret has it. */}}
{{- define "minivm.peopleConfigMap" -}}
{{- default (printf "%s-people" (include "minivm.fullname" .)) .Values.people.existingConfigMap -}}
{{- end -}}

{{/*
One of the keys that the cluster makes itself, as JSON: include "minivm.key" (dict "root" $ "name" "munge") | fromJson
  secret  the Secret of the chart's own, empty where there is none: an existing one is named, or nothing needs it
  key     what pods look for in it
  how     how it is made
  data    what the chart writes into it: a value given, or what an older chart wrote into it
  made    the chart writes nothing into it: the Job of keys.yaml does, once, in the cluster, and nobody else knows it.
          So the chart renders to the same text each time, also where it can look nothing up.
What the chart once wrote it goes on writing: Helm takes away what the last release wrote and the next one does not.
*/}}
{{- define "minivm.key" -}}
{{- $v := .root.Values -}}
{{- $known := dict
  "munge" (dict "from" $v.secrets.munge "key" "munge.key" "how" "bytes:1024")
  "slurm-key" (dict "from" $v.secrets.slurm "key" "slurm.key" "how" "bytes:1024")
  "jwt" (dict "from" $v.secrets.jwt "key" "jwt_hs256.key" "how" "bytes:32")
  "ssh-host-keys" (dict "from" $v.secrets.sshHostKeys "key" "ssh_host_ed25519_key" "how" "ed25519")
  "worker-host-keys" (dict "from" $v.secrets.workerHostKeys "key" "ssh_host_ed25519_key" "how" "ed25519")
  "ring" (dict "from" $v.secrets.ring "key" "ring.key" "how" "letters:32")
  "database" (dict "from" $v.accounting.database "key" "password" "how" "letters:32") -}}
{{- $one := index $known .name -}}
{{- $from := $one.from -}}
{{- $out := dict "secret" "" "key" $one.key "how" $one.how "data" dict "made" false -}}
{{- $needed := true -}}
{{- if eq .name "ring" }}{{ $needed = ne (include "minivm.hasRing" .root) "" }}{{ end -}}
{{- if eq .name "munge" }}{{ $needed = eq (include "minivm.auth" .root) "munge" }}{{ end -}}
{{- if eq .name "slurm-key" }}{{ $needed = eq (include "minivm.auth" .root) "slurm" }}{{ end -}}
{{- if eq .name "database" }}{{ $needed = not (has $v.accounting.mode (list "none" "pod")) }}{{ end -}}
{{- if and $needed (not $from.existingSecret) -}}
  {{- $secret := printf "%s-%s" (include "minivm.fullname" .root) .name -}}
  {{- $data := dict -}}
  {{- if $from.key }}{{ $_ := set $data $one.key $from.key }}{{ end -}}
  {{- if $from.jwks }}{{ $_ := set $data "slurm.jwks" ($from.jwks | b64enc) }}{{ end -}}
  {{- if $from.password }}{{ $_ := set $data $one.key ($from.password | b64enc) }}{{ end -}}
  {{- range $file, $text := ($from.keys | default dict) }}{{ $_ := set $data $file ($text | b64enc) }}{{ end -}}
  {{- if not $data -}}
    {{- $found := lookup "v1" "Secret" .root.Release.Namespace $secret | default dict -}}
    {{- if ne (dig "metadata" "annotations" "minivm.io/key" "" $found) "made" }}{{ $data = $found.data | default dict }}{{ end -}}
  {{- end -}}
  {{- $_ := set $out "secret" $secret -}}
  {{- $_ := set $out "data" $data -}}
  {{- $_ := set $out "made" (not $data) -}}
{{- end -}}
{{- toJson $out -}}
{{- end -}}

{{/* A pod does not start before the key is made: the kubelet waits for the keys that a volume names. */}}
{{- define "minivm.keyItems" -}}
{{- $key := include "minivm.key" . | fromJson -}}
{{- if $key.made }}, items: [{key: {{ $key.key }}, path: {{ $key.key }}}]{{ end -}}
{{- end -}}

{{/* The pools, as JSON; the default one is not in values.yaml, where it would be merged into everybody's. */}}
{{- define "minivm.pools" -}}
{{- default (dict "worker" (dict "replicas" 2)) .Values.workers.pools | toJson -}}
{{- end -}}

{{/* One pool with the defaults under it, as JSON: include "minivm.pool" (dict "root" $ "name" n) | fromJson */}}
{{- define "minivm.pool" -}}
{{- $pool := index (include "minivm.pools" .root | fromJson) .name | default dict -}}
{{- $all := mergeOverwrite (deepCopy .root.Values.workers.defaults) (deepCopy $pool) -}}
{{- /* After the wait for jobs: requeue what is left, stop the daemons. A shorter graceSeconds would cut the wait. */ -}}
{{- set $all "graceSeconds" (max (int $all.graceSeconds) (int (add (int $all.drainSeconds) 20))) | toJson -}}
{{- end -}}

{{/* Takes (dict "root" $ "role" r "grace" n "http" port "probes" port "from" where "extra" map). */}}
{{- define "minivm.env" -}}
- name: MINIVM_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: MINIVM_POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: MINIVM_POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: MINIVM_NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- {name: MINIVM_CLUSTER, value: {{ .root.Values.clusterName | quote }}}
{{- if eq .role "accounting" }}
{{- /* Its own name, which init maps to its own address; the database is this pod's. */}}
- {name: MINIVM_CONTROLLER, value: {{ include "minivm.accountingHost" .root | quote }}}
- {name: MINIVM_ACCOUNTING, value: embedded}
{{- else }}
- {name: MINIVM_CONTROLLER, value: {{ include "minivm.controllerHost" .root | quote }}}
{{- $mode := .root.Values.accounting.mode -}}
{{- /* Only the controller reads it. Elsewhere it stays as before a move, which then replaces no worker and no login;
       embedded is also what they still have on the way back there. */}}
{{- if and (ne .role "controller") (ne $mode "embedded") }}{{ $mode = default $mode .root.Values.accounting.from }}{{ end }}
- {name: MINIVM_ACCOUNTING, value: {{ $mode | quote }}}
{{- end }}
{{- /* slurmdbd waits in its pod until the records of that place are loaded. */}}
{{- if and .root.Values.accounting.from (eq .role (ternary "accounting" "controller" (eq .root.Values.accounting.mode "pod"))) }}
- {name: MINIVM_ACCOUNTING_FROM, value: {{ .root.Values.accounting.from | quote }}}
{{- end }}
{{- if ne (include "minivm.auth" .root) "munge" }}
- {name: MINIVM_AUTH, value: {{ include "minivm.auth" .root }}}
{{- end }}
{{- with .root.Values.slurm.uid }}
- {name: MINIVM_SLURM_UID, value: {{ int . | quote }}}
{{- end }}
- {name: MINIVM_GRACE_SECONDS, value: {{ .grace | quote }}}
- {name: MINIVM_HTTP, value: {{ printf "0.0.0.0:%d" (int .http) | quote }}}
- {name: MINIVM_PROBES, value: {{ printf "0.0.0.0:%d" (int .probes) | quote }}}
{{- with .from }}
- {name: MINIVM_PROBES_FROM, value: {{ . }}}
{{- end }}
- {name: MINIVM_LOG_FORMAT, value: {{ .root.Values.logFormat | quote }}}
{{- if .root.Values.scripts.repository }}
- {name: MINIVM_GITSYNC_REPO, value: {{ .root.Values.scripts.repository | quote }}}
- {name: MINIVM_GITSYNC_REF, value: {{ .root.Values.scripts.ref | quote }}}
{{- end }}
{{- if and (include "minivm.hasRing" .root) (ne .role "demo") }}
- {name: MINIVM_GITSYNC_RING_SECRET, value: /mnt/minivm/secrets/ring/ring.key}
{{- end }}
{{- range $key, $value := .root.Values.scripts.env }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- if and .root.Values.home.enabled (has .role (include "minivm.roles" "users" | fromJsonArray)) }}
- {name: MINIVM_HOME, value: {{ .root.Values.home.mountPath | quote }}}
- {name: MINIVM_HOME_VOLUME, value: {{ printf "PersistentVolumeClaim %s" (include "minivm.homeClaim" .root) | quote }}}
{{- end }}
{{- range $key, $value := .extra }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/*
Who the cluster's own pods are to ssh in them, as JSON: what login pods answer with, and what workers do.
  names   by which people reach them, as patterns of ssh's known hosts
  secret  that holds their keys
  public  what it holds, as far as the values say it
  kept    by the Job of keys.yaml, which asks the Secrets what is not said here: both are one file
*/}}
{{- define "minivm.knownHosts" -}}
{{- $full := include "minivm.fullname" . -}}
{{- $logins := list (printf "%s-login" $full) (printf "%s-login.*" $full) (printf "%s-login-*" $full) -}}
{{- if .Values.login.pools -}}
  {{- range $name, $_ := include "minivm.loginPools" . | fromJson -}}
    {{- $service := include "minivm.loginObject" (dict "root" $ "name" $name "kind" "ssh") -}}
    {{- $logins = concat $logins (list $service (printf "%s.*" $service)) -}}
  {{- end -}}
{{- end -}}
{{- $workers := list -}}
{{- range $name, $_ := include "minivm.pools" . | fromJson -}}
  {{- $pool := include "minivm.pool" (dict "root" $ "name" $name) | fromJson -}}
  {{- $pods := printf "%s-%s-*" $full $name -}}
  {{- $workers = append $workers (ternary $pods (printf "[%s]:%d" $pods (int $pool.ports.ssh)) (eq (int $pool.ports.ssh) 22)) -}}
{{- end -}}
{{- $s := .Values.secrets -}}
{{- dict
  "kept" (not (and $s.sshHostKeys.public $s.workerHostKeys.public))
  "hosts" (list
    (dict "names" (join "," $logins) "secret" (include "minivm.secret.ssh" .) "public" $s.sshHostKeys.public)
    (dict "names" (join "," $workers) "secret" (include "minivm.secret.workerSsh" .) "public" $s.workerHostKeys.public))
  | toJson -}}
{{- end -}}

{{/*
init answers the kubelet on a port of its own: alive, ready, and started are three questions to it. Takes the root, or
(dict "failures" number) for a pod that is asked each second, and is not ready after this many failures.
*/}}
{{- define "minivm.probes" -}}
startupProbe:
  httpGet: {path: /startupz, port: probes}
  periodSeconds: 1
  # A pod that waits for the controller is not mended by a restart, and sits in its back-off when the controller is there.
  failureThreshold: 3600
  timeoutSeconds: 2
livenessProbe:
  httpGet: {path: /livez, port: probes}
  periodSeconds: 20
  failureThreshold: 3
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /readyz, port: probes}
  periodSeconds: {{ ternary 1 5 (gt (int .failures) 1) }}
  failureThreshold: {{ .failures | default 1 }}
  timeoutSeconds: 2
{{- end -}}

{{/* Takes (dict "capabilities" list "seccompProfile" text); no profile: the runtime's own. */}}
{{- define "minivm.securityContext" -}}
allowPrivilegeEscalation: true
capabilities:
  drop: [ALL]
  add: {{ .capabilities | toJson }}
{{- $profile := .seccompProfile | default "RuntimeDefault" }}
{{- if hasPrefix "Localhost/" $profile }}
seccompProfile: {type: Localhost, localhostProfile: {{ trimPrefix "Localhost/" $profile | quote }}}
{{- else }}
seccompProfile: {type: {{ $profile }}}
{{- end }}
{{- end -}}

{{/*
Where a bare name of a login pod or worker is looked for. Slurm speaks of nodes by these names: a job's first host, `ssh`
to a node, and slurmctld, which holds up everybody for ten seconds when the host of an srun cannot be found.
Kubernetes takes 32 domains, three or more of them its own.
*/}}
{{- define "minivm.searches" -}}
{{- $full := include "minivm.fullname" . -}}
{{- $domains := list -}}
{{- range concat (list "login") (keys (include "minivm.pools" . | fromJson) | sortAlpha) -}}
  {{- $domains = append $domains (printf "%s-%s.%s.svc.%s" $full . $.Release.Namespace $.Values.clusterDomain) -}}
{{- end -}}
{{- slice $domains 0 (min 26 (len $domains)) | toJson -}}
{{- end -}}

{{/*
The domains of a running object's pods while their image stays: (dict "root" $ "api" group "kind" kind "name" name "image" i).
A pool that comes or goes must not replace the pods of the other pools, which would requeue their jobs and end ssh sessions.
These pods get the present domains with their next image. The controller's pod, which has no jobs, always has all of them.
*/}}
{{- define "minivm.keptSearches" -}}
{{- $all := include "minivm.searches" .root -}}
{{- $live := dig "spec" "template" "spec" dict (lookup .api .kind .root.Release.Namespace .name) -}}
{{- $kept := dig "dnsConfig" "searches" list $live -}}
{{- $isSame := eq .image (toString (first (dig "containers" (list dict) $live)).image) -}}
{{- ternary ($kept | toJson) $all (and $isSame (has (first ($all | fromJsonArray)) $kept)) -}}
{{- end -}}

{{/*
Whether the pods patch their own conditions, with a right and a token for it. Where the fleet runs it reads them from the
pods' pages and writes them. Then there is no readiness gate either: pods become ready while no fleet runs, too.
*/}}
{{- define "minivm.podsWriteConditions" -}}
{{- if and .Values.podConditions.enabled (not .Values.fleet.enabled) }}yes{{ end -}}
{{- end -}}

{{/*
Whether a role's pods do: include "minivm.writesConditions" (dict "root" $ "role" r "keep" seconds). Login pods that keep
their sessions are a Deployment's: a right is for pods by name, and theirs are known to nobody.
*/}}
{{- define "minivm.writesConditions" -}}
{{- if and (include "minivm.podsWriteConditions" .root) (ne .role "demo") (not .keep) }}yes{{ end -}}
{{- end -}}

{{/* The content of a projected volume: the account's token, for `seconds` if named, and how to reach the API server. */}}
{{- define "minivm.apiToken" -}}
defaultMode: 0400
sources:
  - serviceAccountToken: {path: token, expirationSeconds: {{ .seconds | default 3607 }}}
  - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
  - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end -}}

{{/*
The login pools, as JSON: `login`, which has the settings beside `pools`, and each of `pools` with those settings under its
own. A node port is one Service's, and so is what annotations name (a host name, an address): no pool inherits them. A key
without a value is as good as left out: null over groups would let everybody in.
*/}}
{{- define "minivm.loginPools" -}}
{{- $first := omit .Values.login "pools" -}}
{{- $all := dict "login" $first -}}
{{- range $name, $pool := .Values.login.pools -}}
  {{- $below := merge (dict "service" (omit $first.service "nodePort" "annotations")) (omit $first "service") | deepCopy -}}
  {{- $own := dict -}}
  {{- range $key, $value := $pool }}{{ if not (kindIs "invalid" $value) }}{{ $_ := set $own $key $value }}{{ end }}{{ end -}}
  {{- if ne $name "login" }}{{ $_ := set $all $name (mergeOverwrite $below (deepCopy $own)) }}{{ end -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* An object of a login pool: (dict "root" $ "name" pool "kind" k): <name>-login or <name>-ssh, and of others -<pool>. */}}
{{- define "minivm.loginObject" -}}
{{ include "minivm.fullname" .root }}-{{ .kind }}{{ if ne .name "login" }}-{{ .name }}{{ end }}
{{- end -}}

{{/*
The labels of a login pool's pods, by which its Services and budgets select: (dict "root" $ "name" pool). A single one is
`login` without a label of its own, as before there were pools.
*/}}
{{- define "minivm.loginSelector" -}}
{{- include "minivm.selector" (dict "root" .root "role" "login" "pool" (ternary .name "" (not (empty .root.Values.login.pools)))) -}}
{{- end -}}

{{/* The names of a login pool's pods, or of its Deployments, as JSON: (dict "root" $ "name" pool "pool" settings). */}}
{{- define "minivm.loginNames" -}}
{{- $names := list -}}
{{- range $i := until (int .pool.replicas) }}{{ $names = append $names (printf "%s-%d" (include "minivm.loginObject" (dict "root" $.root "name" $.name "kind" "login")) $i) }}{{ end -}}
{{- toJson $names -}}
{{- end -}}

{{/* The names of the login pods, as JSON; none of those that Deployments name. */}}
{{- define "minivm.loginPods" -}}
{{- $names := list -}}
{{- range $name, $pool := include "minivm.loginPools" . | fromJson -}}
  {{- if not (int $pool.keepSeconds) }}{{ $names = include "minivm.loginNames" (dict "root" $ "name" $name "pool" $pool) | fromJsonArray | concat $names }}{{ end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* The Deployments of login pods that keep their sessions, one a pod, with their graceSeconds, as JSON. */}}
{{- define "minivm.loginDeployments" -}}
{{- $all := dict -}}
{{- range $name, $pool := include "minivm.loginPools" . | fromJson -}}
  {{- if int $pool.keepSeconds -}}
    {{- range include "minivm.loginNames" (dict "root" $ "name" $name "pool" $pool) | fromJsonArray }}{{ $_ := set $all . (int $pool.graceSeconds) }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* The parts of a pod's spec that every role has. `searches`: other domains than all. */}}
{{- define "minivm.podCommon" -}}
serviceAccountName: {{ include "minivm.fullname" .root }}-{{ .role }}
{{- /* Never the automatic one: in a pod that runs as root without fsGroup every user and job could read it. */}}
automountServiceAccountToken: false
{{- if include "minivm.writesConditions" . }}
readinessGates:
  - conditionType: minivm.io/Ready
{{- end }}
enableServiceLinks: false
{{- if and .root.Values.priorityClasses.enabled (ne .role "worker") }}
{{- /* Of no class they would be the first to go, before every worker. */}}
priorityClassName: {{ .root.Values.priorityClasses.cluster.name }}
{{- end }}
terminationGracePeriodSeconds: {{ .grace }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .settings.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if ne .role "demo" }}
dnsConfig:
  searches: {{ .searches | default (include "minivm.searches" .root) }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .settings.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .settings.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with .settings.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .settings.topologySpreadConstraints }}
topologySpreadConstraints: {{ toJson . }}
{{- end }}
{{- with .settings.resourceClaims }}
resourceClaims: {{ toJson . }}
{{- end }}
{{- with .settings.initContainers }}
initContainers: {{ toJson . }}
{{- end }}
{{- end -}}

{{/* Secrets and drop-ins that a role mounts: volumeMounts here, volumes below, from one list each. */}}
{{- define "minivm.commonMounts" -}}
{{- if eq (include "minivm.auth" .root) "munge" }}
- {name: munge, mountPath: /mnt/minivm/secrets/munge, readOnly: true}
{{- else }}
- {name: slurm-key, mountPath: /mnt/minivm/secrets/slurm-key, readOnly: true}
{{- if (include "minivm.key" (dict "root" .root "name" "slurm-key") | fromJson).made }}
- {name: slurm-jwks, mountPath: /mnt/minivm/secrets/slurm-jwks, readOnly: true}
{{- end }}
{{- end }}
{{- if include "minivm.hasSssd" .root }}
- {name: sssd, mountPath: /mnt/minivm/secrets/sssd, readOnly: true}
{{- end }}
{{- if and (include "minivm.hasPeople" .root) (ne .role "demo") }}
- {name: people, mountPath: /mnt/minivm/people, readOnly: true}
{{- end }}
{{- if include "minivm.writesConditions" . }}
- {name: api-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}
{{- if .ssh }}
- {name: ssh-host-keys, mountPath: /mnt/minivm/secrets/ssh, readOnly: true}
- {name: known-hosts, mountPath: /mnt/minivm/config/ssh, readOnly: true}
{{- end }}
{{- if and .root.Values.scripts.existingSecret (ne .role "accounting") }}
- {name: gitsync, mountPath: /mnt/minivm/secrets/gitsync, readOnly: true}
{{- end }}
{{- if and (include "minivm.hasRing" .root) (ne .role "accounting") }}
- {name: ring, mountPath: /mnt/minivm/secrets/ring, readOnly: true}
{{- end }}
{{- if and .root.Values.scripts.policy (ne .role "accounting") }}
- {name: script-policy, mountPath: /mnt/minivm/config/scripts, readOnly: true}
{{- end }}
{{- if ne .role "demo" }}
- {name: services-d, mountPath: /mnt/minivm/config/services.d, readOnly: true}
- {name: supervisor-d, mountPath: /mnt/minivm/config/supervisor.d, readOnly: true}
{{- end }}
{{- end -}}

{{- define "minivm.commonVolumes" -}}
{{- if eq (include "minivm.auth" .root) "munge" }}
- name: munge
  secret: {secretName: {{ include "minivm.secret.munge" .root }}, defaultMode: 0400{{ include "minivm.keyItems" (dict "root" .root "name" "munge") }}}
{{- else }}
- name: slurm-key
  secret: {secretName: {{ include "minivm.secret.slurm" .root }}, defaultMode: 0400{{ include "minivm.keyItems" (dict "root" .root "name" "slurm-key") }}}
{{- if (include "minivm.key" (dict "root" .root "name" "slurm-key") | fromJson).made }}
{{- /* Beside the key that the cluster made, while keys are rotated. */}}
- name: slurm-jwks
  secret: {secretName: {{ include "minivm.secret.slurm" .root }}, defaultMode: 0400, optional: true, items: [{key: slurm.jwks, path: slurm.jwks}]}
{{- end }}
{{- end }}
{{- if include "minivm.hasSssd" .root }}
- name: sssd
  secret: {secretName: {{ include "minivm.secret.sssd" .root }}, defaultMode: 0400}
{{- end }}
{{- if and (include "minivm.hasPeople" .root) (ne .role "demo") }}
{{- /* No pod waits for it: without it the people before stay, and the pod says that it is missing. */}}
- name: people
  {{- if .root.Values.people.existingSecret }}
  secret: {secretName: {{ .root.Values.people.existingSecret }}, defaultMode: 0400, optional: true}
  {{- else }}
  configMap: {name: {{ include "minivm.peopleConfigMap" .root }}, defaultMode: 0400, optional: true}
  {{- end }}
{{- end }}
{{- if include "minivm.writesConditions" . }}
- name: api-token
  projected:
    {{- include "minivm.apiToken" . | nindent 4 }}
{{- end }}
{{- if .ssh }}
{{- /* A worker has no key of the login pods: root on a worker could impersonate a login pod. */}}
- name: ssh-host-keys
  {{- if eq .role "login" }}
  secret: {secretName: {{ include "minivm.secret.ssh" .root }}, defaultMode: 0400{{ include "minivm.keyItems" (dict "root" .root "name" "ssh-host-keys") }}}
  {{- else }}
  secret: {secretName: {{ include "minivm.secret.workerSsh" .root }}, defaultMode: 0400{{ include "minivm.keyItems" (dict "root" .root "name" "worker-host-keys") }}}
  {{- end }}
{{- /* No pod waits for it: what comes later is seen later. */}}
- name: known-hosts
  configMap: {name: {{ include "minivm.fullname" .root }}-known-hosts}
{{- end }}
{{- if and .root.Values.scripts.existingSecret (ne .role "accounting") }}
- name: gitsync
  secret: {secretName: {{ .root.Values.scripts.existingSecret }}, defaultMode: 0400}
{{- end }}
{{- if and (include "minivm.hasRing" .root) (ne .role "accounting") }}
- name: ring
  secret: {secretName: {{ include "minivm.secret.ring" .root }}, defaultMode: 0400{{ include "minivm.keyItems" (dict "root" .root "name" "ring") }}}
{{- end }}
{{- if and .root.Values.scripts.policy (ne .role "accounting") }}
- name: script-policy
  configMap: {name: {{ include "minivm.fullname" .root }}-script-policy}
{{- end }}
{{- if ne .role "demo" }}
- name: services-d
  configMap: {name: {{ include "minivm.fullname" .root }}-{{ .role }}-services}
- name: supervisor-d
  configMap: {name: {{ include "minivm.fullname" .root }}-{{ .role }}-supervisor}
{{- end }}
{{- end -}}

{{- define "minivm.sharedMounts" -}}
{{- if .Values.home.enabled }}
- {name: home, mountPath: {{ .Values.home.mountPath }}}
{{- end }}
{{- range $name, $mount := .Values.mounts }}
- {name: shared-{{ $name }}, mountPath: {{ $mount.mountPath }}, readOnly: {{ $mount.readOnly | default false }}}
{{- end }}
{{- end -}}

{{- define "minivm.homeClaim" -}}
{{- default (printf "%s-home" (include "minivm.fullname" .)) .Values.home.existingClaim -}}
{{- end -}}

{{- define "minivm.sharedVolumes" -}}
{{- if .Values.home.enabled }}
- name: home
  persistentVolumeClaim: {claimName: {{ include "minivm.homeClaim" . }}}
{{- end }}
{{- range $name, $mount := .Values.mounts }}
- name: shared-{{ $name }}
  {{- if $mount.claim }}
  persistentVolumeClaim: {claimName: {{ $mount.claim }}}
  {{- else if $mount.nfs }}
  nfs: {server: {{ $mount.nfs.server }}, path: {{ $mount.nfs.path }}, readOnly: {{ $mount.readOnly | default false }}}
  {{- else }}
  hostPath: {path: {{ required (printf "mounts.%s needs a claim, an nfs export or a hostPath" $name) $mount.hostPath }}}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* The volume of `backups.volume`. */}}
{{- define "minivm.backupVolume" -}}
{{- if .claim -}}
persistentVolumeClaim: {claimName: {{ .claim }}}
{{- else if .nfs -}}
nfs: {server: {{ .nfs.server }}, path: {{ .nfs.path }}}
{{- else -}}
hostPath: {path: {{ .hostPath }}}
{{- end }}
{{- end -}}

{{/* What can be known of a service file without the image: that it is YAML, and its keys (init/plan/spec.py). The pods
would refuse it too, and stay with the last good set; whoever installs is told at once. */}}
{{- define "minivm.checkDropIn" -}}
{{- $service := fromYaml .text }}
{{- if $service.Error }}{{ include "minivm.mistake" (list .root (printf "%s: not a service file: %s" .at $service.Error)) }}{{ else }}
{{- $known := list "disabled" "name" "about" "kind" "command" "prepare" "when" "needs" "after" "bound-to" "required" "ready" "restart" "stop" "reload" "every" "timeout" "watchdog" "user" "group" "groups" "umask" "cwd" "environment" "environment-files" "limits" "capabilities" "no-new-privileges" "oom-score" "log" }}
{{- range $key, $_ := $service }}
{{- if not (has $key $known) }}{{ include "minivm.mistake" (list $.root (printf "%s: unknown key %s; known: %s" $.at $key (join ", " $known))) }}{{ end }}
{{- end }}
{{- if not (or $service.command (eq (toString $service.kind) "gate") (eq (toJson $service) "{\"disabled\":true}")) }}{{ include "minivm.mistake" (list .root (printf "%s: command is missing" .at)) }}{{ end }}
{{- end }}
{{- end -}}

{{/*
The site's policy, as far as a render can tell: a node leaves one aside that it cannot read, and drains by the tree's.
*/}}
{{- define "minivm.checkPolicy" -}}
{{- $policy := fromJson .text }}
{{- if $policy.Error }}{{ include "minivm.mistake" (list .root (printf "%s: not JSON, or not a mapping: %s" .at $policy.Error)) }}{{ else }}
{{- $known := dict "" (list "runner" "gate" "broker") "runner" (list "prolog" "epilog" "task_prolog" "health" "scripts" "notes_failures" "box_days") "gate" (list "wait_s" "unconfirmed") "broker" (list "raise_after" "clear_after" "clear_wait_s" "guard" "rate" "offender" "checks") }}
{{- range $of, $keys := $known }}
{{- $part := $policy }}{{ if $of }}{{ $part = default dict (index $policy $of) }}{{ end }}
{{- if not (kindIs "map" $part) }}{{ include "minivm.mistake" (list $.root (printf "%s: %s: wanted a mapping" $.at $of)) }}{{ $part = dict }}{{ end }}
{{- range $key, $_ := $part }}
{{- if not (has $key $keys) }}{{ include "minivm.mistake" (list $.root (printf "%s: unknown key %s; known: %s" $.at (trimPrefix "." (printf "%s.%s" $of $key)) (join ", " $keys))) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/*
The size of /dev/shm: (dict "at" field "size" "50%" "memory" limit). A part of the pod's memory, as a machine's is half of its own; of
a pod without a limit nothing is said, and the kubelet gives it the size of what its machine has for pods.
*/}}
{{- define "minivm.shmSize" -}}
{{- if not (hasSuffix "%" .size) -}}
  {{- .size -}}
{{- else if .memory -}}
  {{- $text := toString .memory -}}
  {{- if not (regexMatch "^[0-9.]+(e[+-]?[0-9]+|[KMGTPE]i|[kKMGTPE])?$" $text) }}{{ fail (printf "%s.resources.limits.memory is %s, of which shmSize cannot take %s: write a number with a unit such as Gi" .at $text .size) }}{{ end -}}
  {{- $units := dict "" 1 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
  {{- $unit := regexFind "[A-Za-z]*$" $text -}}
  {{- $bytes := mulf (float64 (trimSuffix $unit $text)) (float64 (index $units $unit)) -}}
  {{- printf "%dKi" (int64 (divf (mulf $bytes (float64 (trimSuffix "%" .size))) 102400.0)) -}}
{{- end -}}
{{- end -}}
