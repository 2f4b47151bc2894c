"""What benchmark scripts share; needs torch and nothing else."""
