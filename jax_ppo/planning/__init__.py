"""Memory that a run needs per device and phase, planned without data, weights or accelerator."""
