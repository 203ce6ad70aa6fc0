{{- /* One of Grafana's dashboards as JSON, from its description in files/dashboards.yaml. */}}
{{- define "minivm.dashboard" -}}
{{- $source := dict "type" "prometheus" "uid" "${datasource}" -}}
{{- $choices := list (dict "name" "datasource" "type" "datasource" "query" "prometheus") -}}
{{- range $name := list "namespace" "user" -}}
{{- with index $.variables $name -}}
{{- $choices = append $choices (dict "name" $name "type" "query" "datasource" $source "refresh" 2 "query" (. | replace "NS" "namespace=\"$namespace\"")) -}}
{{- end -}}
{{- end -}}
{{- $panels := list -}}
{{- $top := 0 -}}
{{- range $row := .rows -}}
{{- $width := div 24 (len $row.panels) -}}
{{- range $column, $panel := $row.panels -}}
{{- $targets := list -}}
{{- range $legend, $query := $panel.queries -}}
{{- $target := dict "refId" (printf "Q%d" (len $targets)) "datasource" $source "expr" ($query | replace "NS" "namespace=\"$namespace\"") -}}
{{- if $legend }}{{ $_ := set $target "legendFormat" $legend }}{{ end -}}
{{- if eq $panel.type "table" }}{{ $_ := set $target "format" "table" }}{{ $_ := set $target "instant" true }}{{ end -}}
{{- $targets = append $targets $target -}}
{{- end -}}
{{- $defaults := dict -}}
{{- with $panel.unit }}{{ $_ := set $defaults "unit" . }}{{ end -}}
{{- if $panel.stacked }}{{ $_ := set $defaults "custom" (dict "stacking" (dict "mode" "normal") "fillOpacity" 40) }}{{ end -}}
{{- $panels = append $panels (dict "id" (add 1 (len $panels)) "type" $panel.type "title" $panel.title "datasource" $source
      "gridPos" (dict "x" (mul $column $width) "y" $top "w" $width "h" (int $row.height))
      "targets" $targets "fieldConfig" (dict "defaults" $defaults "overrides" list)) -}}
{{- end -}}
{{- $top = add $top (int $row.height) -}}
{{- end -}}
{{- dict "title" .title "uid" .uid "schemaVersion" 39 "version" 1 "editable" true "refresh" "30s" "time" (dict "from" "now-6h" "to" "now")
      "templating" (dict "list" $choices) "panels" $panels | toPrettyJson -}}
{{- end -}}
