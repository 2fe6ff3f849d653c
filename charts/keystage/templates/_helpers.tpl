{{/* Names and pieces that several templates share. */}}

{{- define "keystage.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "keystage.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: {{ .Chart.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* What finds the pods of a component: (dict "root" . "component" "gateway"). */}}
{{- define "keystage.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* (dict "root" . "repository" "control") */}}
{{- define "keystage.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ . | trimSuffix "/" }}/{{ end }}{{ .repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "keystage.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "keystage.functionNamespace" -}}
{{- .Values.functions.namespace | default (printf "%s-fn" .Release.Namespace) | trunc 63 -}}
{{- end }}

{{/* Whether the functions live in a namespace of their own; empty: no. */}}
{{- define "keystage.hasOwnFunctionNamespace" -}}
{{- if ne (include "keystage.functionNamespace" .) .Release.Namespace }}true{{ end -}}
{{- end }}

{{/* Empty where the controller steers another OpenFaaS gateway: then there is neither gateway nor KeysManager. */}}
{{- define "keystage.isWhole" -}}
{{- if not .Values.openfaas.gateway }}true{{ end -}}
{{- end }}

{{- define "keystage.hasKeysManager" -}}
{{- if and (include "keystage.isWhole" .) .Values.keysmanager.enabled }}true{{ end -}}
{{- end }}

{{/* Folder of a node that KeysManager and stage pods share: only the socket for pods lies there. */}}
{{- define "keystage.nodeFolder" -}}
/run/keystage/{{ .Release.Namespace }}
{{- end }}

{{- define "keystage.podSecurity" -}}
runAsNonRoot: true
runAsUser: 12000
runAsGroup: 12000
fsGroup: 12000
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "keystage.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Where pods of a component run; (dict "root" . "component" name "values" .Values.name). */}}
{{- define "keystage.scheduling" -}}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
# On a node that is lost it is replaced after ten seconds, not after the default of five minutes.
tolerations:
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 10}
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 10}
{{- with .values.tolerations }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Replicas on several nodes while there are several; a node that is down keeps nobody from starting. */}}
{{- define "keystage.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "keystage.selector" . | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
{{- end }}

{{/*
A container's environment: what the chart sets, and what a person adds (name to value), which must not be the same: a
list with one name twice cannot be applied. A whole number is written as one, not as 1e+07.
(dict "own" text "extra" map "where" "gateway.env")
*/}}
{{- define "keystage.env" -}}
{{- .own | trim }}
{{- $own := list -}}
{{- range fromYamlArray .own }}{{ $own = append $own .name }}{{ end }}
{{- range $name, $value := .extra }}
{{- if has $name $own }}
{{- fail (printf "%s: %s is set by the chart itself; use the value that stands for it" $.where $name) }}
{{- end }}
- name: {{ $name }}
  {{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}
  value: {{ int64 $value | quote }}
  {{- else }}
  value: {{ $value | toString | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Where both Secrets and both namespaces are, for gateway and controller. */}}
{{- define "keystage.clusterEnv" -}}
- name: KEYSTAGE_BACKEND
  value: kubernetes
- name: KEYSTAGE_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: KEYSTAGE_FUNCTION_NAMESPACE
  value: {{ include "keystage.functionNamespace" . }}
- name: KEYSTAGE_WIRE_KEY_FILE
  value: /var/run/keystage/wire/key
{{- end }}

{{- define "keystage.wireVolume" -}}
- name: wire
  secret:
    secretName: keystage-wire
    defaultMode: 0440
{{- end }}

{{- define "keystage.wireMount" -}}
- name: wire
  mountPath: /var/run/keystage/wire
  readOnly: true
{{- end }}

{{- define "keystage.bundlesVolume" -}}
{{- if .Values.bundles.hostPath }}
- name: bundles
  hostPath:
    path: {{ .Values.bundles.hostPath }}
    type: Directory
{{- else if .Values.bundles.persistentVolumeClaim }}
- name: bundles
  persistentVolumeClaim:
    claimName: {{ .Values.bundles.persistentVolumeClaim }}
    readOnly: true
{{- end }}
{{- end }}

{{/* What the controller puts into every pod that it makes. */}}
{{- define "keystage.podEnv" -}}
{{- $pods := .Values.pods -}}
- name: KEYSTAGE_POD_KEYSMANAGER
  value: {{ ternary "1" "0" (include "keystage.hasKeysManager" . | not | not) | quote }}
- name: KEYSTAGE_POD_PARKED
  value: {{ int64 $pods.parkedPerPipeline | quote }}
- name: KEYSTAGE_POD_REQUESTS
  value: {{ include "keystage.pairs" $pods.requests | quote }}
- name: KEYSTAGE_POD_RUN_BYTES
  value: {{ int64 $pods.runBytes | quote }}
- name: KEYSTAGE_POD_USER
  value: {{ int64 $pods.user | quote }}
- name: KEYSTAGE_POD_TIMEOUT_S
  value: {{ .Values.gateway.timeoutSeconds | quote }}
- name: KEYSTAGE_POD_WIRE_PLAIN
  value: {{ ternary "1" "0" .Values.wire.plain | quote }}
- name: KEYSTAGE_POD_IMAGE_PULL_POLICY
  value: {{ .Values.image.pullPolicy }}
{{- with .Values.image.pullSecrets }}
- name: KEYSTAGE_POD_IMAGE_PULL_SECRETS
  value: {{ join "," . | quote }}
{{- end }}
{{- with $pods.clusterDomain }}
- name: KEYSTAGE_POD_CLUSTER_DOMAIN
  value: {{ . }}
{{- end }}
{{- if include "keystage.hasBundles" . }}
- name: KEYSTAGE_POD_BUNDLES_MOUNT_PATH
  value: {{ .Values.bundles.mountPath }}
{{- end }}
{{- with .Values.bundles.hostPath }}
- name: KEYSTAGE_POD_BUNDLES_HOST_PATH
  value: {{ . }}
{{- end }}
{{- with .Values.bundles.persistentVolumeClaim }}
- name: KEYSTAGE_POD_BUNDLES_CLAIM
  value: {{ . }}
{{- end }}
{{- with .Values.functions.redis }}
{{- if .secretName }}
- name: KEYSTAGE_POD_REDIS_SECRET
  value: {{ .secretName }}
- name: KEYSTAGE_POD_REDIS_KEY
  value: {{ .secretKey }}
{{- end }}
{{- end }}
{{- if and .Values.gpu.enabled .Values.gpu.runtimeClassName }}
- name: KEYSTAGE_POD_GPU_RUNTIME_CLASS
  value: {{ .Values.gpu.runtimeClassName }}
{{- end }}
{{- if .Values.gpu.besideVendorPlugin }}
- name: KEYSTAGE_BESIDE_VENDOR_PLUGIN
  value: "1"
{{- end }}
- name: KEYSTAGE_NODE_PODS
  value: {{ ternary "1" "0" .Values.controller.seesAllPods | quote }}
{{- end }}

{{- define "keystage.hasBundles" -}}
{{- if or .Values.bundles.hostPath .Values.bundles.persistentVolumeClaim }}true{{ end -}}
{{- end }}

{{/* A map as a label selector in text. */}}
{{- define "keystage.pairs" -}}
{{- $pairs := list -}}
{{- range $key, $value := . }}{{ $pairs = append $pairs (printf "%s=%v" $key $value) }}{{ end -}}
{{- join "," $pairs -}}
{{- end }}
