{{/* The chart's name, or nameOverride. */}}
{{- define "ddpjob.chart" -}}
{{- .Values.nameOverride | default .Chart.Name -}}
{{- end }}

{{/* Name of all objects: fullnameOverride, else the release's name, followed by the chart's unless it contains that. At
     most 55 characters, so that the longest suffix fits into a DNS label. A Service's name has no dots. */}}
{{- define "ddpjob.name" -}}
{{- $chart := include "ddpjob.chart" . -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- $name := ternary $release (printf "%s-%s" $release $chart) (contains $chart $release) -}}
{{- $name = .Values.fullnameOverride | default $name | trunc 55 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- fail (printf "the release %q gives the name %q, and a Service's name must start with a letter: set fullnameOverride" .Release.Name $name) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{/* "true" if the chart creates the service account. Values of an older release (--reuse-values) lack `create`. */}}
{{- define "ddpjob.createsServiceAccount" -}}
{{- if ne (toString .Values.serviceAccount.create) "false" }}true{{ end -}}
{{- end }}

{{/* "true" if the chart creates roles, else "". Values of an older release (--reuse-values) lack `rbac`. */}}
{{- define "ddpjob.createsRoles" -}}
{{- if ne (toString (.Values.rbac | default dict).create) "false" }}true{{ end -}}
{{- end }}

{{- define "ddpjob.serviceAccount" -}}
{{- if not (or .Values.serviceAccount.name (include "ddpjob.createsServiceAccount" .)) -}}
{{- fail "serviceAccount.name: must be set if serviceAccount.create is false, because the roles are bound to it" -}}
{{- end -}}
{{- .Values.serviceAccount.name | default (include "ddpjob.name" .) -}}
{{- end }}

{{/* The securityContext of pods. Values of an older release (--reuse-values) lack `podSecurityContext`. */}}
{{- define "ddpjob.podSecurityContext" -}}
{{- $usual := dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532 "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- toYaml (.Values.podSecurityContext | default $usual) -}}
{{- end }}

{{- define "ddpjob.selector" -}}
app.kubernetes.io/name: {{ include "ddpjob.chart" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "ddpjob.labels" -}}
{{ include "ddpjob.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "ddpjob.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ printf "%s@%s" .repository .digest }}
{{- else }}{{ printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The port of /metrics; 0 if there is none. Values of an older release (--reuse-values) lack `metrics`. */}}
{{- define "ddpjob.metricsPort" -}}
{{- $metrics := .Values.metrics | default dict -}}
{{- if eq (toString $metrics.enabled) "false" }}0{{ else }}{{ $metrics.port | default 8082 | int }}{{ end -}}
{{- end }}

{{- define "ddpjob.statusURL" -}}
{{- .Values.progress.url | default (printf "http://%s-status.%s.svc:%v/v1/progress" (include "ddpjob.name" .) .Release.Namespace .Values.progress.port) -}}
{{- end }}

{{/* The variables that the chart sets, and for each the value of values.yaml that it comes from. */}}
{{- define "ddpjob.variables" -}}
DDPJOB_LEASE_NAMESPACE: the namespace of the release
DDPJOB_LEASE_NAME: fullnameOverride
DDPJOB_POD_NAME: the pod's own
DDPJOB_WATCH_NAMESPACES: watchNamespaces
DDPJOB_HEALTH_PORT: healthPort
DDPJOB_METRICS_PORT: metrics.port
DDPJOB_METRICS_OF_JOBS: metrics.perJob
DDPJOB_STATUS_PORT: progress.port
DDPJOB_STATUS_URL: progress.url
DDPJOB_LOST_NODE_SECONDS: lostNodeSeconds
DDPJOB_KEEP_LOG_TAIL: keepLogTail
DDPJOB_KEEP_FROM_AUTOSCALERS: keepFromAutoscalers
DDPJOB_MOUNT_API_TOKEN: mountApiToken
DDPJOB_GANGS: gang
DDPJOB_QUEUE_PLACES: gang.kueue.places.enabled
DDPJOB_MEMORY_MIB: resources.limits.memory
DDPJOB_EVENTS: events
DDPJOB_LOG_LEVEL: logLevel
DDPJOB_LOG_FORMAT: logFormat
{{- end }}

{{/* The gang adapters that are switched on. Values of an older release (--reuse-values) lack `gang`. */}}
{{- define "ddpjob.gangs" -}}
{{- $on := list -}}
{{- range $name, $gang := .Values.gang | default dict -}}
{{- if $gang.enabled }}{{ $on = append $on $name }}{{ end -}}
{{- end -}}
{{- join "," ($on | sortAlpha) -}}
{{- end }}

{{/* "true" if the operator shows positions of jobs in queues, else "". */}}
{{- define "ddpjob.queuePlaces" -}}
{{- with (.Values.gang | default dict).kueue -}}
{{- if and .enabled (.places | default dict).enabled }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* Checks of two values together, which values.schema.json cannot express. */}}
{{- define "ddpjob.check" -}}
{{- if and .Values.progress.enabled (eq (int .Values.healthPort) (int .Values.progress.port)) -}}
{{- fail (printf "healthPort and progress.port: must differ, both are %d" (int .Values.healthPort)) -}}
{{- end -}}
{{- $metrics := .Values.metrics | default dict -}}
{{- $port := include "ddpjob.metricsPort" . | int -}}
{{- if eq $port (int .Values.healthPort) -}}
{{- fail (printf "healthPort and metrics.port: must differ, both are %d" $port) -}}
{{- end -}}
{{- if and .Values.progress.enabled (eq $port (int .Values.progress.port)) -}}
{{- fail (printf "progress.port and metrics.port: must differ, both are %d" $port) -}}
{{- end -}}
{{- range list "serviceMonitor" "prometheusRule" "dashboards" -}}
{{- if and (eq $port 0) (get $metrics . | default dict).enabled -}}
{{- fail (printf "metrics.%s.enabled: needs metrics.enabled, because otherwise no metrics are served" .) -}}
{{- end -}}
{{- end -}}
{{- $kueue := (.Values.gang | default dict).kueue | default dict -}}
{{- range list "places" "readsJobs" -}}
{{- if and (not $kueue.enabled) (get $kueue . | default dict).enabled -}}
{{- fail (printf "gang.kueue.%s.enabled: needs gang.kueue.enabled; it has no effect without it" .) -}}
{{- end -}}
{{- end -}}
{{- $set := include "ddpjob.variables" . | fromYaml -}}
{{- $seen := dict -}}
{{- range .Values.extraEnv -}}
{{- if hasKey $set .name -}}
{{- fail (printf "extraEnv: %s is set by the chart (%s)" .name (get $set .name)) -}}
{{- end -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "extraEnv: %s is given twice" .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- $seconds := float64 (toString .value) -}}
{{- if and (regexMatch "^DDPJOB_LEASE_.*SECONDS$" .name) (or (le $seconds 0.0) (ge $seconds 86400.0)) -}}
{{- fail (printf "extraEnv: %s must be seconds above 0 and below a day, is \"%v\"" .name .value) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := .Values.podLabels -}}
{{- if hasPrefix "app.kubernetes.io/" $name -}}
{{- fail (printf "podLabels: %s belongs to the chart, which selects its pods by this label" $name) -}}
{{- end -}}
{{- if hasPrefix "training.ddpjob.io/" $name -}}
{{- fail (printf "podLabels: %s belongs to the pods of jobs; the operator would take its own pods for these" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The operator's rights in a namespace, or in all. docs/security.md has the reason for each verb. */}}
{{- define "ddpjob.rules" -}}
- apiGroups: [training.ddpjob.io]
  resources: [ddpjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [training.ddpjob.io]
  resources: [ddpjobs/status]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if has "native" (include "ddpjob.gangs" . | splitList ",") }}
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, delete]
{{- end }}
{{- if has "kueue" (include "ddpjob.gangs" . | splitList ",") }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [update]
{{- end }}
{{- if include "ddpjob.queuePlaces" . }}
- apiGroups: [visibility.kueue.x-k8s.io]
  resources: [localqueues/pendingworkloads]
  verbs: [get]
{{- end }}
{{- end }}

{{/* Rights on objects without a namespace that a queue refers to. */}}
{{- define "ddpjob.kueueRules" -}}
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors, workloadpriorityclasses]
  verbs: [get]
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [get]
{{- end }}
