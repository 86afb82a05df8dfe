"""What the machine has and allows, told without torch: devices, memory, disk space, limits on a process."""
