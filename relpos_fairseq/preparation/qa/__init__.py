"""Questions and answers of SQuAD's format."""
