"""What evaluate_qa.py reads, scores and writes."""
