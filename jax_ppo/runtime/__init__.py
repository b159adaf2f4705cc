"""The machine: meshes and shardings, processes, compilation."""
