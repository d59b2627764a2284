"""The machine: its devices and disks, the processes started on them, and runs that outlive the terminal."""
