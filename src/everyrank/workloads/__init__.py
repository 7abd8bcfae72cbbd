"""The built-in workloads, each a file as a person would write one. Their names are in `workload.BUILT_IN`."""
