"""Pictures of a checkpoint: what its positions have learned, and how it attends."""
