#!/bin/sh
# Called by mmdebstrap with the image's root directory: turns a minimal system into a small server as people have it.
set -eu
root=$1

# Each host makes its own identity. An empty machine-id, unlike a missing one, does not mean "first boot".
rm -f "$root"/etc/ssh/ssh_host_* "$root"/etc/hostname "$root"/var/lib/dbus/machine-id
: >"$root"/etc/machine-id

# No login prompt on a console that nobody reads; no apt run of its own accord that holds dpkg's lock during a deploy.
for unit in console-getty.service getty@tty1.service apt-daily.timer apt-daily-upgrade.timer; do
  ln -sf /dev/null "$root/etc/systemd/system/$unit"
done

# systemd-nspawn's side of the network, host0, gets its address from a file that is written when the host boots.
ln -sf /lib/systemd/system/systemd-networkd.service "$root"/etc/systemd/system/multi-user.target.wants/

# Logins by key only, as an unprivileged user who may become root.
printf '%s\n' 'PasswordAuthentication no' 'PermitRootLogin no' 'UseDNS no' >"$root"/etc/ssh/sshd_config.d/rehearsal.conf
chroot "$root" useradd --create-home --shell /bin/bash ops
# Proxies reach commands run by sudo, as on hosts behind one.
printf '%s\n' 'ops ALL=(ALL) NOPASSWD: ALL' \
  'Defaults env_keep += "HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy"' >"$root"/etc/sudoers.d/ops
chmod 0440 "$root"/etc/sudoers.d/ops
printf 'LANG=C.UTF-8\n' >"$root"/etc/default/locale
