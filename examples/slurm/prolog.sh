#!/bin/sh
# Slurm's Prolog, as root on each node before a job: the mount must answer, else the node is drained by Slurm
# (a prolog that fails does that) instead of a job writing into the empty directory below.
set -eu
mountpoint=${CKPTFS_MOUNTPOINT:-/mnt/ckpt}

# One that is dead is cleared and made again by the service.
ckptfs doctor "$mountpoint" --fix >/dev/null 2>&1 || true
systemctl start "ckptfs@$(systemd-escape --path "$mountpoint").service"
timeout 30 ckptfs status "$mountpoint" >/dev/null

# A folder for the job's user, so that the job need not be root to begin a run.
[ -z "${SLURM_JOB_USER:-}" ] || install -d -o "$SLURM_JOB_USER" -m 0750 "$mountpoint/$SLURM_JOB_USER"
