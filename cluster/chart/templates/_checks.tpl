{{/* A mistake in the values: (list root text). The render goes on, so that "minivm.refuse" tells all of them at once. */}}
{{- define "minivm.mistake" -}}
{{- $values := (first .).Values -}}
{{- $_ := set $values "mistakes" (append (default list $values.mistakes) (last .)) -}}
{{- end -}}

{{- define "minivm.refuse" -}}
{{- with .Values.mistakes }}{{ fail (join "\n" (uniq .)) }}{{ end -}}
{{- end -}}

{{/* Values that render and are mistakes all the same. */}}
{{- define "minivm.checks" -}}
{{- include "minivm.checks.keys" . -}}
{{- include "minivm.checks.network" . -}}
{{- include "minivm.checks.mounts" . -}}
{{- include "minivm.checks.controllers" . -}}
{{- include "minivm.checks.parts" . -}}
{{- include "minivm.checks.accounting" . -}}
{{- include "minivm.checks.people" . -}}
{{- include "minivm.checks.logins" . -}}
{{- include "minivm.checks.files" . -}}
{{- include "minivm.checks.fleet" . -}}
{{- end -}}

{{/* Without the fleet these settings would do nothing, silently. */}}
{{- define "minivm.checks.fleet" -}}
{{- if not .Values.fleet.enabled -}}
  {{- range $name := list "machines" "workerPools" -}}
    {{- if (index $.Values.fleet $name).enabled }}{{ include "minivm.mistake" (list $ (printf "fleet.%s.enabled: the fleet makes these objects, and fleet.enabled is false: set fleet.enabled to true, or leave this out" $name)) }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* Files that the chart always writes: a second one of the name would be no YAML. */}}
{{- define "minivm.checks.files" -}}
{{- $own := dict "slurm.conf" "slurm.config and slurm.extraConfig" "cgroup.conf" "slurm.cgroupConfig" "gres.conf" "slurm.gresConfig" "pools.json" "workers.pools" -}}
{{- range $name, $setting := $own -}}
  {{- if hasKey $.Values.slurm.files $name }}{{ include "minivm.mistake" (list $ (printf "slurm.files: the chart makes %s itself: write it to %s" $name $setting)) }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The field of a login pool's settings. */}}
{{- define "minivm.loginField" -}}
{{ ternary "login" (printf "login.pools.%s" .) (eq . "login") }}
{{- end -}}

{{- define "minivm.checks.logins" -}}
{{- $workers := include "minivm.pools" . | fromJson -}}
{{- $ports := dict -}}
{{- if hasKey (default dict .Values.login.pools) "login" }}{{ include "minivm.mistake" (list $ "login.pools.login: `login` is the pool that the settings beside `pools` describe: change those, or choose another name") }}{{ end -}}
{{- include "minivm.checks.firstPool" . -}}
{{- range $name, $pool := include "minivm.loginPools" . | fromJson -}}
  {{- $field := include "minivm.loginField" $name -}}
  {{- $object := include "minivm.loginObject" (dict "root" $ "name" $name "kind" "login") -}}
  {{- if hasKey $workers $name }}{{ if ne $name "login" }}{{ include "minivm.mistake" (list $ (printf "%s: workers.pools has a pool %s too, and labels, metrics and alerts tell pools apart by name: choose another name" $field $name)) }}{{ end }}{{ end -}}
  {{- range $kind := list "login" "ssh" -}}
    {{- if hasKey $workers (printf "%s-%s" $kind $name) }}{{ include "minivm.mistake" (list $ (printf "%s: its %s would have the name of that of workers.pools.%s-%s: choose another name" $field (ternary "StatefulSet" "Service" (eq $kind "login")) $kind $name)) }}{{ end -}}
  {{- end -}}
  {{- if and (ne $name "login") (gt (len $object) 50) }}{{ include "minivm.mistake" (list $ (printf "%s: its pods would be called %s-0, and Kubernetes' labels take 50 characters before the number, not %d: choose a shorter name" $field $object (len $object))) }}{{ end -}}
  {{- with $pool.service.nodePort -}}
    {{- $before := index $ports (toString .) -}}
    {{- if $before }}{{ include "minivm.mistake" (list $ (printf "%s.service.nodePort: %d is the port of %s too, and a port is one Service's: choose another" $field (int .) $before)) }}{{ end -}}
    {{- $_ := set $ports (toString .) (printf "%s.service" $field) -}}
  {{- end -}}
  {{- if and (eq $pool.service.type "LoadBalancer") $.Values.login.service.annotations (not (hasKey $pool.service "annotations")) }}{{ include "minivm.mistake" (list $ (printf "%s.service.annotations: missing, and those of login.service are not inherited (a host name or an address is one Service's; another may keep a load balancer internal): write this pool's own, or {} for none" $field)) }}{{ end -}}
  {{- include "minivm.checks.allowedGroups" (dict "root" $ "field" (printf "%s.allowedGroups" $field) "groups" $pool.allowedGroups) -}}
{{- end -}}
{{- end -}}

{{/*
With the first pool the Service of `login` selects its pods by a label, which running pods lack: ssh would reach nothing
until one is replaced. Without that label it would select the pods of all pools.
*/}}
{{- define "minivm.checks.firstPool" -}}
{{- if .Values.login.pools -}}
  {{- $service := include "minivm.loginObject" (dict "root" $ "name" "login" "kind" "ssh") -}}
  {{- $bare := list -}}
  {{- range dig "subsets" list (lookup "v1" "Endpoints" .Release.Namespace $service) }}{{ range .addresses }}{{ with .targetRef -}}
    {{- $labels := dig "metadata" "labels" dict (lookup "v1" "Pod" $.Release.Namespace .name) -}}
    {{- if and $labels (not (hasKey $labels "minivm.io/pool")) }}{{ $bare = append $bare .name }}{{ end -}}
  {{- end }}{{ end }}{{ end -}}
  {{- with $bare }}{{ include "minivm.mistake" (list $ (printf "login.pools: the first pool makes Service %s select pods by a label that the running pods lack (%s), and new ssh connections would fail until these are replaced: run `kubectl -n %s label pod -l 'app.kubernetes.io/instance=%s,app.kubernetes.io/component=login,!minivm.io/pool' minivm.io/pool=login`, which restarts nothing, and upgrade again (docs/how-to/login-pools.md)" $service (join ", " .) $.Release.Namespace (include "minivm.fullname" $))) }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* sshd would refuse nobody's name: a group that does not exist keeps everybody out, and a pattern lets strangers in. */}}
{{- define "minivm.checks.allowedGroups" -}}
{{- if and (kindIs "slice" .groups) (empty .groups) }}{{ include "minivm.mistake" (list .root (printf "%s: an empty list would let nobody in: name groups, or leave it out to let everybody in" .field)) }}{{ end -}}
{{- $p := .root.Values.people -}}
{{- $known := list -}}
{{- range $p.groups }}{{ $known = append $known .name }}{{ end -}}
{{- range .groups -}}
  {{- if eq . "root" }}{{ include "minivm.mistake" (list $.root (printf "%s: root is no group of people: name the group of those who may log in" $.field)) -}}
  {{- else if regexMatch "^[0-9]+$" . }}{{ include "minivm.mistake" (list $.root (printf "%s: %s is a number, and sshd compares names: write the group's name" $.field .)) -}}
  {{- else if not (regexMatch "^[A-Za-z0-9_]([A-Za-z0-9_.@ -]*[A-Za-z0-9_.@-])?$" .) }}{{ include "minivm.mistake" (list $.root (printf "%s: %s is no name of a group: write letters, digits, spaces and _ . @ - , and no pattern" $.field (quote .))) -}}
  {{- else if and (or $p.users $p.groups) (not (include "minivm.hasSssd" $.root)) (not (has . $known)) }}{{ include "minivm.mistake" (list $.root (printf "%s: %s is no group of people.groups, which has %s: add it there, or name one of those" $.field . (join ", " $known | default "none"))) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "minivm.checks.people" -}}
{{- $p := .Values.people -}}
{{- $given := list -}}
{{- range $name := list "existingConfigMap" "existingSecret" }}{{ if index $p $name }}{{ $given = append $given $name }}{{ end }}{{ end -}}
{{- if or $p.users $p.groups }}{{ $given = append $given "users and groups" }}{{ end -}}
{{- if gt (len $given) 1 }}{{ include "minivm.mistake" (list $ (printf "people: %s are given, and people.yaml is one file: keep one of them" (join ", " $given))) }}{{ end -}}
{{- if $p.scim.enabled -}}
  {{- if ne (join "" $given) "existingSecret" }}{{ include "minivm.mistake" (list $ (printf "people.scim: it alone writes people.yaml, into the Secret of people.existingSecret, and given is %s: make an empty Secret and name it there, and nothing else" (join ", " $given | default "nothing"))) }}{{ end -}}
  {{- if not $p.scim.tokenSecret }}{{ include "minivm.mistake" (list $ "people.scim.tokenSecret: it is empty: name a Secret whose key `token` has the provider's bearer token") }}{{ end -}}
  {{- if eq $p.scim.tokenSecret $p.existingSecret }}{{ include "minivm.mistake" (list $ "people.scim.tokenSecret: every pod mounts the Secret of people.existingSecret: keep the token in another one") }}{{ end -}}
{{- end -}}
{{- if and (ne $p.removedJobs "keep") (empty $given) }}{{ include "minivm.mistake" (list $ (printf "people.removedJobs: %s counts for people of people.yaml, and there is none: give people.existingConfigMap, existingSecret or users" $p.removedJobs)) }}{{ end -}}
{{- end -}}

{{/* The daemons refuse such a key at start, when the Secret exists already. */}}
{{- define "minivm.checks.keys" -}}
{{- range $name, $sizes := dict "munge" (list 32 1024) "slurm" (list 32 4096) "jwt" (list 32 8192) "ring" (list 16 4096) -}}
  {{- $text := index (index $.Values.secrets $name) "key" -}}
  {{- if $text -}}
    {{- if not (regexMatch "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$" $text) }}{{ include "minivm.mistake" (list $ (printf "secrets.%s.key is no base64: `base64 -w0 FILE` makes it" $name)) }}{{ else -}}
    {{- $size := len (b64dec $text) -}}
    {{- if or (lt $size (first $sizes)) (gt $size (last $sizes)) }}{{ include "minivm.mistake" (list $ (printf "secrets.%s.key has %d bytes, and a key has %d to %d: leave it empty and the cluster makes one" $name $size (first $sizes) (last $sizes))) }}{{ end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "minivm.checks.network" -}}
{{- range $field := list "sshFrom" "metricsFrom" "scimFrom" -}}
  {{- range index $.Values.networkPolicy $field -}}
    {{- if not . }}{{ include "minivm.mistake" (list $ (printf "networkPolicy.%s: {} names no peer: write podSelector, namespaceSelector or ipBlock; all pods of all namespaces are {namespaceSelector: {}}" $field)) }}{{ end -}}
    {{- range $key, $_ := . -}}
      {{- if not (has $key (list "podSelector" "namespaceSelector" "ipBlock")) }}{{ include "minivm.mistake" (list $ (printf "networkPolicy.%s: %s is no part of a peer; a peer has podSelector, namespaceSelector or ipBlock" $field $key)) }}{{ end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range .Values.networkPolicy.nodeCidrs -}}
  {{- $bits := splitList "/" . | last | int -}}
  {{- if lt $bits (ternary 16 8 (contains ":" .)) }}{{ include "minivm.mistake" (list $ (printf "networkPolicy.nodeCidrs: %s is more than the machines' network, and every address in it reaches slurmctld and every slurmd: name the machines' own networks" .)) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "minivm.checks.controllers" -}}
{{- include "minivm.checks.claim" . -}}
{{- if gt (int .Values.controller.replicas) 1 -}}
  {{- if not .Values.controller.moveAddress -}}
    {{- $name := .Values.controller.persistence.existingClaim -}}
    {{- if not $name }}{{ include "minivm.mistake" (list $ "controller.replicas is 2, and controller.persistence.existingClaim is empty: both controllers need the same state. Name a PersistentVolumeClaim with the access mode ReadWriteMany (docs/how-to/two-controllers.md)") }}{{ end -}}
    {{- with lookup "v1" "PersistentVolumeClaim" .Release.Namespace $name -}}
      {{- if not (has "ReadWriteMany" .spec.accessModes) }}{{ include "minivm.mistake" (list $ (printf "controller.persistence.existingClaim: %s has the access modes %s, and controller.replicas 2 needs ReadWriteMany: name a claim of a class that offers it" $name (join ", " .spec.accessModes))) }}{{ end -}}
    {{- end -}}
  {{- end -}}
  {{- if eq .Values.accounting.mode "embedded" }}{{ include "minivm.mistake" (list $ "controller.replicas is 2, and accounting.mode is embedded: its database lives in one controller's pod. Set accounting.mode to pod, external or none") }}{{ end -}}
  {{- if not .Values.controller.stableAddress }}{{ include "minivm.mistake" (list $ "controller.replicas is 2, and controller.stableAddress is false: the address of one pod cannot move. Set it to true") }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* slurmdbd would begin with an empty database, and slurmctld does not start with one that never knew its cluster. */}}
{{- define "minivm.checks.accounting" -}}
{{- $full := include "minivm.fullname" . -}}
{{- /* A pool may have that name. */ -}}
{{- $set := lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-accounting" $full) -}}
{{- if ne "accounting" (dig "metadata" "labels" "app.kubernetes.io/component" "" $set) }}{{ $set = false }}{{ end -}}
{{- $apart := or (lookup "v1" "PersistentVolumeClaim" .Release.Namespace (printf "records-%s-accounting-0" $full)) $set -}}
{{- $mode := .Values.accounting.mode -}}
{{- $from := .Values.accounting.from -}}
{{- if and $from (has $mode (list $from "none")) -}}
  {{- include "minivm.mistake" (list $ (printf "accounting.from is %s, and accounting.mode is %s: it names the place where the records were before (docs/how-to/accounting-pod.md)" $from $mode)) -}}
{{- end -}}
{{- if eq $mode "pod" -}}
  {{- if and (not $apart) (not $from) (lookup "v1" "PersistentVolumeClaim" .Release.Namespace (printf "state-%s-controller-0" $full)) }}{{ include "minivm.mistake" (list $ (printf "accounting.mode is pod, and the cluster began with another mode (claim state-%s-controller-0): its records would stay behind, and slurmctld does not start with a database that never knew it. Keep the mode that it has, or move the records: accounting.from names their place (docs/how-to/accounting-pod.md). For a new cluster without those jobs and records delete the claim state-%s-controller-0 first" $full $full)) }}{{ end -}}
{{- else if and $apart (ne $from "pod") -}}
  {{- include "minivm.mistake" (list $ (printf "accounting.mode is %s, and this cluster's records are in its accounting pod (claim records-%s-accounting-0): they would stay behind, and slurmctld does not start with a database that never knew it. Set accounting.mode to pod, or move the records: accounting.from pod (docs/how-to/accounting-pod.md). To give them up delete the StatefulSet %s-accounting and the claim records-%s-accounting-0 first" $mode $full $full $full)) -}}
{{- end -}}
{{- end -}}

{{/* On another volume slurmctld would find no job. Who has stopped the controller has moved its state. */}}
{{- define "minivm.checks.claim" -}}
{{- $name := printf "%s-controller" (include "minivm.fullname" .) -}}
{{- with lookup "apps/v1" "StatefulSet" .Release.Namespace $name -}}
  {{- $own := printf "state-%s-0" $name -}}
  {{- $present := $own -}}
  {{- range .spec.template.spec.volumes }}{{ if eq .name "shared" }}{{ $present = .persistentVolumeClaim.claimName }}{{ end }}{{ end -}}
  {{- $wanted := $.Values.controller.persistence.existingClaim | default $own -}}
  {{- if and (ne $present $wanted) (gt (int .spec.replicas) 0) }}{{ include "minivm.mistake" (list $ (printf "controller.persistence.existingClaim: the state of the running controller is on the claim %s, and would be on %s: stop the controller and move the state first (docs/how-to/two-controllers.md)" $present $wanted)) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "minivm.checks.mounts" -}}
{{- $paths := dict -}}
{{- if .Values.home.enabled }}{{ $_ := set $paths (printf "home.mountPath: %s" .Values.home.mountPath) .Values.home.mountPath }}{{ end -}}
{{- $taken := dict -}}
{{- if .Values.home.enabled }}{{ $_ := set $taken (clean .Values.home.mountPath) "home.mountPath" }}{{ end -}}
{{- range $name, $mount := .Values.mounts -}}
  {{- $field := printf "mounts.%s.mountPath" $name -}}
  {{- with get $taken (clean $mount.mountPath) }}{{ include "minivm.mistake" (list $ (printf "%s: %s is the path of %s too: choose another path" $field $mount.mountPath .)) }}{{ end -}}
  {{- $_ := set $taken (clean $mount.mountPath) $field -}}
  {{- $_ := set $paths (printf "%s: %s" $field $mount.mountPath) $mount.mountPath -}}
{{- end -}}
{{- range $field, $settings := include "minivm.extendable" . | fromJson -}}
  {{- $volumes := list -}}
  {{- range $settings.extraVolumes }}{{ $volumes = append $volumes .name }}{{ end -}}
  {{- range $settings.extraVolumeMounts -}}
    {{- if not (has .name $volumes) }}{{ include "minivm.mistake" (list $ (printf "%s.extraVolumeMounts: %s is not in extraVolumes, which has: %s" $field .name (join ", " $volumes | default "nothing"))) }}{{ end -}}
    {{- $_ := set $paths (printf "%s.extraVolumeMounts: %s at %s" $field .name .mountPath) .mountPath -}}
  {{- end -}}
{{- end -}}
{{- $own := list "/bin" "/dev" "/etc/minivm" "/etc/munge" "/etc/pam.d" "/etc/slurm" "/etc/ssh" "/etc/sssd" "/lib" "/mnt/minivm" "/opt/minivm" "/proc" "/run" "/sbin" "/sys" "/usr/bin" "/usr/lib" "/usr/libexec" "/usr/sbin" "/usr/share/minivm" "/var/lib/minivm" "/var/lib/sss" "/var/run" "/var/spool" -}}
{{- range $subject, $said := $paths -}}
  {{- $path := clean $said -}}
  {{- $hides := list -}}
  {{- range $own -}}
    {{- if or (eq $path "/") (eq $path .) (hasPrefix (printf "%s/" .) $path) (hasPrefix (printf "%s/" $path) .) }}{{ $hides = append $hides . }}{{ end -}}
  {{- end -}}
  {{- with $hides }}{{ include "minivm.mistake" (list $ (printf "%s hides %s, which minivm needs: choose another path" $subject (join ", " .))) }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The settings of the pods that a site may add to, by the field that holds them. */}}
{{- define "minivm.extendable" -}}
{{- $all := dict -}}
{{- range $name, $pool := include "minivm.loginPools" . | fromJson }}{{ $_ := set $all (include "minivm.loginField" $name) $pool }}{{ end -}}
{{- range $name, $_ := include "minivm.pools" . | fromJson -}}
  {{- $_ := set $all (printf "workers.pools.%s" $name) (include "minivm.pool" (dict "root" $ "name" $name) | fromJson) -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{- define "minivm.checks.parts" -}}
{{- range $name, $pool := include "minivm.loginPools" . | fromJson -}}
  {{- $field := include "minivm.loginField" $name -}}
  {{- if and (int $pool.keepSeconds) (lt (int $pool.keepSeconds) (int $pool.graceSeconds)) }}{{ include "minivm.mistake" (list $ (printf "%s.keepSeconds: 0, or at least %s.graceSeconds (%d), not %d" $field $field (int $pool.graceSeconds) (int $pool.keepSeconds))) }}{{ end -}}
{{- end -}}
{{- range $field, $settings := include "minivm.extendable" . | fromJson -}}
  {{- range $label, $_ := $settings.podLabels -}}
    {{- if regexMatch "^(app.kubernetes.io|minivm.io)/" $label }}{{ include "minivm.mistake" (list $ (printf "%s.podLabels: %s is a label that minivm sets: choose another name" $field $label)) }}{{ end -}}
  {{- end -}}
  {{- if and $settings.resourceClaims (semverCompare "<1.32.0-0" $.Capabilities.KubeVersion.Version) }}{{ include "minivm.mistake" (list $ (printf "%s.resourceClaims: Kubernetes %s gives no devices by claims; it needs 1.32" $field $.Capabilities.KubeVersion.Version)) }}{{ end -}}
{{- end -}}
{{- end -}}
