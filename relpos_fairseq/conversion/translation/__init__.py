"""Translation models of other libraries as ours, and folders that our models generate from."""
