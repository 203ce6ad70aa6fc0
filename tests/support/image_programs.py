"""Programs of the images with rights of their own."""

from __future__ import annotations

# What may run with somebody else's rights. A new one is a decision, not a dependency.
SETUID = {
    "/usr/bin/chage", "/usr/bin/chfn", "/usr/bin/chsh", "/usr/bin/expiry", "/usr/bin/gpasswd", "/usr/bin/mount",
    "/usr/bin/newgrp", "/usr/bin/passwd", "/usr/bin/ssh-agent", "/usr/bin/su", "/usr/bin/umount",
    "/usr/lib/openssh/ssh-keysign", "/usr/sbin/unix_chkpwd", "/usr/lib/dbus-1.0/dbus-daemon-launch-helper",
}  # fmt: skip
