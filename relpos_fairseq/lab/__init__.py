"""Comparisons of schemes and benchmarks: what no training needs, and nothing but `cli` imports."""
