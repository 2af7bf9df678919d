{{/* Labels by which objects, and the pods of one component, are told apart: (list . "api") */}}
{{- define "trio-pool-serve.labels" -}}
app.kubernetes.io/name: trio-pool-serve
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of the engines of one model: (list $ $model) */}}
{{- define "trio-pool-serve.engineLabels" -}}
{{ include "trio-pool-serve.labels" (list (index . 0) "engine") }}
model: {{ (index . 1).id }}
{{- end }}

{{/* An image: (list . .Values.api.image) */}}
{{- define "trio-pool-serve.image" -}}
{{ (index . 1).repository }}:{{ (index . 1).tag | default (index . 0).Chart.AppVersion }}
{{- end }}

{{/* What the pods of both kinds have in common. */}}
{{- define "trio-pool-serve.podSettings" -}}
automountServiceAccountToken: false
# Otherwise a Service called trio-pool-serve sets TRIO_POOL_SERVE_PORT=tcp://…, which is the setting --port.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add .Values.drainTimeoutSeconds 30 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "trio-pool-serve.containerSettings" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
env:
  - name: HF_HUB_OFFLINE
    value: "1"
  # Empty where the cluster does not copy the node's zone to its pods: then there is no preference.
  - name: ZONE
    valueFrom:
      fieldRef:
        fieldPath: metadata.labels['topology.kubernetes.io/zone']
{{- end }}

{{- define "trio-pool-serve.volumes" -}}
- name: models
  {{- toYaml .Values.modelVolume | nindent 2 }}
- name: engine-key
  secret:
    secretName: {{ .Values.secrets.engineKey }}
    defaultMode: 0440
{{- end }}
