"""XTREME's recipe: models fine-tuned on English, evaluated in every language that is there."""
