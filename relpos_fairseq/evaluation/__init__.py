"""What relpos evaluate qa reads, scores and writes."""
