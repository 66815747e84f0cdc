"""Traffic, compiled binaries and times of every op, beside its peers (`python -m bench`)."""
