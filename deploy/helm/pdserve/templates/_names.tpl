{{- define "pdserve.fullname" -}}
{{- if contains "pdserve" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-pdserve" (.Release.Name | trunc 32 | trimSuffix "-") }}
{{- end }}
{{- end }}

{{- /* Labels that select pods: they never change. Argument: dict "root" $ "component" NAME. */ -}}
{{- define "pdserve.selector" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "pdserve.labels" -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- /* Argument: dict "root" $ "name" (router, node or redis). */ -}}
{{- define "pdserve.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ index $image.names .name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "pdserve.redisUrl" -}}
{{- .Values.redis.url | default (printf "rediss://%s-redis:6379/0" (include "pdserve.fullname" .)) }}
{{- end }}

{{- define "pdserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Where pods of a component go. Argument: dict "root" $ "component" NAME "values" VALUES. */ -}}
{{- define "pdserve.scheduling" -}}
{{- with .values.topologySpread }}
topologySpreadConstraints:
  - topologyKey: {{ .topologyKey }}
    maxSkew: {{ .maxSkew }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "pdserve.selector" $ | nindent 8 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* What all pods have. Argument: $. */ -}}
{{- define "pdserve.pod" -}}
serviceAccountName: {{ include "pdserve.fullname" . }}
automountServiceAccountToken: false
# A Service's variables are no settings.
enableServiceLinks: false
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Settings that all processes have. Argument: dict "root" $ "values" VALUES. */ -}}
{{- define "pdserve.env" -}}
- {name: PDSERVE_HOST, value: {{ .root.Values.listen | quote }}}
- {name: PDSERVE_MODEL, value: {{ printf "/models/%s" .root.Values.model.folder | quote }}}
{{- with .root.Values.model.name }}
- {name: PDSERVE_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
- {name: PDSERVE_KEYS, value: /keys}
- {name: PDSERVE_REDIS_URL, value: {{ include "pdserve.redisUrl" .root | quote }}}
- {name: PDSERVE_CLUSTER, value: {{ .root.Values.cluster | quote }}}
- {name: PDSERVE_LOG_FORMAT, value: json}
- {name: PDSERVE_DRAIN_TIMEOUT_S, value: {{ .values.drainTimeoutSeconds | quote }}}
{{- with .root.Values.tracing.endpoint }}
- {name: PDSERVE_OTEL_ENDPOINT, value: {{ . | quote }}}
- {name: PDSERVE_OTEL_SAMPLE_RATIO, value: {{ $.root.Values.tracing.sampleRatio | quote }}}
{{- end }}
{{- range $key, $value := .values.settings }}
- {name: {{ printf "PDSERVE_%s" (upper $key) }}, value: {{ toString $value | quote }}}
{{- end }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Argument: path of the probe. */ -}}
{{- define "pdserve.httpGet" -}}
httpGet: {path: {{ .path }}, port: {{ .port }}}
timeoutSeconds: 5
{{- end }}

{{- /* What routers and nodes may reach. Argument: $. */ -}}
{{- define "pdserve.egress" -}}
# DNS, wherever it is.
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
# The ports of nodes, and of the Redis of this chart.
- ports: [{port: 9000}, {port: 9001}, {port: 6379}]
  to:
    - podSelector:
        matchLabels: {{- include "pdserve.selector" (dict "root" $) | nindent 10 }}
{{- if .Values.redis.url }}
# Another Redis may be anywhere; its ports are those of the URL.
- ports: {{ include "pdserve.redisPorts" .Values.redis.url }}
{{- end }}
{{- with .Values.networkPolicy.extraEgress }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}

{{- /* The ports of a Redis, as a list. Sentinels, and nodes of a Redis Cluster, may name servers at 6379 that are
not in the URL. Argument: the URL. */ -}}
{{- define "pdserve.redisPorts" -}}
{{- $ports := list }}
{{- $default := ternary "26379" "6379" (contains "+sentinel:" .) }}
{{- range splitList "," (regexReplaceAll "^[a-z+]+://([^/]*@)?([^/?]*).*$" . "${2}") }}
{{- $port := regexFind ":[0-9]+$" . | trimPrefix ":" | default $default }}
{{- $ports = append $ports (dict "port" (int $port)) }}
{{- end }}
{{- if contains "+" (splitList ":" . | first) }}
{{- $ports = append $ports (dict "port" 6379) }}
{{- end }}
{{- $ports | uniq | toJson }}
{{- end }}

{{- /* Up at once; down one node a minute, because each node that leaves drains. */ -}}
{{- define "pdserve.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownAfterSeconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end }}

{{- /* The source of the volume with models. A claim that is read-only keeps the group of its files. */ -}}
{{- define "pdserve.models" -}}
{{- if .Values.model.volume }}{{ toYaml .Values.model.volume }}
{{- else -}}
persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}
{{- end }}
{{- end }}
