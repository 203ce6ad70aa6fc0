# What the init found out about this pod, for people in a shell; written at boot, also where the root is read-only.
[ ! -r /run/minivm/profile.sh ] || . /run/minivm/profile.sh
