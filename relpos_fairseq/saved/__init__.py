"""What training or `relpos convert` saved, opened by every command in one way."""
