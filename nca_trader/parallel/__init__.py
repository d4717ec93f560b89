"""Where programs run: devices, processes, hosts."""
