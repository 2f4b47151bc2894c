"""BERT, RoBERTa and XLM-R of Hugging Face's library: read as ours, and written from ours."""
