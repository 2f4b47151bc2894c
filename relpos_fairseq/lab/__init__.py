"""Comparisons of schemes, benchmarks, and a made-up language: what no training needs, and nothing but `cli` imports."""
