{{/* The name of everything: the release's, with the chart's where it does not hold it. At most 56 characters, so that
     the longest suffix still fits into a DNS label. */}}
{{- define "ddpjob.name" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- $name | trunc 56 | trimSuffix "-" -}}
{{- end }}

{{- define "ddpjob.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "ddpjob.name" .) -}}
{{- end }}

{{- define "ddpjob.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
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

{{- define "ddpjob.statusURL" -}}
{{- .Values.progress.url | default (printf "http://%s-status.%s.svc:%v/v1/progress" (include "ddpjob.name" .) .Release.Namespace .Values.progress.port) -}}
{{- end }}

{{/* What the operator may do, in a namespace or in all. The reason for each verb stands in docs/operations.md. */}}
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
{{- end }}
