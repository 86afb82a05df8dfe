"""Model directories in Hugging Face's form, checked, read and written. `flat_weights.py` alone loads torch."""
