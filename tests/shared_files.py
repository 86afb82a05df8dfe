"""What lies in /dev/shm, where nothing of ours may stay."""

import os


def shared_memory_files() -> set[str]:
    """Names; a directory there is no block of shared memory."""
    with os.scandir("/dev/shm") as entries:
        return {entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)}
