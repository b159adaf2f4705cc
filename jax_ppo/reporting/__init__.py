"""What a run tells its user: console lines, curves, TensorBoard, the summary."""
