{{- define "labels" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]{0,39}$" .root.Release.Name) }}{{ fail "the release's name: a letter, then at most 39 letters, digits or -, as names of Services that begin with it must be" }}{{ end -}}
app.kubernetes.io/name: learning-sidecar
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "image" -}}
{{ .root.Values.image.prefix }}-{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false # SIDECAR_PROXY_PORT, of the Service sidecar-proxy, would be an unknown setting
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "container" -}}
name: {{ .component }}
image: {{ include "image" . }}
{{- with .command }}
command: {{ toJson . }}
{{- end }}
{{- with .args }}
args: {{ toJson . }}
{{- end }}
env:
  - {name: SIDECAR_STATE_DIR, value: /state}
  - {name: SIDECAR_LEARNER__ADAPTERS_DIR, value: {{ .root.Values.adapters.path | quote }}}
  - {name: SIDECAR_PROXY__HOST, value: 0.0.0.0}
  - {name: SIDECAR_PROXY__PORT, value: "8080"}
  - {name: SIDECAR_ADMIN__HOST, value: 0.0.0.0}
  - {name: SIDECAR_ADMIN__PORT, value: "8081"}
envFrom:
  - secretRef: {name: {{ .root.Values.secret | quote }}}
resources: {{ toJson .resources }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: settings, mountPath: /etc/learning-sidecar}
  - {name: state, mountPath: /state}
  - {name: tmp, mountPath: /tmp}
  - {name: secrets, mountPath: /run/secrets/sidecar, readOnly: true}
{{- range .mounts }}
  - {{ toJson . }}
{{- end }}
{{- end }}

{{- define "volumes" -}}
- name: settings
  configMap: {name: {{ .root.Release.Name | quote }}}
- name: tmp
  emptyDir: {}
- name: secrets
  secret: {secretName: {{ .root.Values.secret | quote }}, defaultMode: 288} # 0440
{{- end }}

