"""`relpos finetune xtreme`: English training, and every language after it (004, section 4.2)."""
