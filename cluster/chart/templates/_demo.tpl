{{/* The demo's directory: one group, each person with a key, and what `demo.ldif` adds. The image's slapd.conf names the base. */}}
{{- define "minivm.demo.ldif" -}}
{{- $base := "dc=minivm,dc=demo" -}}
dn: {{ $base }}
objectClass: dcObject
objectClass: organization
o: minivm demo
dc: minivm

dn: ou=people,{{ $base }}
objectClass: organizationalUnit
ou: people

dn: ou=groups,{{ $base }}
objectClass: organizationalUnit
ou: groups

dn: cn=researchers,ou=groups,{{ $base }}
objectClass: posixGroup
cn: researchers
gidNumber: 20000
{{- range $i, $name := keys .Values.demo.users | sortAlpha }}

dn: uid={{ $name }},ou=people,{{ $base }}
objectClass: inetOrgPerson
objectClass: posixAccount
objectClass: ldapPublicKey
uid: {{ $name }}
cn: {{ title $name }}
sn: {{ title $name }}
uidNumber: {{ add 20001 $i }}
gidNumber: 20000
homeDirectory: /home/{{ $name }}
loginShell: /bin/bash
sshPublicKey: {{ index $.Values.demo.users $name }}
{{- end }}
{{- with .Values.demo.ldif }}

{{ . }}
{{- end }}
{{- end -}}

{{- define "minivm.demo.sssd" -}}
[sssd]
services = nss, pam, ssh
domains = demo

[domain/demo]
id_provider = ldap
access_provider = permit
# Keys only: nobody has a password.
auth_provider = none
sudo_provider = none
ldap_uri = ldap://{{ include "minivm.fullname" . }}-demo
ldap_search_base = dc=minivm,dc=demo
ldap_schema = rfc2307
ldap_user_ssh_public_key = sshPublicKey
ldap_id_use_start_tls = false
ldap_network_timeout = 2
ldap_opt_timeout = 3
enumerate = false
# Of a directory that is away for a second, sssd by itself asks again after 60 to 90 s, then after twice that, up to an
# hour; until then a pod without a cache knows nobody and lets nobody in.
offline_timeout = 5
offline_timeout_random_offset = 5
offline_timeout_max = 60
entry_cache_timeout = 300
{{ end -}}
