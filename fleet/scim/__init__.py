"""The SCIM receiver: an identity provider's users and groups become `people.yaml` in a Secret."""
